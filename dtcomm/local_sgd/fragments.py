"""How a model is divided into fragments, in which steps each of them is averaged, and what is in flight.

A unit is one layer of the model's longest ModuleList or Sequential, or any other module that owns parameters. Fragments
consist of whole units, so that no layer is ever part global and part local. `LocalSGD` calls `make_fragments`.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from dtcomm.arguments import require_int, suggest
from dtcomm.collectives import Work
from dtcomm.compress.bucket import BucketLayout
from dtcomm.compress.error_state import PendingGradient
from dtcomm.compress.measurements import GradientMeasurement
from dtcomm.compress.stage_scheduler import Stages

PATTERNS = ("strided", "sequential")
#: A number of fragments, or the shell patterns of the parameters of each of them.
Fragments = int | Sequence[str | Sequence[str]]


@dataclass
class Fragment:
    """Parameters and buffers that are averaged together.

    Attributes:
        offset: The step of its first average, counted from the end of the warm-up, from 1 to ``every``.
        averages: How often it was averaged.
        buckets: The names and the layout of each of its messages.
    """

    weights: list[str]
    buffers: list[str]
    offset: int
    averages: int = 0
    buckets: list[tuple[list[str], BucketLayout]] = field(default_factory=list)

    @property
    def names(self) -> list[str]:
        """The names of everything that is averaged."""
        return [*self.weights, *self.buffers]

    def is_due(self, step: int, every: int) -> bool:
        """Return whether its average starts after a step, counted from the end of the warm-up."""
        return step >= self.offset and (step - self.offset) % every == 0


@dataclass
class PendingBucket:
    """A bucket while it is averaged.

    Attributes:
        stages: The stages of its average that have not begun.
        buffer: The differences, which become their mean.
        pending: Its lossy segments.
        norms: Those of their differences, in averages in which errors are measured, else None.
        measurement: What the guard measured of this rank's differences.
        work: The stage in flight; None once the average is complete.
    """

    names: list[str]
    layout: BucketLayout
    stages: Stages
    buffer: torch.Tensor
    pending: list[PendingGradient]
    norms: torch.Tensor | None
    measurement: GradientMeasurement | None
    work: Work | None = None


@dataclass
class PendingAverage:
    """An average of some fragments that was started and not applied yet.

    Attributes:
        number: The number of averages before it.
        due: The step after which it is applied.
        buckets: Its messages; none if it was loaded from a checkpoint.
        stats: The guard's statistics that travel with it, or None.
        means: The mean of each tensor, flat and in fp32, by name; empty until all messages have arrived.
    """

    fragments: list[Fragment]
    number: int
    due: int
    buckets: list[PendingBucket] = field(default_factory=list)
    stats: torch.Tensor | None = None
    means: dict[str, torch.Tensor] = field(default_factory=dict)


def make_fragments(
    model: torch.nn.Module,
    sizes: Mapping[str, int],
    buffers: Sequence[str],
    fragments: Fragments,
    pattern: str,
    every: int,
) -> list[Fragment]:
    """Return the fragments of a model; the arguments are options of `LocalSGD`. ValueError if it cannot be divided so.

    ``sizes`` has the elements of each parameter that is averaged, in order. Buffers belong to the fragment of their
    layer or module, else to the last one. The fragments' offsets are spread evenly over ``every`` steps.
    """
    if pattern not in PATTERNS:
        raise ValueError(f"pattern: {pattern!r}; valid: {', '.join(PATTERNS)}{suggest(pattern, PATTERNS)}")
    unit_of = _unit_names(model, [*sizes, *buffers])
    if isinstance(fragments, int):
        require_int("fragments", fragments, 1)
        parts = _divide(sizes, unit_of, fragments, pattern)
    elif isinstance(fragments, Sequence) and not isinstance(fragments, str) and fragments:
        parts = _match(sizes, fragments)
    else:
        raise TypeError(
            f"fragments: expected a number or a list with the patterns of each fragment, got {fragments!r}"
        )
    if len(parts) > every:
        raise ValueError(
            f"fragments: {len(parts)} fragments cannot start in {every} different steps; valid: at most every={every}"
        )
    fragment_of_unit = {unit_of[name]: index for index, names in enumerate(parts) for name in names}
    buffers_of: list[list[str]] = [[] for _ in parts]
    for name in buffers:
        buffers_of[fragment_of_unit.get(unit_of[name], len(parts) - 1)].append(name)
    return [
        Fragment(weights, buffers_of[index], offset=(index + 1) * every // len(parts))
        for index, weights in enumerate(parts)
    ]


def _unit_names(model: torch.nn.Module, names: Iterable[str]) -> dict[str, str]:
    """Return the unit of each parameter and buffer."""
    lists = [
        (name, len(module))
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.ModuleList | torch.nn.Sequential)
    ]
    longest = max(lists, key=lambda entry: entry[1], default=None)
    prefix = None if longest is None else f"{longest[0]}." if longest[0] else ""
    units = {}
    for name in names:
        if prefix is not None and name.startswith(prefix):
            units[name] = prefix + name[len(prefix) :].partition(".")[0]
        else:
            units[name] = name.rpartition(".")[0]
    return units


def _divide(
    sizes: Mapping[str, int], unit_of: Mapping[str, str], count: int, pattern: str
) -> list[list[str]]:
    """Return the names of ``count`` fragments."""
    units: dict[str, list[str]] = {}
    for name in sizes:
        units.setdefault(unit_of[name], []).append(name)
    if count > len(units):
        raise ValueError(
            f"fragments={count}: the model has {len(units)} layers and other modules with parameters; "
            f"valid: 1 to {len(units)}"
        )
    members = list(units.values())
    if pattern == "strided":
        grouped = [members[index::count] for index in range(count)]
    else:
        grouped = _cut([sum(sizes[name] for name in names) for names in members], members, count)
    return [[name for names in group for name in names] for group in grouped]


def _cut(sizes: Sequence[int], units: Sequence[list[str]], count: int) -> list[list[list[str]]]:
    """Cut the units into ``count`` runs of about equal size, none of them empty."""
    runs: list[list[list[str]]] = [[]]
    left, filled = sum(sizes), 0
    for index, (size, unit) in enumerate(zip(sizes, units, strict=True)):
        runs_after = count - len(runs)
        is_full = filled + size / 2 > left / (runs_after + 1)
        if runs[-1] and runs_after and (is_full or len(units) - index == runs_after):
            left, filled = left - filled, 0
            runs.append([])
        runs[-1].append(unit)
        filled += size
    return runs


def _match(sizes: Mapping[str, int], fragments: Sequence[str | Sequence[str]]) -> list[list[str]]:
    """Return the names that each fragment's patterns match; the first fragment that matches a name gets it."""
    patterns = [[entry] if isinstance(entry, str) else list(entry) for entry in fragments]
    parts: list[list[str]] = [[] for _ in patterns]
    for name in sizes:
        for part, wanted in zip(parts, patterns, strict=True):
            if any(fnmatch.fnmatchcase(name, form) for one in wanted for form in (one, f"{one}.*")):
                part.append(name)
                break
        else:
            raise ValueError(f"fragments: no pattern matches the parameter {name!r}")
    for part, wanted in zip(parts, patterns, strict=True):
        if not part:
            raise ValueError(f"fragments: {wanted} matches no parameter that an earlier fragment has not")
    return parts


def group_by_size(
    tensors: Iterable[tuple[str, torch.Tensor]], bucket_bytes: int
) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """Yield the tensors of each bucket: as many as have ``bucket_bytes`` in fp32, without empty ones.

    FSDP2 leaves some ranks without a shard of small parameters.
    """
    members: list[tuple[str, torch.Tensor]] = []
    for name, tensor in tensors:
        if tensor.numel():
            members.append((name, tensor))
        if sum(4 * member.numel() for _, member in members) >= bucket_bytes:
            yield members
            members = []
    if members:
        yield members
