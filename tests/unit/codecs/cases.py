"""Codecs to test, read off the registry: a codec or an option that is added there is tested from that day on."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

from dtcomm.codecs import Codec, codec
from dtcomm.codecs.spec import CODECS

# Values of each option worth testing, its default among them.
VALUES: dict[str, tuple[object, ...]] = {
    "block": (16, 32, 128, 256, 4096),
    "element": ("e4m3", "e5m2"),
    "scale": ("bf16", "fp32"),
    "symmetric": (True, False),
    "round": ("nearest", "stochastic"),
    "rotate": ("none", "hadamard"),
    "spikes": (0, 1),
    "bits": (16, 32),
    "positions": ("own", "shared"),
    "ratio": (0.01, 0.0833, 0.25, 1.0),
    "values": ("bf16", "fp16", "fp32", "int8", "int3"),
}

# Options whose values do not all go together, by name: sets of which each is whole.
_SPARSE = ({"values": ("bf16", "fp16", "fp32"), "round": ("nearest",)}, {"values": ("int8", "int3")})
APART: dict[str, tuple[dict[str, tuple[object, ...]], ...]] = {"topk": _SPARSE, "randk": _SPARSE}


def covering(columns: Sequence[Sequence[object]]) -> list[tuple[object, ...]]:
    """Rows, few and always the same, in which every value of a column meets every value of every other one."""
    if len(columns) < 2:
        return list(itertools.product(*columns))
    places = [[(a, x) for x in range(len(column))] for a, column in enumerate(columns)]
    missing = {pair for two in itertools.combinations(places, 2) for pair in itertools.product(*two)}
    rows = []
    while missing:
        # A row is grown from a pair that is still missing, column by column, by what covers most.
        row = dict(min(missing))
        for place in places:
            met = {
                cell: sum(tuple(sorted((cell, other))) in missing for other in row.items()) for cell in place
            }
            if place[0][0] not in row:
                row.update([max(place, key=met.__getitem__)])
        missing -= set(itertools.combinations(sorted(row.items()), 2))
        rows.append([row[column] for column in range(len(columns))])
    return [tuple(column[i] for column, i in zip(columns, row, strict=True)) for row in rows]


def option_sets(name: str) -> list[Codec]:
    """The codec called `name` with options such that every two values of different options meet."""
    entry = CODECS[name]
    options = entry.options()
    return [
        entry.make(**entry.fixed, **dict(zip(options, chosen, strict=True)))
        for some in APART.get(name, ({},))
        for chosen in covering([some.get(option, VALUES[option]) for option in options])
    ]


def everything() -> list[Codec]:
    """Every codec with its defaults, and with options such that every two values meet."""
    return list(dict.fromkeys(each for name in CODECS for each in [codec(name), *option_sets(name)]))


def few() -> list[Codec]:
    """Every codec with its defaults, and with each option changed alone: in the first codec of a type, and once
    more in the others, which take turns (int7 to int2 share what int8 has)."""
    found = []
    siblings: dict[object, list[str]] = {}
    for name, entry in CODECS.items():
        siblings.setdefault(entry.make, []).append(name)
    for first, *others in siblings.values():
        changes = [
            {option: value}
            for option, field in CODECS[first].options().items()
            for value in VALUES[option]
            if value != field.default
        ]
        found += [codec(name) for name in (first, *others)]
        found += [dataclasses.replace(codec(first), **change, **_with(first, change)) for change in changes]
        turns = zip(itertools.cycle(others), changes) if others else ()
        found += [dataclasses.replace(codec(name), **change) for name, change in turns]
    return found


def _with(name: str, change: dict[str, object]) -> dict[str, object]:
    """What must change, too, where `change` is made to the codec called `name`."""
    if name not in APART:
        return {}
    fields = CODECS[name].options()
    some = next(
        some
        for some in APART[name]
        if all(value in some.get(option, VALUES[option]) for option, value in change.items())
    )
    return {
        other: valid[0]
        for other, valid in some.items()
        if other not in change and fields[other].default not in valid
    }
