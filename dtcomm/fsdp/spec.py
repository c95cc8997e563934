"""What is done to parameters and gradients, as text.

A recipe is a codec's spec, or two of them for the two levels of several hosts (``int8/int4``: int8 inside a host, int4
between hosts), after an optional word:

- ``delta:`` (parameters) sends what changed since the peers were last told, instead of the values: SDP4Bit's weight
  differences (Jia et al. 2024, arXiv:2410.15526).
- ``ef:`` and ``loco:`` (gradients) keep what encodings lose; loco as a moving average in 8 bits, forgotten every 1024
  calls (LoCo, Xie et al. 2024, arXiv:2407.04480).
"""

from __future__ import annotations

from dataclasses import dataclass

from dtcomm.codecs import Codec, codec

FEEDBACKS = ("", "ef", "loco")


@dataclass(frozen=True)
class Preset:
    """The two recipes of a published method."""

    parameters: str
    gradients: str


PRESETS = {
    # qwZ: block-quantised weights; qgZ: 4-bit gradients, each hop quantised once, in blocks that a rotation evens out.
    "zero++": Preset("int8:block=256", "int4:block=128,rotate=hadamard/int4:block=128,rotate=hadamard"),
    "loco": Preset("none", "loco:int4:block=128"),
    "sdp4bit": Preset("delta:int4:block=128", "int8:block=128/int4:block=128,rotate=hadamard"),
}


@dataclass(frozen=True)
class Recipe:
    """A parsed recipe: ``word`` before the codecs, ``between`` only where levels differ."""

    inside: Codec
    between: Codec | None
    word: str

    @property
    def spec(self) -> str | Codec:
        """What the collectives take."""
        return self.inside if self.between is None else f"{self.inside}/{self.between}"

    def codecs(self) -> tuple[Codec, ...]:
        """Of every level."""
        return (self.inside,) if self.between is None else (self.inside, self.between)

    def __str__(self) -> str:
        return f"{self.word}:{self.spec}" if self.word else str(self.spec)


def parse(given: str | Codec, words: tuple[str, ...], argument: str) -> Recipe:
    """The recipe that ``given`` says; ValueError naming ``argument`` for a word that is not one of ``words``."""
    if isinstance(given, Codec):
        return Recipe(given, None, "")
    if not isinstance(given, str):
        raise TypeError(f"{argument}: expected a spec or a Codec, got {type(given).__name__}")
    word, colon, rest = given.partition(":")
    if not colon or word not in ("delta", *FEEDBACKS[1:]):
        word, rest = "", given
    elif word not in words:
        valid = ", ".join(f"{each}:" for each in words if each)
        raise ValueError(f"{argument}: {word}: does not go with them; expected a codec, or one after {valid}")
    inside, slash, between = rest.partition("/")
    return Recipe(codec(inside), codec(between) if slash else None, word)


def preset(name: str) -> Preset:
    """ValueError that lists what is there."""
    found = PRESETS.get(name)
    if found is None:
        raise ValueError(f"preset: {name!r} is not one of {', '.join(PRESETS)}")
    return found
