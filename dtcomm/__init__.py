"""dtcomm: collective communication and gradient compression for PyTorch."""

from dtcomm import env

__version__ = "0.1.0"

# Another build of the native modules, say one with sanitizers, stands in for the one beside this file.
if env.get("DTCOMM_NATIVE_DIR"):
    __path__.insert(0, env.get("DTCOMM_NATIVE_DIR"))
