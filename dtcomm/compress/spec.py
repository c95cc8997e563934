"""Compression schemes and their spec strings.

A scheme is either a codec, which any collective takes, or a compressor with state of its own (`PowerSGD`, `DGC`).
Policies, the DDP hook, `LocalSGD` and the autotuner parse specs here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch

from dtcomm.codecs import Codec, codec
from dtcomm.compress import dgc, powersgd
from dtcomm.compress.dgc import DGC
from dtcomm.compress.powersgd import PowerSGD

Scheme: TypeAlias = Codec | PowerSGD | DGC

#: Parsers of the compressors, by the name that their specs start with.
COMPRESSORS: dict[str, Callable[[str], PowerSGD | DGC]] = {powersgd.NAME: PowerSGD.parse, dgc.NAME: DGC.parse}
#: The option that names the codec of what a sparse or low-rank scheme sends.
INNER_CODEC_OPTIONS = {"topk": "values", "randk": "values", dgc.NAME: "values", powersgd.NAME: "factors"}


def parse_scheme(spec: str | Scheme) -> Scheme:
    """Return the scheme that a spec describes; a scheme is returned unchanged.

    Args:
        spec: A codec spec (``int8:block=64``), a compressor spec (``powersgd:rank=4``, ``dgc:ratio=0.001``) or a
            scheme.

    Returns:
        A codec, or a compressor's description such as `PowerSGD` or `DGC`.

    Raises:
        TypeError: ``spec`` is neither a string nor a scheme.
        ValueError: The spec is wrong; the message names the part and what is valid there. Specs of the form ``A/B``
            are refused, because compressors encode a tensor once, with one codec for all levels of a hierarchy.
    """
    if isinstance(spec, PowerSGD | DGC):
        return spec
    if not isinstance(spec, str):
        return codec(spec)
    head, slash, tail = spec.strip().partition("/")
    name, colon, _ = head.partition(":")
    if slash:
        meaning = "A/B means codec A inside hosts and codec B between hosts"
        if option := INNER_CODEC_OPTIONS.get(name):
            raise ValueError(
                f"spec: {spec}: {meaning}; the codec of what {name} sends is an option: "
                f"{head}{',' if colon else ':'}{option}={tail}"
            )
        raise ValueError(f"spec: {spec}: {meaning}, which is not supported here; valid: one codec")
    return COMPRESSORS[name](spec) if name in COMPRESSORS else codec(spec)


def wire_codec(scheme: Scheme) -> Codec:
    """Return the codec in which the payload of a scheme travels; PowerSGD sends factors instead of the tensor."""
    assert not isinstance(scheme, PowerSGD)
    return scheme.topk if isinstance(scheme, DGC) else scheme


def matrix_shape(tensor: torch.Tensor) -> tuple[int, int]:
    """Return (rows, columns) of a gradient as compressors see it: the first dimension by all others."""
    rows = tensor.shape[0]
    return rows, tensor.numel() // rows if rows else 0
