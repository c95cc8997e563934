"""Codecs: byte layouts as frozen values. See :func:`codec`; docs/wire-format.md says what the bytes mean."""

from dtcomm.codecs.base import Codec, Layout
from dtcomm.codecs.cast import Bf16, Fp16, Uncompressed
from dtcomm.codecs.float8 import Float8
from dtcomm.codecs.integer import Integer
from dtcomm.codecs.spec import codec, names

__all__ = ["Bf16", "Codec", "Float8", "Fp16", "Integer", "Layout", "Uncompressed", "codec", "names"]
