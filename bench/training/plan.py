"""Which units bench.workloads measures, and in which order.

All combinations of methods, optimizers, numbers of workers and seeds are 2,160 units, which take two cores more than a
hundred hours. The plan leaves out what tells least. Methods without feedback and with a frozen variance have one seed,
because they are compared with the same method with feedback on that seed. With the less usual optimizer of a workload,
there is one seed, and there are 2 workers and no methods without feedback. With 4, 8 and 16 workers, there are the
methods that a user would try first and one seed, because the number of workers changes the loss of a method by less
than the method does. Of the GPT, whose units take six minutes, all other methods have one seed, and with SGD there are
the first ones alone. `everything` has the rest, for a machine with more time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from bench.training.units import VARIANTS, WORKERS, WORKLOADS, Unit
from bench.training.workload import OPTIMIZERS

SEEDS = 3
SLOW = ("text",)  # workloads of which only the methods that a user would try first get all seeds


def everything(
    workloads: Sequence[str] = tuple(WORKLOADS),
    variants: Sequence[str] = tuple(VARIANTS),
    optimizers: Sequence[str] = OPTIMIZERS,
    workers: Sequence[int] = WORKERS,
    seeds: int = SEEDS,
) -> list[Unit]:
    """Return the units of all combinations, those first that make the page useful early.

    A unit comes the later, the less usual its method, its optimizer and its number of workers are, and the more seeds
    came before it: first one seed of the baselines and of the methods that a user would try first, with 2 workers.
    """
    units = [
        Unit(workload=workload, variant=variant, optimizer=optimizer, workers=count, seed=seed)
        for workload in workloads
        for variant in variants
        for optimizer in optimizers
        for count in workers
        for seed in range(seeds)
        if VARIANTS[variant].applies_to(optimizer)
    ]

    def distance(unit: Unit) -> int:
        return (
            VARIANTS[unit.variant].priority
            + unit.seed
            + 2 * (not _usual(unit))
            + 2 * WORKERS.index(unit.workers)
        )

    return sorted(units, key=distance)  # stable: workloads in their order, then methods


def planned(units: Iterable[Unit] | None = None) -> list[Unit]:
    """Return those of the units that the plan has; by default of `everything`."""
    return [unit for unit in (everything() if units is None else units) if is_planned(unit)]


def is_planned(unit: Unit) -> bool:
    """Return whether the plan has a unit."""
    variant = VARIANTS[unit.variant]
    if unit.workers != WORKERS[0]:
        return unit.seed == 0 and _usual(unit) and variant.priority == 0
    most = 0 if unit.workload in SLOW else 1  # the priority of methods with more than one seed or optimizer
    if not _usual(unit):
        return unit.seed == 0 and (variant.priority <= most or variant.frozen)
    return unit.seed == 0 or variant.priority <= most


def _usual(unit: Unit) -> bool:
    return unit.optimizer == WORKLOADS[unit.workload].optimizer
