"""Codecs: byte layouts as frozen values, parsed from spec strings by :func:`codec`.

Each class documents a codec: bits, layout, options with defaults, paper. docs/reference/wire-format.md specifies the
bytes, and `dtcomm.kernels.reference` has the arithmetic in numpy. A codec is registered in `dtcomm.codecs.spec`;
:func:`custom` registers one of your own, written in Python.
"""

from dtcomm.codecs.base import Codec
from dtcomm.codecs.base import Layout as Layout
from dtcomm.codecs.cast import Bf16, Exact, Fp16, Lossless, Uncompressed
from dtcomm.codecs.integer import Integer, Sign, VariableInteger
from dtcomm.codecs.minifloat import Float8, Mxfp4, Mxfp8, Nvfp4
from dtcomm.codecs.python_codec import PythonCodec
from dtcomm.codecs.sparse import RandK, TopK
from dtcomm.codecs.spec import codec, custom, names, parse_levels

__all__ = [
    "Bf16",
    "Codec",
    "Exact",
    "Float8",
    "Fp16",
    "Integer",
    "Lossless",
    "Mxfp4",
    "Mxfp8",
    "Nvfp4",
    "PythonCodec",
    "RandK",
    "Sign",
    "TopK",
    "Uncompressed",
    "VariableInteger",
    "codec",
    "custom",
    "names",
    "parse_levels",
]
