"""Run a task with a method, with or without feedback, for one seed: its ranks in a loop, or as DDP.

In the loop the gradients of the ranks are computed one after the other and averaged by
`dtcomm.measure.simulated_ranks`, with the bits of DDP with one-shot all-reduces (a test compares them). DDP's default,
two-shot, also encodes the sums.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from bench.training.tasks import RANKS, TASKS, Task
from dtcomm import ddp
from dtcomm.local_sgd import LocalSGD
from dtcomm.measure.simulated_ranks import SimulatedRanks, uncompressed_bytes

CURVE = 40  # points of a loss curve


@dataclass(frozen=True, kw_only=True)
class Method:
    """A compression method.

    Attributes:
        name: Its name on the page.
        spec: Its spec string.
        feedback: The kind of error feedback.
        every: Steps between two averages of weights; 0: gradients are averaged.
        alone: Whether there is no version without feedback.
        sgd: Whether the method replaces the optimizer's momentum.
    """

    name: str
    spec: str
    feedback: str = "residual"
    every: int = 0
    alone: bool = False
    sgd: bool = False


METHODS = {
    method.name: method
    for method in (
        Method(name="none", spec="none", alone=True),
        Method(name="fp16", spec="fp16"),
        Method(name="bf16", spec="bf16"),
        Method(name="fp8_e4m3", spec="fp8_e4m3"),
        Method(name="int8", spec="int8"),
        Method(name="int4", spec="int4"),
        Method(name="int2", spec="int2"),
        Method(name="sign", spec="sign"),
        Method(name="topk 1 %", spec="topk:ratio=0.01"),
        Method(name="topk 1 %, EF21", spec="topk:ratio=0.01", feedback="ef21", alone=True),
        Method(name="randk 1 %", spec="randk:ratio=0.01"),
        Method(name="randk 1 %, shared positions", spec="randk:ratio=0.01,positions=shared"),
        Method(name="DGC 1 %", spec="dgc:ratio=0.01,warmup=100", alone=True, sgd=True),
        Method(name="PowerSGD rank 1", spec="powersgd:rank=1"),
        Method(name="PowerSGD rank 2", spec="powersgd:rank=2"),
        Method(name="PowerSGD rank 4", spec="powersgd:rank=4"),
        Method(name="PowerSGD rank 4, alternating", spec="powersgd:rank=4,alternate=true"),
        Method(name="local SGD, every 8, none", spec="none", every=8, alone=True),
        Method(name="local SGD, every 8, int4", spec="int4", every=8),
    )
}


def in_a_loop(
    task: Task, method: Method, feedback: bool, seed: int, variance_warmup: int = 0
) -> dict[str, Any]:
    """Return the metric, the loss curve, the bytes sent as a share of uncompressed ones, and the CPU seconds.

    ``variance_warmup``: steps with uncompressed gradients, after which Adam's second moment is frozen; 0: never.
    """
    begin = time.process_time()
    torch.manual_seed(seed)
    first = task.model()
    names = list(first.named_parameters())
    run = SimulatedRanks(
        method.spec, RANKS, names, feedback=method.feedback if feedback else False, seed=seed
    )
    if method.every:
        losses = _local(task, method, first, run, seed)
    else:
        losses = synchronous(
            task, first, run.average, seed, momentum=not method.sgd, variance_warmup=variance_warmup
        )
    sent = (
        run.all_reduce.payload_bytes / (uncompressed_bytes(names) * task.steps) + variance_warmup / task.steps
    )
    return _result(task, first, losses, sent, time.process_time() - begin)


def synchronous(
    task: Task,
    model: nn.Module,
    average: Callable[[Sequence[Sequence[torch.Tensor]]], list[torch.Tensor]],
    seed: int,
    *,
    ranks: int = RANKS,
    momentum: bool = True,
    variance_warmup: int = 0,
    after_step: Callable[[int], None] | None = None,
) -> list[float]:
    """Train with averaged gradients; return the mean loss of the ranks in each step.

    Args:
        task: The task.
        model: The model that all ranks start from and end with.
        average: Returns the mean gradients; it gets those of each rank.
        seed: The seed of the batches.
        ranks: Number of simulated ranks.
        momentum: Whether SGD has momentum.
        variance_warmup: As for `in_a_loop`.
        after_step: Called after each step with its number, from 1 on.
    """
    parameters = list(model.parameters())
    optimizer = task.optimizer(parameters, momentum=momentum)
    if variance_warmup:
        optimizer = ddp.FrozenVariance(optimizer, variance_warmup)
    losses = []
    for step in range(task.steps):
        gradients, total = [], 0.0
        for rank in range(ranks):
            loss = task.loss(model, task.batch(seed, step, rank))
            gradients.append(torch.autograd.grad(loss, parameters))
            total += float(loss.detach()) / ranks
        if step < variance_warmup:
            means = [torch.stack(of_ranks).mean(0) for of_ranks in zip(*gradients, strict=True)]
        else:
            means = average(gradients)
        for parameter, mean in zip(parameters, means, strict=True):
            parameter.grad = mean
        update(task, optimizer, parameters, step)
        losses.append(total)
        if after_step is not None:
            after_step(step + 1)
    return losses


def _local(task: Task, method: Method, model: nn.Module, run: SimulatedRanks, seed: int) -> list[float]:
    """Train with `dtcomm.local_sgd.LocalSGD`'s arithmetic, without an outer optimizer."""
    replicas = [task.model() for _ in range(RANKS)]
    optimizers = []
    for replica in replicas:
        replica.load_state_dict(model.state_dict())
        optimizers.append(task.optimizer(list(replica.parameters())))
    losses = []
    for step in range(task.steps):
        total = 0.0
        for rank, (replica, optimizer) in enumerate(zip(replicas, optimizers, strict=True)):
            loss = task.loss(replica, task.batch(seed, step, rank))
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            update(task, optimizer, list(replica.parameters()), step)
            total += float(loss.detach()) / RANKS
        losses.append(total)
        if (step + 1) % method.every == 0 or step + 1 == task.steps:
            _average_weights(model, replicas, run)
    return losses


