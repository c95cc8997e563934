"""dtcomm: collective communication and gradient compression for PyTorch."""

__version__ = "0.1.0"
