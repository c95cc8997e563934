"""One rank of the demo: trains several models that differ only in the compression of their gradients.

The runs take turns of a few steps, so that other load of the machine affects all of them equally. They start from the
same weights and read the same batches in the same order.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from dtcomm import ddp
from dtcomm.cli.demo import data
from dtcomm.cli.demo import model as demo_model

#: Name of the run without a hook: DDP's all-reduce over Gloo.
PLAIN = "plain DDP"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of the demo; ``runs`` are codec specs or `PLAIN`."""

    runs: tuple[str, ...]
    steps: int
    seed: int
    batch: int = 6
    learning_rate: float = 2e-3
    turn: int = 5
    evaluations: int = 8
    windows: int = 256


@dataclass
class Run:
    """State of one run; times are in seconds, one entry per step."""

    name: str
    model: DistributedDataParallel
    optimizer: torch.optim.Optimizer
    state: ddp.State | None
    losses: list[float] = field(default_factory=list)
    held_out: list[tuple[int, float]] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)
    communication: list[float] = field(default_factory=list)
    exposed: list[float] = field(default_factory=list)


Progress = Callable[[str, int, float], None]


def train(settings: Settings, progress: Progress | None = None) -> list[dict[str, Any]]:
    """Train all runs; all ranks must call it. ``progress(run, step, loss)`` is called after each turn.

    Returns one dict for each run. Times and bytes are this rank's; everything else is equal on all ranks.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    corpus = data.load()
    shape = demo_model.Shape(vocabulary=data.VOCABULARY)
    runs = [_start(name, settings, shape) for name in settings.runs]
    evaluation_interval = -(-settings.steps // settings.evaluations)
    for first in range(0, settings.steps, settings.turn):
        steps = range(first, min(first + settings.turn, settings.steps))
        # The order rotates, so that each run is first equally often.
        shift = (first // settings.turn) % len(runs)
        for run in runs[shift:] + runs[:shift]:
            dist.barrier()
            for step in steps:
                _step(run, corpus, settings, shape, step, rank)
                if (step + 1) % evaluation_interval == 0 and step + 1 < settings.steps:
                    windows = settings.windows // 4
                    run.held_out.append(
                        (step + 1, _held_out(run, corpus, settings, shape, windows, rank, ranks))
                    )
            if progress:
                progress(run.name, len(run.losses), run.losses[-1])
    return [_finish(run, corpus, settings, shape, rank, ranks) for run in runs]


def _start(name: str, settings: Settings, shape: demo_model.Shape) -> Run:
    torch.manual_seed(settings.seed)
    model = DistributedDataParallel(demo_model.GPT(shape))
    model._set_ddp_runtime_logging_sample_rate(1)  # type: ignore[no-untyped-call]
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=settings.learning_rate, betas=(0.9, 0.95), weight_decay=0.05
    )
    return Run(
        name, model, optimizer, None if name == PLAIN else ddp.compress(model, name, seed=settings.seed)
    )


def _step(
    run: Run, corpus: data.Corpus, settings: Settings, shape: demo_model.Shape, step: int, rank: int
) -> None:
    inputs, targets = data.batch(
        corpus, seed=settings.seed, step=step, rank=rank, size=settings.batch, length=shape.context
    )
    for group in run.optimizer.param_groups:
        group["lr"] = _learning_rate(settings, step)
    start = time.perf_counter()
    loss = demo_model.loss(run.model, inputs, targets)
    run.optimizer.zero_grad()
    torch.autograd.backward(loss)
    torch.nn.utils.clip_grad_norm_(run.model.parameters(), 1.0)
    run.optimizer.step()
    run.step_seconds.append(time.perf_counter() - start)
    run.losses.append(loss.item())
    # DDP's timers, in nanoseconds of the previous step, are the same for every run: from the start of the first bucket
    # to the end of the last one, and the part of it after this rank's backward pass.
    timers = run.model._get_ddp_logging_data()  # type: ignore[no-untyped-call]
    if "backward_comm_time" in timers:
        run.communication.append(timers["backward_comm_time"] * 1e-9)
        run.exposed.append((timers["backward_comm_time_end"] - timers["backward_compute_time_end"]) * 1e-9)


def _learning_rate(settings: Settings, step: int) -> float:
    """Return the learning rate: a short warm-up, then a linear decay to a tenth."""
    warm_up = max(1, settings.steps // 15)
    if step < warm_up:
        return settings.learning_rate * (step + 1) / warm_up
    return settings.learning_rate * (1 - 0.9 * (step - warm_up) / max(1, settings.steps - warm_up))


@torch.no_grad()
def _held_out(
    run: Run,
    corpus: data.Corpus,
    settings: Settings,
    shape: demo_model.Shape,
    windows: int,
    rank: int,
    ranks: int,
) -> float:
    """Return the mean loss over ``windows`` held-out windows, which are divided among the ranks."""
    total = torch.zeros(2, dtype=torch.float64)
    for inputs, targets in data.held_out_batches(
        corpus, windows=windows, size=4 * settings.batch, length=shape.context, rank=rank, ranks=ranks
    ):
        total[0] += demo_model.loss(run.model.module, inputs, targets).double() * targets.numel()
        total[1] += targets.numel()
    dist.all_reduce(total)
    return float(total[0] / total[1])


def _finish(
    run: Run, corpus: data.Corpus, settings: Settings, shape: demo_model.Shape, rank: int, ranks: int
) -> dict[str, Any]:
    final = _held_out(run, corpus, settings, shape, settings.windows, rank, ranks)
    run.held_out.append((settings.steps, final))
    losses = torch.tensor(run.losses, dtype=torch.float64)
    dist.all_reduce(losses)
    losses /= ranks
    tail = max(1, min(20, settings.steps // 4))
    # The first steps create buckets, buffers and connections and are not counted.
    warm = min(10, len(run.step_seconds) // 4)
    gradient_bytes = sum(parameter.numel() * parameter.element_size() for parameter in run.model.parameters())
    report = run.state.report() if run.state else None
    return {
        "name": run.name,
        "parameters": sum(parameter.numel() for parameter in run.model.parameters()),
        "gradient_bytes": gradient_bytes,
        "losses": losses.tolist(),
        "held_out": run.held_out,
        "final_training_loss": float(losses[-tail:].mean()),
        "final_held_out_loss": final,
        "bytes_per_step": report.wire_bytes / report.steps
        if report
        else 2 * (ranks - 1) / ranks * gradient_bytes,
        "bytes_are": "counted" if report else "computed: 2(n-1)/n of the gradients, as a ring sends",
        "step_ms": statistics.median(run.step_seconds[warm:]) * 1e3,
        "communication_ms": statistics.median(run.exposed[warm:]) * 1e3 if run.exposed[warm:] else None,
        "overlapped_communication_ms": statistics.median(run.communication[warm:]) * 1e3
        if run.communication[warm:]
        else None,
        "collective_ms": report.seconds / report.steps * 1e3
        if report and report.seconds is not None
        else None,
        "report": report.to_dict() if report else None,
    }
