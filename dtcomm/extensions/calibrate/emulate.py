"""Tensor parallelism of several ranks emulated in one process, to measure what compression does to a model.

`emulate` replaces a model's layers by `EmulatedLayer`s, which keep the dense weights and pass every partial result
through the same encodings, in the same order, as the ranks would. With nearest rounding the sums are bit-identical to
those of the collectives; stochastic rounding and randk draw other random numbers. Forward and backward pass are
compressed as in the tensor-parallel layers. `dtcomm.extensions.calibrate.calibrate` is built on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F

from dtcomm.codecs import Codec
from dtcomm.codecs import codec as parse
from dtcomm.kernels import counter_rng, ops
from dtcomm.torch_compat import autograd_apply
from dtcomm.tp.comm_config import default_algorithm
from dtcomm.tp.layer_plan import (
    SENDING,
    Plan,
    dense_weight_and_bias,
    packed_sizes,
    replace_module,
    resolve_plan,
)
from dtcomm.tp.layers import experts_features

ALGORITHMS = ("auto", "direct", "two_shot", "one_shot", "two_shot_symmetric")


def emulate_all_reduce(
    partials: Sequence[torch.Tensor], codec: str | Codec, algorithm: str = "auto", seed: int = 0
) -> torch.Tensor:
    """Return the compressed sum of the ranks' tensors that every rank would have after an all-reduce.

    Codecs whose ranks communicate before they encode (``exact``, randk with a shared seed) are not emulated. The
    algorithm ``"auto"`` is that of `CommConfig`; ``"direct"`` is one-shot if the codec loses nothing, otherwise
    two-shot (the planner may choose differently, with the same bits); in ``"two_shot_symmetric"`` the owner's
    contribution is encoded too. ``seed`` is that of stochastic rounding.

    Example:
        >>> import torch
        >>> emulate_all_reduce([torch.ones(4), torch.ones(4)], "bf16").tolist()
        [2.0, 2.0, 2.0, 2.0]
    """
    codec = parse(codec)
    if algorithm not in ALGORITHMS:
        raise ValueError(f"algorithm: {algorithm!r}; valid: {', '.join(ALGORITHMS)}")
    if codec.needs_agreement:
        raise ValueError(
            f"codec: {codec} cannot be emulated, because its ranks communicate before they encode"
        )
    first = partials[0]
    if algorithm == "auto":
        algorithm = default_algorithm(len(partials), codec, first.dtype)
    flat = [partial.detach().reshape(-1) for partial in partials]
    numel, world_size = first.numel(), len(partials)
    total = torch.empty_like(flat[0])
    if world_size == 1:
        return first.detach().clone()
    if algorithm == "one_shot" or (algorithm == "direct" and codec.lossless(first.dtype)):
        keys = [counter_rng.mix_key(seed, rank, 0) for rank in range(world_size)]
        payloads = [ops.encode(codec, partial, key=key) for partial, key in zip(flat, keys, strict=True)]
        ops.reduce(codec, payloads, numel, dtype=first.dtype, out=total)
        return total.view(first.shape)
    granularity = codec.granularity
    granules = -(-numel // granularity)
    encodes_owner = algorithm == "two_shot_symmetric"
    for owner in range(world_size):
        start, stop = (min(numel, granules * rank // world_size * granularity) for rank in (owner, owner + 1))
        if start == stop:
            continue
        payloads = [
            ops.encode(codec, partial[start:stop], key=counter_rng.mix_key(seed, rank, owner), offset=start)
            for rank, partial in enumerate(flat)
            if rank != owner or encodes_owner
        ]
        ops.reduce_encode(
            codec, payloads, stop - start, local=None if encodes_owner else flat[owner][start:stop],
            position=None if encodes_owner else owner, dtype=first.dtype,
            key=counter_rng.mix_key(seed, owner, world_size), offset=start, decoded=total[start:stop],
        )  # fmt: skip
    return total.view(first.shape)


def emulate_all_gather(shards: Sequence[torch.Tensor], codec: str | Codec, dim: int = -1) -> torch.Tensor:
    """Return the result of a compressed all-gather: the ranks' shards, each decoded, concatenated along ``dim``."""
    codec = parse(codec)
    decoded_shards = []
    for rank, shard in enumerate(shards):
        contiguous = shard.detach().contiguous()
        decoded = torch.empty_like(contiguous)
        ops.encode(codec, contiguous, key=counter_rng.mix_key(0, rank, 0), decoded=decoded)
        decoded_shards.append(decoded)
    return torch.cat(decoded_shards, dim)


