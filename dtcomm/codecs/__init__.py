"""Codecs: byte layouts as frozen values. See :func:`codec`; docs/reference/wire-format.md says what the bytes mean."""

from dtcomm.codecs.base import Codec, Layout
from dtcomm.codecs.cast import Bf16, Fp16, Uncompressed
from dtcomm.codecs.float8 import Float8
from dtcomm.codecs.integer import Integer
from dtcomm.codecs.mx import Mxfp4, Mxfp8
from dtcomm.codecs.reproducible import Exact
from dtcomm.codecs.sign import Sign
from dtcomm.codecs.sparse import RandK, TopK
from dtcomm.codecs.spec import codec, names, parse_levels

__all__ = [
    "Bf16",
    "Codec",
    "Exact",
    "Float8",
    "Fp16",
    "Integer",
    "Layout",
    "Mxfp4",
    "Mxfp8",
    "RandK",
    "Sign",
    "TopK",
    "Uncompressed",
    "codec",
    "names",
    "parse_levels",
]
