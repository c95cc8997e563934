"""Writes the inputs of csrc/tests/cuda_emulated and csrc/tests/race_detector.

Run ``python -m tests.cuda.emulator_inputs FOLDER``.

``programs.txt`` holds the engine's programs, whose results are the expected ones. There is one line for each schedule:
collective algorithm ranks chunks. A line follows for each rank: the payload counts of all ranks and the flat
instructions (their number first).

``codecs.txt`` holds the codecs with CUDA kernels, from the registry: one line for each, the bytes of `Codec.native` in
hexadecimal digits.
"""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dtcomm.algorithms import build
from dtcomm.codecs import Codec, codec
from dtcomm.codecs.spec import CODECS, Entry
from dtcomm.schedule import lower

SCHEDULES = {
    "all_reduce": ("one_shot", "two_shot"),
    "reduce_scatter": ("one_shot",),
    "all_gather": ("one_shot",),
    "all_to_all": ("one_shot",),
}
RANKS = (2, 3, 4, 8)

# Values of the options that do not list theirs.
OPTION_VALUES: dict[str, Sequence[Any]] = {
    "scope": ("granule",),  # the other one has no kernel
    "block": tuple(1 << shift for shift in range(4, 13)),
    # One element of a granule, a list of positions and a bitmap at their limits, more than a granule of values, all.
    "ratio": tuple(kept / 4096 for kept in (1, 41, 341, 342, 1500, 4096)),
    "round": ("nearest", "stochastic"),
}
# Of kernels that serve only these combinations of options (csrc/cuda/instantiations.txt), with both types of scales.
SPECIALIZED = tuple(
    f"int4:block={block},scale={scale},spikes=1" for block in (32, 128, 256) for scale in ("bf16", "fp32")
)


def program_lines() -> list[str]:
    """The lines of all schedules."""
    out = []
    for collective, algorithms in SCHEDULES.items():
        for algorithm in algorithms:
            for ranks in RANKS:
                schedule = build(algorithm, collective, ranks)
                out.append(f"{collective} {algorithm} {ranks} {schedule.chunks}")
                for program in (lower(schedule, rank) for rank in range(ranks)):
                    flat = program.flat()
                    out.append(" ".join(map(str, [*program.payload_counts, len(flat), *flat])))
    return out


def codecs() -> list[Codec]:
    """Codecs that use every CUDA kernel.

    They are, for each name in the registry, the codec without options and with each value of each option; and for each
    class of codecs, so many more that every three values of different options occur together; and `SPECIALIZED`.
    """
    unique: dict[bytes, Codec] = {spec.native(): spec for spec in map(codec, SPECIALIZED)}
    entries = [entry for entry in CODECS.values() if getattr(entry.make, "has_cuda_kernel", True)]
    for entry in entries:
        defaults = {name: field.default for name, field in entry.options().items()}
        for name, values in _option_values(entry).items():
            for value in (defaults[name], *values):
                _add(unique, entry, defaults | {name: value})
        _add(unique, entry, defaults)
    for make in dict.fromkeys(entry.make for entry in entries):
        for entry, options in _triples_cover([entry for entry in entries if entry.make is make]):
            _add(unique, entry, options)
    return list(unique.values())


def _option_values(entry: Entry) -> dict[str, Sequence[Any]]:
    """The values of each option of a codec that are tested."""
    values_by_option = {}
    for name, field in entry.options().items():
        values = OPTION_VALUES.get(name) or field.metadata["choices"]
        if not values:
            raise LookupError(f"OPTION_VALUES lacks values of option {name!r} of {entry.make.__name__}")
        values_by_option[name] = values
    return values_by_option


def _make(entry: Entry, options: dict[str, Any]) -> Codec | None:
    """The codec, or None if its class refuses the combination of options."""
    try:
        return entry.make(**dict(entry.fixed) | options)
    except ValueError:
        return None


def _add(unique: dict[bytes, Codec], entry: Entry, options: dict[str, Any]) -> None:
    made = _make(entry, options)
    if made is not None:
        unique.setdefault(made.native(), made)


def _triples_cover(entries: list[Entry]) -> list[tuple[Entry, dict[str, Any]]]:
    """Combinations of a class's options in which all triples of values occur, chosen greedily.

    The name of the codec counts as an option, too.
    """
    candidates = []
    for index, entry in enumerate(entries):
        values = _option_values(entry)
        for combination in itertools.product(*values.values()):
            options = dict(zip(values, combination, strict=True))
            if _make(entry, options) is not None:
                triples = set(itertools.combinations([("name", index), *options.items()], 3))
                candidates.append((triples, entry, options))
    random.Random(0).shuffle(candidates)
    chosen = []
    covered: set[tuple[Any, ...]] = set()
    # A candidate of another round adds fewer triples than it did in the last one, so most are left out at once.
    for least in range(max((len(triples) for triples, _, _ in candidates), default=0), 0, -1):
        for triples, entry, options in candidates:
            if len(triples - covered) >= least:
                covered |= triples
                chosen.append((entry, options))
    return chosen


def main(folder: Path) -> None:
    """Write both files into `folder`."""
    (folder / "programs.txt").write_text("\n".join(program_lines()) + "\n")
    (folder / "codecs.txt").write_text("\n".join(each.native().hex() for each in codecs()) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
