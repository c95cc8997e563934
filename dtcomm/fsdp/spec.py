"""Compression specs of sharded models: what is done to gradients and parameters, as text.

A spec is a codec's spec, or two of them separated by a slash: ``int8/int4`` is int8 inside hosts and int4 between
hosts. A prefix may precede them:

- ``delta:`` (parameters) sends differences from the values that the peers have, instead of the values: the weight
  differences of SDP4Bit (Jia et al. 2024, arXiv:2410.15526).
- ``ef:`` (gradients) is error feedback: the error of each encoding is added to the next gradient.
- ``loco:`` (gradients) is the error feedback of LoCo (Xie et al. 2024, arXiv:2407.04480): a moving average of the
  error, in 8 bits, which is reset every 1024 calls.
"""

from __future__ import annotations

from dataclasses import dataclass

from dtcomm.codecs import Codec, parse_levels

#: Prefixes that are valid for gradients, and for parameters; the empty one is no prefix.
FEEDBACKS = ("", "ef", "loco")
PARAMETER_PREFIXES = ("", "delta")


@dataclass(frozen=True)
class Preset:
    """The specs of a published method."""

    parameters: str
    gradients: str


PRESETS = {
    # qwZ is block-quantized weights; qgZ is 4-bit gradients, which each hop quantizes once, after a rotation.
    "zero++": Preset("int8:block=256", "int4:block=128,rotate=hadamard/int4:block=128,rotate=hadamard"),
    "loco": Preset("none", "loco:int4:block=128"),
    "sdp4bit": Preset("delta:int4:block=128", "int8:block=128/int4:block=128,rotate=hadamard"),
}


@dataclass(frozen=True)
class CompressionSpec:
    """A parsed spec.

    Attributes:
        inside: Codec inside hosts, or everywhere.
        between: Codec between hosts; None if it is ``inside``.
        prefix: ``"ef"``, ``"loco"``, ``"delta"`` or empty.
    """

    inside: Codec
    between: Codec | None
    prefix: str

    @property
    def codec_spec(self) -> str | Codec:
        """The codec, or the spec of both, as the collectives take it."""
        return self.inside if self.between is None else f"{self.inside}/{self.between}"

    def codecs(self) -> tuple[Codec, ...]:
        """Return the codecs of all levels."""
        return (self.inside,) if self.between is None else (self.inside, self.between)

    def __str__(self) -> str:
        return f"{self.prefix}:{self.codec_spec}" if self.prefix else str(self.codec_spec)


def parse_spec(spec: str | Codec, prefixes: tuple[str, ...], argument: str) -> CompressionSpec:
    """Parse a spec.

    Args:
        spec: The spec, or a codec.
        prefixes: The valid prefixes, `FEEDBACKS` or `PARAMETER_PREFIXES`.
        argument: Name of the argument, for error messages.

    Raises:
        TypeError: ``spec`` is neither a string nor a codec.
        ValueError: The prefix is not one of ``prefixes``, or a codec is wrong.
    """
    if isinstance(spec, Codec):
        return CompressionSpec(spec, None, "")
    if not isinstance(spec, str):
        raise TypeError(f"{argument}: expected a spec or a Codec, got {type(spec).__name__}")
    prefix, colon, codecs = spec.partition(":")
    if not colon or prefix not in ("delta", "ef", "loco"):
        prefix, codecs = "", spec
    elif prefix not in prefixes:
        valid = " or ".join(f"'{name}:'" for name in prefixes if name)
        raise ValueError(
            f"{argument}: '{prefix}:' is not valid here; use a codec, optionally prefixed by {valid}"
        )
    return CompressionSpec(*parse_levels(codecs), prefix)


def find_preset(name: str) -> Preset:
    """Return the preset of this name; ValueError lists the valid names."""
    if name not in PRESETS:
        raise ValueError(f"preset: {name!r} is not one of {', '.join(PRESETS)}")
    return PRESETS[name]
