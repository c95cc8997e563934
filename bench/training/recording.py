"""Record what all-reduces sum in training: gradients of data parallelism, and activations of tensor parallelism.

The gradients are those of many ranks, each of a batch of its own, of all matrices that the DDP hook compresses. The
activations are what ranks of tensor parallelism sum behind row-parallel layers (the projection of the attention and the
last layer of the MLP), each the product of its share of the inputs.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import nn

from bench.training.runs import update
from bench.training.tasks import TASKS
from bench.training.workload import Workload

STEPS = (8, 80, 159)  # of the small GPT
#: Of workloads: a twentieth of the steps, half of them, and the last.
SHARES = (0.05, 0.5, 1.0)
LEAST = 1024  # elements of a matrix
PIECE = 4096  # elements of every matrix of a workload: all of them would take days
ROW_PARALLEL = ("projection", "down")  # layers whose outputs are sums over the ranks of tensor parallelism
APPLIED = 4  # ranks whose mean gradient trains the small GPT

Tensors = list[dict[str, torch.Tensor]]  # by rank and name
Recorded = dict[str, dict[int, Tensors]]  # by kind and step


def record(steps: Sequence[int] = STEPS, ranks: int = 64) -> Recorded:
    """Train the small GPT, and return by kind and step what all ranks sum; four ranks' mean gradient is applied."""
    task = TASKS["gpt"]
    torch.manual_seed(0)
    model = task.model()
    parameters = list(model.parameters())
    optimizer = task.optimizer(parameters)
    recorded: Recorded = {"gradients": {}, "activations": {}}
    for step in range(max(steps) + 1):
        if step in steps:
            recorded["activations"][step] = row_parallel_terms(model, task.batch(0, step, 0)[0], ranks)
        mean: list[torch.Tensor] = []
        for rank in range(ranks if step in steps else APPLIED):
            gradients = torch.autograd.grad(task.loss(model, task.batch(0, step, rank)), parameters)
            if step in steps:
                recorded["gradients"].setdefault(step, []).append(of_matrices(model, gradients))
            if rank < APPLIED:
                mean = [
                    a + b / APPLIED
                    for a, b in zip(mean or [torch.zeros(())] * len(gradients), gradients, strict=True)
                ]
        for parameter, gradient in zip(parameters, mean, strict=True):
            parameter.grad = gradient
        update(task, optimizer, parameters, step)
    return recorded


def record_workload(workload: Workload, ranks: int = 64, piece: int | None = PIECE) -> Recorded:
    """Train a workload as `bench.workloads` does, uncompressed, and return what `record` does, a piece of each matrix.

    The learning rate is the one that is tried first for the workload. Rank r has the samples of a step with seed r.
    Those of seed 0 train the model. Workloads without row-parallel layers have no activations.

    Args:
        workload: The workload.
        ranks: Number of ranks.
        piece: Elements of each matrix, from its middle on; None: all.
    """
    steps = [round(workload.steps * share) - 1 for share in SHARES]
    task = workload.task(workload.optimizer, workload.rates[workload.optimizer], 1)
    torch.manual_seed(0)
    model = workload.model()
    parameters = list(model.parameters())
    optimizer = task.optimizer(parameters)
    recorded: Recorded = {"gradients": {}}
    for step in range(steps[-1] + 1):
        if step in steps:
            recorded["gradients"][step] = [
                of_matrices(model, _gradients(model, workload, rank, step), piece) for rank in range(ranks)
            ]
            terms = row_parallel_terms(model, workload.batch(0, step)[0], ranks, piece)
            if terms[0]:
                recorded.setdefault("activations", {})[step] = terms
        for parameter, gradient in zip(parameters, _gradients(model, workload, 0, step), strict=True):
            parameter.grad = gradient
        update(task, optimizer, parameters, step)
    return recorded


def _gradients(model: nn.Module, workload: Workload, seed: int, step: int) -> Sequence[torch.Tensor]:
    return torch.autograd.grad(workload.loss(model, workload.batch(seed, step)), list(model.parameters()))


def of_matrices(
    model: nn.Module, gradients: Sequence[torch.Tensor], piece: int | None = None
) -> dict[str, torch.Tensor]:
    """Return by name the gradients of all matrices of at least `LEAST` elements, or a piece of each."""
    named = zip((name for name, _ in model.named_parameters()), gradients, strict=True)
    return {
        name: piece_of(gradient.flatten(), piece)
        for name, gradient in named
        if gradient.ndim >= 2 and gradient.numel() >= LEAST
    }


def piece_of(values: torch.Tensor, piece: int | None) -> torch.Tensor:
    """Return so many elements from the middle of a flat tensor on; all of them if ``piece`` is None."""
    if piece is None or values.numel() <= piece:
        return values
    start = (values.numel() - piece) // 2
    return values[start : start + piece].clone()


@torch.no_grad()
def row_parallel_terms(
    model: nn.Module, batch: torch.Tensor, ranks: int, piece: int | None = None
) -> Tensors:
    """Return by rank and layer what tensor parallelism would sum: the rank's share of the inputs times its weights."""
    terms: Tensors = [{} for _ in range(ranks)]

    def keep(name: str, layer: nn.Linear, inputs: tuple[torch.Tensor]) -> None:
        rows = inputs[0].flatten(0, -2)
        if piece is not None:
            needed = -(-piece // layer.out_features)
            rows = rows[len(rows) // 2 :][:needed]
        shares = rows.float().chunk(ranks, -1)
        for own, share, weights in zip(terms, shares, layer.weight.chunk(ranks, 1), strict=True):
            own[name] = (share @ weights.T).flatten()

    hooks = [
        layer.register_forward_pre_hook(functools.partial(keep, name))
        for name, layer in model.named_modules()
        if name.rpartition(".")[2] in ROW_PARALLEL and isinstance(layer, nn.Linear)
    ]
    if hooks:
        model(batch)
    for hook in hooks:
        hook.remove()
    return terms
