"""How a model is divided into fragments, in which steps each of them is averaged, and what is in flight.

A unit is one layer of the model's longest ModuleList or Sequential, or any other module that owns parameters. Fragments
consist of whole units, so that no layer is ever part global and part local. `LocalSGD` calls `make_fragments`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from dtcomm.arguments import require_int
from dtcomm.collectives import Work
from dtcomm.compress.bucket import BucketLayout
from dtcomm.compress.error_state import PendingGradient
from dtcomm.compress.measurements import GradientMeasurement
from dtcomm.compress.stage_scheduler import Stages


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
        stats: The guard's statistics that are sent with it, or None.
        means: The mean of each tensor, flat and in fp32, by name; empty until all messages have arrived.
    """

    fragments: list[Fragment]
    number: int
    due: int
    buckets: list[PendingBucket] = field(default_factory=list)
    stats: torch.Tensor | None = None
    means: dict[str, torch.Tensor] = field(default_factory=dict)


def make_fragments(
    model: torch.nn.Module, names: Sequence[str], buffers: Sequence[str], fragments: int, every: int
) -> list[Fragment]:
    """Return the fragments of a model; the arguments are options of `LocalSGD`. ValueError if it cannot be divided so.

    ``names`` are the parameters that are averaged, in order. Every ``fragments``-th layer or other module belongs to
    the same fragment, and so do its buffers; those of others belong to the last one. The fragments' offsets are spread
    evenly over ``every`` steps.
    """
    require_int("fragments", fragments, 1)
    unit_of = _unit_names(model, [*names, *buffers])
    units: dict[str, list[str]] = {}
    for name in names:
        units.setdefault(unit_of[name], []).append(name)
    if fragments > len(units):
        raise ValueError(
            f"fragments={fragments}: the model has {len(units)} layers and other modules with parameters; "
            f"valid: 1 to {len(units)}"
        )
    members = list(units.values())
    parts = [[name for unit in members[index::fragments] for name in unit] for index in range(fragments)]
    if fragments > every:
        raise ValueError(
            f"fragments: {fragments} fragments cannot start in {every} different steps; valid: at most every={every}"
        )
    fragment_of_unit = {unit_of[name]: index for index, part in enumerate(parts) for name in part}
    buffers_of: list[list[str]] = [[] for _ in range(fragments)]
    for name in buffers:
        buffers_of[fragment_of_unit.get(unit_of[name], fragments - 1)].append(name)
    return [
        Fragment(weights, buffers_of[index], offset=(index + 1) * every // fragments)
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
