"""dtcomm: collective communication and gradient compression for PyTorch."""

import os

__version__ = "0.1.0"

# Another build of the native modules, say one with sanitizers, stands in for the one beside this file.
if os.environ.get("DTCOMM_NATIVE_DIR"):
    __path__.insert(0, os.environ["DTCOMM_NATIVE_DIR"])
