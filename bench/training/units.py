"""The units of work of bench.workloads: a workload trained with a method, an optimizer, a number of workers and a seed.

The workers are simulated in one process, as in ``bench.convergence``. The learning rate of a unit is the one with the
lowest held-out loss of those that are tried for its workload, method and optimizer, each on a seed that no unit has, 4
workers and a fifth of the steps: the workload's rate, three times that, a third of it, and while the best is at an end,
the next beyond, up to five. Every method gets the same trials by the same rule. A trial is kept like a unit.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bench.common import conditions
from bench.training.recommendation import RECOMMENDATION
from bench.training.runs import METHODS, Method, synchronous
from bench.training.text import TEXT
from bench.training.torch_hooks import HOOKS, SimulatedHook
from bench.training.vision import VISION
from bench.training.workload import Workload
from dtcomm.measure.simulated_ranks import SimulatedRanks, uncompressed_bytes

WORKLOADS = {workload.name: workload for workload in (TEXT, RECOMMENDATION, VISION)}
WORKERS = (2, 4, 8, 16)
EVALUATIONS = 20  # of a unit, at even distances
TUNING_SEED, TUNING_WORKERS, TUNING_SHARE = 1000, 4, 5
RATE_FACTOR, MOST_RATES = 3, 5
VARIANCE_WARMUP_SHARE = 5
#: What a unit computes with. A unit is measured again when one of these changes.
SOURCES = (
    "bench/training/recommendation.py",
    "bench/training/runs.py",
    "bench/training/tasks.py",
    "bench/training/text.py",
    "bench/training/torch_hooks.py",
    "bench/training/units.py",
    "bench/training/vision.py",
    "bench/training/workload.py",
    "csrc/codec/**/*",
    "csrc/cpu/**/*",
    "dtcomm/cli/demo/train.py",
    "dtcomm/codecs/**/*.py",
    "dtcomm/compress/**/*.py",
    "dtcomm/kernels/*.py",
    "dtcomm/measure/simulated_ranks.py",
)


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A method with or without error feedback.

    Attributes:
        name: Its name on the page.
        method: The method; of a hook of torch, the uncompressed one.
        feedback: Whether it has error feedback.
        hook: A hook of `HOOKS` instead of the method.
        frozen: Whether Adam's second moment is frozen after a fifth of the steps, which are uncompressed.
        priority: 0: among the first that are measured, and with every number of workers; see `bench.training.plan`.
    """

    name: str
    method: Method
    feedback: bool = False
    hook: str = ""
    frozen: bool = False
    priority: int = 2

    def applies_to(self, optimizer: str) -> bool:
        """Return whether the method goes with an optimizer: DGC replaces SGD's momentum, Adam has a second moment."""
        return optimizer == "sgd" if self.method.sgd else optimizer == "adamw" if self.frozen else True


#: What a user would try first, beside the baselines.
_FIRST = ("int8", "int4", "topk 1 %", "PowerSGD rank 4")
_LATER = ("fp16", "bf16", "fp8_e4m3", "int2", "sign", "randk 1 %", "PowerSGD rank 1", "PowerSGD rank 2")


def _variants() -> Iterator[Variant]:
    none = METHODS["none"]
    yield Variant(name="none", method=none, priority=0)
    for hook in HOOKS:
        yield Variant(name=f"torch's {hook} hook", method=none, hook=hook, priority=0)
    for name in (*_FIRST, *_LATER):
        method = METHODS[name]
        yield Variant(name=name, method=method, feedback=True, priority=0 if name in _FIRST else 1)
        yield Variant(name=f"{name}, no feedback", method=method)
    for name in ("topk 1 %, EF21", "DGC 1 %"):
        yield Variant(name=name, method=METHODS[name], feedback=True, priority=1)
    for name in ("int2", "sign", "topk 1 %"):
        yield Variant(name=f"{name}, frozen variance", method=METHODS[name], feedback=True, frozen=True)


VARIANTS = {variant.name: variant for variant in _variants()}


@dataclass(frozen=True, kw_only=True)
class Unit:
    """A unit of work; ``rate`` is only set in trials, whose seed is `TUNING_SEED`."""

    workload: str
    variant: str
    optimizer: str
    workers: int
    seed: int
    rate: float | None = None

    @property
    def key(self) -> str:
        """The key in the result file."""
        where = f"{self.workload} | {self.variant} | {self.optimizer} | {self.workers} workers"
        return f"{where} | seed {self.seed}" if self.rate is None else f"{where} | rate {self.rate:.4g}"

    def trials(self) -> list[Unit]:
        """Return the trials of all learning rates that may be tried, from the lowest to the highest."""
        base = WORKLOADS[self.workload].rates[self.optimizer]
        most = MOST_RATES - 2  # steps from the first rate to either side
        return [
            Unit(
                workload=self.workload,
                variant=self.variant,
                optimizer=self.optimizer,
                workers=TUNING_WORKERS,
                seed=TUNING_SEED,
                rate=float(f"{base * RATE_FACTOR**number:.4g}"),
            )
            for number in range(-most, most + 1)
        ]


