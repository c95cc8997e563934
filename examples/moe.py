"""Expert parallelism: a mixture of experts on several ranks that exchange compressed tokens.

    torchrun --nproc-per-node 2 examples/moe.py --codec fp8_e4m3

`MoE` is a layer for other models, too: a router with its losses, and experts that are distributed over the ranks. In
this script each token goes to two of four experts, and the layer learns a fixed function.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import dtcomm
from dtcomm import moe

WIDTH, EXPERTS, CHOICES = 32, 4, 2


class ScaleGradient(torch.autograd.Function):
    """The identity, whose gradient is multiplied by a factor."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient * ctx.factor, None


def load_balancing_loss(
    probabilities: torch.Tensor, counts: torch.Tensor, group: dist.ProcessGroup | None
) -> torch.Tensor:
    """Return the loss of Switch Transformer (arXiv:2101.03961, equation 4), with the choices of all ranks' tokens.

    It is 1 if all experts are chosen equally, and the number of experts if all tokens choose one with certainty.

    Args:
        probabilities: The router's probabilities of all experts, [tokens, experts].
        counts: How often this rank's tokens chose each expert, [experts].
        group: The ranks.
    """
    counts = counts.clone()
    dtcomm.all_reduce(counts, group=group)
    mean = probabilities.sum(0) / max(1, len(probabilities))
    return len(counts) * (counts / counts.sum().clamp(min=1) * mean).sum()


