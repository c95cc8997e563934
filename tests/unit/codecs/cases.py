"""Codecs to test, enumerated from the registry, so that a new codec or option is tested without a change here."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

from dtcomm.codecs import Codec
from dtcomm.codecs import codec as parse
from dtcomm.codecs.spec import CODECS

# Values to test of options whose valid values cannot be listed, or are many; otherwise all choices are tested.
_VALUES: dict[str, tuple[object, ...]] = {
    "block": (16, 32, 128, 256, 4096),
    "ratio": (0.01, 0.0833, 0.25, 1.0),
    "values": ("bf16", "fp16", "fp32", "int8", "int3"),
    "scope": ("granule",),  # the other one has no kernel: test_tensor_topk.py
}


def _values_to_test() -> dict[str, tuple[object, ...]]:
    values = dict(_VALUES)
    for entry in CODECS.values():
        for name, field in entry.options().items():
            values.setdefault(name, field.metadata["choices"])
    return values


VALUES = _values_to_test()  # by the name of the option

# Codecs with options whose values do not all combine: sets of values that do, by codec name.
_SPARSE = ({"values": ("bf16", "fp16", "fp32"), "round": ("nearest",)}, {"values": ("int8", "int3")})
APART: dict[str, tuple[dict[str, tuple[object, ...]], ...]] = {"topk": _SPARSE, "randk": _SPARSE}


def covering(columns: Sequence[Sequence[object]]) -> list[tuple[object, ...]]:
    """A small, deterministic set of rows in which every pair of values of two columns occurs (pairwise testing)."""
    if len(columns) < 2:
        return list(itertools.product(*columns))
    places = [[(a, x) for x in range(len(column))] for a, column in enumerate(columns)]
    missing = {pair for two in itertools.combinations(places, 2) for pair in itertools.product(*two)}
    rows = []
    while missing:
        # Grow a row from a missing pair, column by column, with the value that covers most missing pairs.
        row = dict(min(missing))
        for place in places:
            covered = {
                cell: sum(tuple(sorted((cell, other))) in missing for other in row.items()) for cell in place
            }
            if place[0][0] not in row:
                row.update([max(place, key=covered.__getitem__)])
        missing -= set(itertools.combinations(sorted(row.items()), 2))
        rows.append([row[column] for column in range(len(columns))])
    return [tuple(column[i] for column, i in zip(columns, row, strict=True)) for row in rows]


def option_sets(name: str) -> list[Codec]:
    """The codec called `name` with sets of options in which every pair of values of two options occurs."""
    entry = CODECS[name]
    options = entry.options()
    return [
        entry.make(**entry.fixed, **dict(zip(options, values, strict=True)))
        for group in APART.get(name, ({},))
        for values in covering([group.get(option, VALUES[option]) for option in options])
    ]


def codecs_with_option_sets() -> list[Codec]:
    """Every codec with its defaults and with its `option_sets`."""
    return list(dict.fromkeys(codec for name in CODECS for codec in [parse(name), *option_sets(name)]))


def codecs_with_single_changes() -> list[Codec]:
    """Every codec with its defaults, and each option changed alone.

    The options of a class are changed in its first codec, and once more in the others in turn (int7 to int2 share the
    class of int8).
    """
    codecs = []
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
        codecs += [parse(name) for name in (first, *others)]
        codecs += [
            dataclasses.replace(parse(first), **change, **_options_required_with(first, change))
            for change in changes
        ]
        turns = zip(itertools.cycle(others), changes) if others else ()
        codecs += [dataclasses.replace(parse(name), **change) for name, change in turns]
    return codecs


def _options_required_with(name: str, change: dict[str, object]) -> dict[str, object]:
    """Return the options that must change together with `change` in the codec called `name`."""
    if name not in APART:
        return {}
    fields = CODECS[name].options()
    group = next(
        group
        for group in APART[name]
        if all(value in group.get(option, VALUES[option]) for option, value in change.items())
    )
    return {
        required: valid[0]
        for required, valid in group.items()
        if required not in change and fields[required].default not in valid
    }