def code() -> str:
    """Return the checksum of what a unit computes with."""
    return conditions.code_checksum(SOURCES)


def changed_files() -> list[str]:
    """Return the files that a unit computes with and that have changes which are not committed."""
    return conditions.changed_files(paths=[f":(glob){pattern}" for pattern in SOURCES])


def run(
    unit: Unit,
    rate: float,
    workload: Workload | None = None,
    progress: Callable[[int, int], None] = lambda step, steps: None,
) -> dict[str, Any]:
    """Train a unit, or a trial in a quarter of the steps.

    Args:
        unit: The unit.
        rate: The learning rate.
        workload: The workload with another number of steps, or another one; by default the unit's own.
        progress: Called after each step with its number and the number of steps.

    Returns:
        Learning rate, steps, held-out ``loss`` and ``quality`` after the last step and, in ``curve``, after every
        twentieth of the steps; ``sent``, a worker's payloads as a share of uncompressed ones; ``bytes_per_step``, what
        a worker sends in an all-reduce of them, 2 (n - 1) / n times the payloads; the CPU seconds; what the data were.
        A loss that is not finite is None.
    """
    workload = workload or WORKLOADS[unit.workload]
    if unit.rate is not None:
        workload = workload.shortened(max(EVALUATIONS, workload.steps // TUNING_SHARE))
    variant = VARIANTS[unit.variant]
    begin = time.process_time()
    torch.manual_seed(unit.seed)
    model = workload.model()
    named = list(model.named_parameters())
    curve: list[list[Any]] = []
    # Trials are compared by their last loss alone.
    evaluated = {
        workload.steps * number // EVALUATIONS
        for number in range(1, EVALUATIONS + 1)
        if unit.rate is None or number == EVALUATIONS
    }

    def after_step(step: int) -> None:
        if step in evaluated:
            scores = workload.held_out(model)
            loss = round(scores.loss, 5) if math.isfinite(scores.loss) else None
            curve.append([step, loss, round(scores.quality, 3)])
        progress(step, workload.steps)

    average, payload_bytes = _averages(variant, unit, named)
    warmup = workload.steps // VARIANCE_WARMUP_SHARE if variant.frozen else 0
    synchronous(
        workload.task(unit.optimizer, rate, unit.workers),
        model,
        average,
        unit.seed,
        ranks=unit.workers,
        momentum=not variant.method.sgd,
        variance_warmup=warmup,
        after_step=after_step,
    )
    plain = uncompressed_bytes(named)
    payload = (payload_bytes() + warmup * plain) / workload.steps
    return {
        "rate": rate,
        "steps": workload.steps,
        "loss": curve[-1][1],
        "quality": curve[-1][2],
        "sent": round(payload / plain, 6),
        "bytes_per_step": round(2 * (unit.workers - 1) / unit.workers * payload),
        "parameters": sum(parameter.numel() for _, parameter in named),
        "cpu_seconds": round(time.process_time() - begin, 1),
        "data": workload.data(),
        **({} if unit.rate is not None else {"curve": curve}),
    }


def _averages(
    variant: Variant, unit: Unit, named: list[tuple[str, torch.nn.Parameter]]
) -> tuple[Callable[[Sequence[Sequence[torch.Tensor]]], list[torch.Tensor]], Callable[[], int]]:
    """Return what averages gradients, and what returns the bytes of a worker's payloads so far."""
    if variant.hook:
        hook = SimulatedHook(variant.hook, unit.workers)
        return hook.average, lambda: hook.payload_bytes
    feedback = variant.method.feedback if variant.feedback else False
    ranks = SimulatedRanks(variant.method.spec, unit.workers, named, feedback=feedback, seed=unit.seed)
    return ranks.average, lambda: ranks.all_reduce.payload_bytes


def next_trial(unit: Unit, loss_of: Callable[[Unit], float | None]) -> Unit | None:
    """Return the next trial of a unit's learning rate; None if no other is to be made.

    Args:
        unit: The unit.
        loss_of: Returns the loss of a trial, which may not be finite; None if it has not been made.
    """
    trials = unit.trials()
    losses = [loss_of(trial) for trial in trials]
    middle = len(trials) // 2
    for number in (middle, middle + 1, middle - 1):
        if losses[number] is None:
            return trials[number]
    made = [number for number, loss in enumerate(losses) if loss is not None]
    best = min(made, key=lambda number: losses[number])  # type: ignore[arg-type, return-value]
    if len(made) == MOST_RATES or made[0] < best < made[-1]:
        return None
    return trials[best - 1 if best == made[0] else best + 1]


def tried_rates(unit: Unit, trials: Mapping[str, Mapping[str, Any]]) -> dict[float, float]:
    """Return the losses of the trials that were made for a unit by their rates; those that diverged are infinite."""
    return {
        float(trials[trial.key]["rate"]): loss(trials[trial.key])
        for trial in unit.trials()
        if trial.key in trials
    }


def loss(entry: Mapping[str, Any]) -> float:
    """Return the loss of a trial, which is infinite if it diverged."""
    return math.inf if entry["loss"] is None else float(entry["loss"])
