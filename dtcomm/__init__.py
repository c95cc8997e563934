"""dtcomm: collective communication and gradient compression for PyTorch."""

from dtcomm import env

__version__ = "0.1.0"

# Another build of the native modules, say one with sanitizers, stands in for the one beside this file.
if env.get("DTCOMM_NATIVE_DIR"):
    __path__.insert(0, env.get("DTCOMM_NATIVE_DIR"))

from dtcomm.codecs import codec
from dtcomm.collectives import (
    Work,
    all_gather,
    all_reduce,
    all_reduce_coalesced,
    broadcast,
    empty,
    reduce_scatter,
    release,
)
from dtcomm.kernels.ops import decode, encode

__all__ = [
    "Work",
    "all_gather",
    "all_reduce",
    "all_reduce_coalesced",
    "broadcast",
    "codec",
    "decode",
    "empty",
    "encode",
    "reduce_scatter",
    "release",
]