class EmulatedLayer(nn.Module):
    """A dense layer that computes what the ranks of its tensor-parallel layer would compute.

    Attributes:
        module: The dense layer: a linear one, an embedding, or experts.
        kind: Its kind in the plan (`dtcomm.tp.layer_plan.KINDS`).
        ranks: Number of emulated ranks.
        codec: Codec of the forward pass; may be changed between calls.
        backward_codec: Codec of gradients; may be changed between calls.
        algorithm: See `emulate_all_reduce`.
        name: Name of the layer in the model, for error messages.
        config: The model's configuration, which gives the sizes of projections that are one matrix; None without one.
        sent: Number of elements summed or gathered in forward passes so far.
    """

    def __init__(
        self,
        module: nn.Module,
        kind: str,
        ranks: int,
        codec: Codec,
        backward_codec: Codec,
        algorithm: str,
        name: str,
        config: Any = None,
    ) -> None:
        super().__init__()
        self.kind, self.ranks, self.algorithm, self.name = kind, ranks, algorithm, name
        self.codec, self.backward_codec = codec, backward_codec
        self.module = module
        self.sent = 0
        self.packed: tuple[int, ...] = ()
        sizes: tuple[int, ...]
        if kind == "experts":
            sizes, side = (experts_features(module, name),), "hidden"
        elif kind == "row":
            weight, _ = dense_weight_and_bias(module, name)
            sizes, side = (weight.shape[1],), "input"
        elif kind != "vocabulary":
            weight, _ = dense_weight_and_bias(module, name)
            sizes, side = packed_sizes(kind, weight.shape[0], config, name), "output"
            self.packed = sizes
        else:
            return
        if any(size % ranks for size in sizes):
            features = sum(sizes) if len(set(sizes)) == 1 else sizes
            raise ValueError(f"{name}: {features} {side} features are not divisible by {ranks} ranks")

    def forward(self, x: torch.Tensor, *routing: torch.Tensor) -> torch.Tensor:
        """Return the output that all ranks of the tensor-parallel layer would have together."""
        y: torch.Tensor
        if self.kind == "experts":
            exact = self.module(x, *routing)
            return self._summed(exact, [self._experts_of(rank, x, routing) for rank in range(self.ranks)])
        if self.kind == "vocabulary":
            assert isinstance(self.module, nn.Embedding)
            vectors, rows = F.embedding(x, self.module.weight), self.module.num_embeddings // self.ranks
            partials = [
                vectors * (x // rows == rank).unsqueeze(-1).to(vectors.dtype) for rank in range(self.ranks)
            ]
            return self._summed(vectors, partials)
        weight, bias = dense_weight_and_bias(self.module, self.name)
        y = autograd_apply(_Row if self.kind == "row" else _Column, x, weight, self)
        if self.kind in SENDING:
            self.sent += y.numel()
        if bias is not None:
            y = y + bias.to(y.dtype)
        if self.kind == "column_gather":
            y = autograd_apply(_StraightThrough, y, emulate_all_gather(y.chunk(self.ranks, -1), self.codec))
        return y

    def _summed(self, exact: torch.Tensor, partials: list[torch.Tensor]) -> torch.Tensor:
        """Return the sum of the ranks' parts, with the gradient of the exact result."""
        self.sent += partials[0].numel()
        total = emulate_all_reduce(partials, self.codec, self.algorithm)
        y: torch.Tensor = autograd_apply(_StraightThrough, exact, total)
        return y

    @torch.no_grad()
    def _experts_of(self, rank: int, x: torch.Tensor, routing: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """Return what a rank adds to the output: the experts with its part of their hidden features."""
        up, down = self.module.get_parameter("gate_up_proj"), self.module.get_parameter("down_proj")
        shards = {
            "gate_up_proj": torch.cat([part.chunk(self.ranks, 1)[rank] for part in up.chunk(2, 1)], 1),
            "down_proj": down.chunk(self.ranks, 2)[rank].contiguous(),
        }
        y: torch.Tensor = functional_call(self.module, shards, (x, *routing))
        return y


class _Row(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, layer: EmulatedLayer) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        shards = zip(x.chunk(layer.ranks, -1), weight.to(x.dtype).chunk(layer.ranks, 1), strict=True)
        partials = [features.contiguous() @ columns.t() for features, columns in shards]
        return emulate_all_reduce(partials, layer.codec, layer.algorithm)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        flat = dy.reshape(-1, dy.shape[-1])
        dx = dy @ weight.to(dy.dtype) if ctx.needs_input_grad[0] else None
        dweight = flat.t() @ x.reshape(-1, x.shape[-1]) if ctx.needs_input_grad[1] else None
        return dx, dweight, None


class _Column(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, layer: EmulatedLayer) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.layer = layer
        return F.linear(x, weight.to(x.dtype))

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        layer: EmulatedLayer = ctx.layer
        dx = None
        if ctx.needs_input_grad[0]:
            parts = torch.split(torch.arange(len(weight)), list(layer.packed))
            rows_of_ranks = [
                torch.cat([part.view(layer.ranks, -1)[rank] for part in parts]) for rank in range(layer.ranks)
            ]
            partials = [dy[..., rows].contiguous() @ weight[rows].to(dy.dtype) for rows in rows_of_ranks]
            dx = emulate_all_reduce(partials, layer.backward_codec, layer.algorithm)
        flat = dy.reshape(-1, dy.shape[-1])
        dweight = flat.t() @ x.reshape(-1, x.shape[-1]) if ctx.needs_input_grad[1] else None
        return dx, dweight, None


class _StraightThrough(torch.autograd.Function):
    """The emulated values with the gradient of the exact ones."""

    @staticmethod
    def forward(ctx: Any, exact: torch.Tensor, emulated: torch.Tensor) -> torch.Tensor:
        return emulated

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient, None


def emulate(
    model: nn.Module,
    ranks: int,
    plan: Plan | str | Path | None = None,
    codec: str | Codec = "int8",
    *,
    backward_codec: str | Codec = "none",
    algorithm: str = "auto",
) -> dict[str, EmulatedLayer]:
    """Replace the model's layers, in place, by emulations of tensor-parallel ones; `restore` undoes it.

    Args:
        model: The model.
        ranks: Number of ranks to emulate.
        plan: The layers, as `dtcomm.tp.compress` takes them. Default: the built-in plan of the model's type.
        codec: Codec of the activations. Default: ``"int8"``.
        backward_codec: Codec of gradients. Default: ``"none"``.
        algorithm: See `emulate_all_reduce`. Default: ``"auto"``.

    Returns:
        The new layers by name.

    Raises:
        ValueError: As `dtcomm.tp.compress` raises it. The model is unchanged then.

    Example::

        layers = emulate(model, 4, {"*.up": "column", "*.down": "row"}, "int4")
        loss = model(inputs)
        restore(model, layers)
    """
    if ranks < 1:
        raise ValueError(f"ranks: expected 1 or more, got {ranks}")
    backward = parse(backward_codec)
    config = getattr(model, "config", None)
    layers = {
        name: EmulatedLayer(
            module, entry.kind, ranks, parse(entry.codec or codec), backward, algorithm, name, config
        )
        for name, (module, entry) in resolve_plan(model, plan, ranks).items()
        if entry.kind != "replicated"  # every rank computes what the dense module does
    }
    for name, layer in layers.items():
        replace_module(model, name, layer)
    return layers


def restore(model: nn.Module, layers: dict[str, EmulatedLayer]) -> None:
    """Put the dense layers back that `emulate` replaced.

    Args:
        model: The model.
        layers: What `emulate` returned.
    """
    for name, layer in layers.items():
        replace_module(model, name, layer.module)