class MoE(nn.Module):
    """A mixture of experts whose experts are distributed over the ranks of a group.

    Every rank passes its own tokens, of any number; the router is the same on all ranks. Initial weights depend on rank
    0's random state alone, and not on the number of ranks. Names in state dicts contain the number of the expert.

    The router's gradients are those of this rank's tokens, which DDP averages. Those of experts come from all ranks'
    tokens already, divided by the number of ranks, so they must not be averaged: `expert_parameters` lists them.

    Args:
        features: Number of features of a token.
        num_experts: Number of experts on all ranks together, divisible by the number of ranks.
        expert: Makes an expert, which maps [rows, features] to [rows, features] row by row.
        top_k: Number of experts of a token.
        capacity_factor: Limits the rows from one rank to one expert, as `dtcomm.moe.expert_capacity` says. Rows then
            travel in a fixed number, and nothing waits for the device. None: no limit.
        max_tokens: The largest number of tokens of a rank, by which the capacity is computed. Needed on CUDA if ranks
            pass different numbers. None: this rank's number; the largest capacity of a rank holds for all.
        group: The ranks. None: all.
        codecs: Options of `dtcomm.moe.dispatch`: ``codec``, ``combine_codec``, ``backward_codec``.

    Attributes:
        auxiliary_loss: The router's losses in the last forward pass, to be added to the model's loss.
        counts: How often this rank's tokens chose each expert in the last forward pass.
    """

    def __init__(
        self,
        features: int,
        num_experts: int,
        expert: Callable[[], nn.Module],
        *,
        top_k: int = 2,
        capacity_factor: float | None = None,
        max_tokens: int | None = None,
        group: dist.ProcessGroup | None = None,
        **codecs: Any,
    ) -> None:
        super().__init__()
        if isinstance(expert, nn.Module):
            raise TypeError(
                f"expert: expected a function that makes an expert, got a {type(expert).__name__}"
            )
        self.num_experts, self.top_k = num_experts, top_k
        self.capacity_factor, self.max_tokens = capacity_factor, max_tokens
        self.group, self.ranks, self.codecs = group, dist.get_world_size(group), codecs
        self.auxiliary_loss, self.counts = torch.zeros(()), torch.zeros(num_experts, dtype=torch.int64)
        seed = torch.randint(2**31, (1,))
        dtcomm.broadcast(seed, dist.get_process_group_ranks(group or dist.group.WORLD)[0], group=group)
        local, rank = num_experts // self.ranks, dist.get_rank(group)
        with torch.random.fork_rng():
            torch.manual_seed(int(seed))
            self.router = nn.Linear(features, num_experts, bias=False)
            self.experts = nn.ModuleDict()
            for number in range(rank * local, (rank + 1) * local):
                torch.manual_seed(int(seed) + 1 + number)
                self.experts[str(number)] = expert()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the weighted sum of each token's experts, for x [..., features]."""
        tokens = x.reshape(-1, x.shape[-1])
        weights, choices = self.route(tokens)
        if self.capacity_factor is None:
            rows, route = moe.dispatch(tokens, choices, self.num_experts, group=self.group, **self.codecs)
            parts = route.split(self.scale(rows, self.ranks))
            outputs = torch.cat([expert(part) for expert, part in zip(self.experts.values(), parts)])
            y = moe.combine(self.scale(outputs, 1 / self.ranks), route, weights)
        else:
            count = len(tokens) if self.max_tokens is None else self.max_tokens
            capacity = moe.expert_capacity(
                count, self.num_experts, choices=self.top_k, factor=self.capacity_factor
            )
            rows, route = moe.dispatch_padded(
                tokens, choices, self.num_experts, capacity, group=self.group, **self.codecs
            )
            parts = self.scale(rows, self.ranks)
            outputs = torch.stack([expert(part) for expert, part in zip(self.experts.values(), parts)])
            y = moe.combine_padded(self.scale(outputs, 1 / self.ranks), route, weights)
        return y.view(*x.shape[:-1], y.shape[-1])

    @staticmethod
    def scale(x: torch.Tensor, factor: float) -> torch.Tensor:
        """Return ``x``, with another gradient: experts' parameters take 1/ranks of the sum over all ranks' tokens."""
        return ScaleGradient.apply(x, float(factor))

    def route(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return weights and experts of each token, [tokens, top_k], and set the losses."""
        with torch.autocast(tokens.device.type, enabled=False):
            logits = functional.linear(tokens.float(), self.router.weight.float())
            probabilities = torch.softmax(logits, 1)
            weights, choices = probabilities.topk(self.top_k, 1)
            if self.top_k > 1:  # a single weight would be constant
                weights = weights / weights.sum(1, keepdim=True)
            # Not torch.bincount, which waits for a CUDA device.
            flat = choices.reshape(-1)
            self.counts = flat.new_zeros(self.num_experts).scatter_add_(0, flat, torch.ones_like(flat))
            balance = load_balancing_loss(probabilities, self.counts, self.group)
            # ST-MoE (arXiv:2202.08906, equation 5): small scores have small rounding errors.
            z = torch.logsumexp(logits, 1).square().sum() / max(1, len(tokens))
        self.auxiliary_loss = 0.01 * balance + 0.001 * z
        return weights, choices


def expert_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of experts by their names, whose gradients must not be averaged."""
    layers = [module for module in model.modules() if isinstance(module, MoE)]
    owned = {id(parameter) for layer in layers for parameter in layer.experts.parameters()}
    return {name: parameter for name, parameter in model.named_parameters() if id(parameter) in owned}


def expert() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))


def run(codec: str = "fp8_e4m3", steps: int = 100, capacity_factor: float | None = None) -> list[float]:
    """Train and return the loss of each step."""
    torch.manual_seed(0)
    layer = MoE(WIDTH, EXPERTS, expert, top_k=CHOICES, capacity_factor=capacity_factor, codec=codec)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(layer, list(expert_parameters(layer)))
    model = DistributedDataParallel(layer)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(dist.get_rank())
    losses = []
    for step in range(steps):
        x = torch.randn(64, WIDTH, generator=generator)
        loss = (model(x) - torch.sin(x)).square().mean()
        optimizer.zero_grad()
        (loss + layer.auxiliary_loss).backward()
        optimizer.step()
        losses.append(loss.item())
        if dist.get_rank() == 0 and step % 20 == 0:
            load = int(layer.counts.max()) * EXPERTS / int(layer.counts.sum())
            print(f"step {step:3d}  loss {losses[-1]:.3f}  largest load {load:.2f}", flush=True)
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--codec", default="fp8_e4m3")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--capacity-factor", type=float)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    run(options.codec, options.steps, options.capacity_factor)
    dist.destroy_process_group()