@torch.no_grad()
def _average_weights(model: nn.Module, replicas: Sequence[nn.Module], run: SimulatedRanks) -> None:
    common = list(model.parameters())
    changes = [
        [start - now for start, now in zip(common, replica.parameters(), strict=True)] for replica in replicas
    ]
    for start, mean in zip(common, run.average(changes), strict=True):
        start -= mean
    for replica in replicas:
        replica.load_state_dict(model.state_dict())


def as_ddp(rank: int, world_size: int, task_name: str, method_name: str, seed: int) -> dict[str, Any]:
    """Run a method as a rank of DDP (or of LocalSGD) with feedback and all other options at their defaults."""
    task, method = TASKS[task_name], METHODS[method_name]
    torch.set_num_threads(1)
    begin = time.process_time()
    torch.manual_seed(seed)
    module = task.model()
    optimizer = task.optimizer(list(module.parameters()), momentum=not method.sgd)
    model: nn.Module = module
    local = state = None
    if method.every:
        local = LocalSGD(module, method.every, method.spec, feedback=method.feedback)
    else:
        model = DistributedDataParallel(module)
        state = ddp.compress(model, method.spec, feedback=method.feedback, seed=seed)
    losses = []
    for step in range(task.steps):
        loss = task.loss(model, task.batch(seed, step, rank))
        if state is not None:
            state.observe(loss.detach())
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        update(task, optimizer, list(module.parameters()), step)
        losses.append(float(loss.detach()))
        if local is not None:
            local.step()
    if local is not None:
        local.sync()
    reporting = local if state is None else state
    assert reporting is not None
    report = reporting.report()
    share = report.wire_bytes / report.plain_bytes / (method.every or 1)
    result = _result(task, module, losses, share, time.process_time() - begin)
    return {**result, "guard": report.events}


def update(
    task: Task, optimizer: torch.optim.Optimizer, parameters: Sequence[torch.Tensor], step: int
) -> None:
    """Make the step of an optimizer at the task's learning rate; with AdamW, clip the gradients first."""
    for group in optimizer.param_groups:
        group["lr"] = task.rate_at(step)
    if task.adam:
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
    optimizer.step()


def _result(task: Task, model: nn.Module, losses: list[float], sent: float, seconds: float) -> dict[str, Any]:
    width = max(1, len(losses) // CURVE)
    curve = [
        round(sum(losses[at : at + width]) / len(losses[at : at + width]), 4)
        for at in range(0, len(losses), width)
    ]
    return {
        "metric": round(task.evaluate(model), 4),
        "curve": curve,
        "sent": round(sent, 5),
        "seconds": round(seconds, 2),
    }
