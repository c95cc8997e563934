"""Codecs to test, read off the registry: a codec or an option that is added there is tested from that day on."""

from __future__ import annotations

import dataclasses
import itertools

from dtcomm.codecs import Codec, codec
from dtcomm.codecs.spec import CODECS

# Values of each option worth testing, its default among them.
VALUES: dict[str, tuple[object, ...]] = {
    "block": (16, 32, 64, 1024, 4096),
    "scale": ("bf16", "fp32"),
    "symmetric": (True, False),
    "round": ("nearest", "stochastic"),
}


def option_sets(name: str) -> list[Codec]:
    """Every combination of the options of the codec called `name`."""
    entry = CODECS[name]
    options = entry.options()
    values = [VALUES[option] for option in options]
    return [
        entry.make(**entry.fixed, **dict(zip(options, chosen, strict=True)))
        for chosen in itertools.product(*values)
    ]


def everything() -> list[Codec]:
    """Every codec with every combination of options."""
    return [each for name in CODECS for each in option_sets(name)]


def few() -> list[Codec]:
    """Every codec with its defaults, and with each option changed alone."""
    found = []
    for name, entry in CODECS.items():
        plain = codec(name)
        found.append(plain)
        for option, field in entry.options().items():
            found += [
                dataclasses.replace(plain, **{option: value})
                for value in VALUES[option]
                if value != field.default
            ]
    return found
