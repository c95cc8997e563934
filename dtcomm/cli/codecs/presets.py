"""The codecs that ``dtcomm codecs`` shows by default: every registered name and a selection of options."""

from __future__ import annotations

from collections.abc import Sequence

from dtcomm.codecs import Codec, codec
from dtcomm.codecs.spec import CODECS

#: Options shown in addition to the defaults, by codec name.
VARIANTS: dict[str, tuple[str, ...]] = {
    "int8": ("block=256", "symmetric=false", "round=stochastic"),
    "int4": (
        "block=128",
        "symmetric=false",
        "round=stochastic",
        "rotate=hadamard",
        "spikes=1",
        "block=128,rotate=hadamard",
        "block=128,spikes=1",
    ),
    "int3": ("symmetric=false", "rotate=hadamard", "block=128,rotate=hadamard", "block=128,spikes=1"),
    "int2": (
        "symmetric=false",
        "symmetric=false,rotate=hadamard",
        "symmetric=false,spikes=1",
        "block=128,symmetric=false,rotate=hadamard",
        "block=128,symmetric=false,spikes=1",
    ),
    "fp8_e4m3": ("round=stochastic",),
    "mxfp8": ("element=e5m2",),
    "mxfp4": ("rotate=hadamard",),
    "sign": ("rotate=hadamard",),
    "topk": ("ratio=0.1", "ratio=0.1,values=int8"),
    "randk": ("ratio=0.1", "positions=shared"),
    "exact": ("bits=16",),
}


def default_codecs() -> list[Codec]:
    """Return the codecs that are shown if the user names none."""
    return [
        codec(spec)
        for name in CODECS
        for spec in (name, *(f"{name}:{options}" for options in VARIANTS.get(name, ())))
    ]


def select_codecs(only: Sequence[Codec], also: Sequence[Codec]) -> list[Codec]:
    """Return ``only``, or the default codecs if it is empty, followed by ``also``, without duplicates."""
    return list(dict.fromkeys([*(only or default_codecs()), *also]))
