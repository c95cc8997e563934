"""Tensor parallelism of n ranks in one process: what compression does to a model, without the ranks.

`emulate` puts in place of a model's layers such as keep the dense weights and send what ranks would send through the
same verbs in the same order, so that with nearest rounding the sums are those of the collectives, to the bit
(stochastic rounding and randk draw other numbers). Forward and backward pass are compressed as the layers' are.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from dtcomm.codecs import Codec
from dtcomm.codecs import codec as parse
from dtcomm.kernels import counter_rng, ops
from dtcomm.tp.comm_config import algorithm as automatic
from dtcomm.tp.functional import differentiable
from dtcomm.tp.layer_plan import SENDING, Plan, dense, packed, resolve

SHOTS = ("auto", "direct", "two_shot", "one_shot", "two_shot_symmetric")


def summed(
    parts: Sequence[torch.Tensor], spec: str | Codec, algorithm: str = "auto", seed: int = 0
) -> torch.Tensor:
    """The all-reduce of ``parts[rank]`` as every rank ends with it.

    algorithm: "auto" as of `Wire`, "one_shot" or "two_shot" ("direct" takes one shot where the codec loses nothing, as
    the planner does; the bits are the same), or "two_shot_symmetric", in which the owner's share is encoded too. The
    codec must not need an agreement of the ranks (exact, randk with a shared seed). ValueError.
    """
    which = parse(spec)
    if algorithm not in SHOTS:
        raise ValueError(f"algorithm: {algorithm!r}; valid: {', '.join(SHOTS)}")
    if which.needs_agreement:
        raise ValueError(f"codec: {which} needs ranks that talk before they encode; it is not emulated")
    first = parts[0]
    if algorithm == "auto":
        algorithm = automatic(len(parts), which, first.dtype)
    flat = [part.detach().reshape(-1) for part in parts]
    numel, ranks = first.numel(), len(parts)
    total = torch.empty_like(flat[0])
    if ranks == 1:
        return first.detach().clone()
    if algorithm == "one_shot" or (algorithm == "direct" and which.lossless(first.dtype)):
        payloads = [
            ops.encode(which, mine, key=counter_rng.mix_key(seed, rank, 0)) for rank, mine in enumerate(flat)
        ]
        ops.reduce(which, payloads, numel, dtype=first.dtype, out=total)
        return total.view(first.shape)
    granules = -(-numel // which.granularity)
    for owner in range(ranks):
        start, stop = (min(numel, granules * at // ranks * which.granularity) for at in (owner, owner + 1))
        if start == stop:
            continue
        payloads = [
            ops.encode(which, mine[start:stop], key=counter_rng.mix_key(seed, rank, owner), offset=start)
            for rank, mine in enumerate(flat)
            if rank != owner or algorithm == "two_shot_symmetric"
        ]
        ops.reduce_encode(
            which,
            payloads,
            stop - start,
            local=None if algorithm == "two_shot_symmetric" else flat[owner][start:stop],
            position=None if algorithm == "two_shot_symmetric" else owner,
            dtype=first.dtype,
            key=counter_rng.mix_key(seed, owner, ranks),
            offset=start,
            decoded=total[start:stop],
        )
    return total.view(first.shape)


def gathered(parts: Sequence[torch.Tensor], spec: str | Codec, dim: int = -1) -> torch.Tensor:
    """The all-gather of ``parts[rank]``, joined along ``dim``: every part through its own encoding."""
    which = parse(spec)
    seen = []
    for rank, part in enumerate(parts):
        own = part.detach().contiguous()
        result = torch.empty_like(own)
        ops.encode(which, own, key=counter_rng.mix_key(0, rank, 0), decoded=result)
        seen.append(result)
    return torch.cat(seen, dim)


class Emulated(nn.Module):
    """A linear layer or an embedding, of ``kind`` as in a plan, as if on so many ranks.

    `codec` and `backward_codec` may be changed between calls; `sent` counts the elements that were summed or gathered
    in the forward pass.
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
    ) -> None:
        super().__init__()
        self.kind, self.ranks, self.algorithm, self.name = kind, ranks, algorithm, name
        self.codec, self.backward_codec = codec, backward_codec
        self.module = module
        self.sent = 0
        if kind != "vocabulary":
            weight, _ = dense(module, name)
            over, what = (weight.shape[1], "input") if kind == "row" else (weight.shape[0], "output")
            if over % (ranks * packed(kind)):
                raise ValueError(f"{name}: {over} {what} features do not divide among {ranks} ranks")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """As the layer that stands for it in a tensor-parallel model, all its ranks together."""
        y: torch.Tensor
        if self.kind == "vocabulary":
            assert isinstance(self.module, nn.Embedding)
            vectors = F.embedding(x, self.module.weight)
            self.sent += vectors.numel()
            y = differentiable(_Vocabulary, vectors, x, self)
            return y
        weight, bias = dense(self.module, self.name)
        y = differentiable(_Row if self.kind == "row" else _Column, x, weight, self)
        if self.kind in SENDING:
            self.sent += y.numel()
        if bias is not None:
            y = y + bias.to(y.dtype)
        if self.kind == "column_gather":
            y = differentiable(_Gather, y, self)
        return y

    def features(self, rank: int, total: int) -> torch.Tensor:
        """Which of the output features are a rank's."""
        count = packed(self.kind)
        each = torch.arange(total).view(count, self.ranks, -1)
        return each[:, rank].reshape(-1)


class _Row(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, layer: Emulated) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        parts = [
            mine.contiguous() @ columns.t()
            for mine, columns in zip(
                x.chunk(layer.ranks, -1), weight.to(x.dtype).chunk(layer.ranks, 1), strict=True
            )
        ]
        return summed(parts, layer.codec, layer.algorithm)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        flat = gradient.reshape(-1, gradient.shape[-1])
        dx = gradient @ weight.to(gradient.dtype) if ctx.needs_input_grad[0] else None
        dw = flat.t() @ x.reshape(-1, x.shape[-1]) if ctx.needs_input_grad[1] else None
        return dx, dw, None


class _Column(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, layer: Emulated) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.layer = layer
        return F.linear(x, weight.to(x.dtype))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        layer: Emulated = ctx.layer
        dx = None
        if ctx.needs_input_grad[0]:
            own = [layer.features(rank, len(weight)) for rank in range(layer.ranks)]
            parts = [gradient[..., rows].contiguous() @ weight[rows].to(gradient.dtype) for rows in own]
            dx = summed(parts, layer.backward_codec, layer.algorithm)
        flat = gradient.reshape(-1, gradient.shape[-1])
        dw = flat.t() @ x.reshape(-1, x.shape[-1]) if ctx.needs_input_grad[1] else None
        return dx, dw, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, layer: Emulated) -> torch.Tensor:
        return gathered(y.chunk(layer.ranks, -1), layer.codec)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient, None


class _Vocabulary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, tokens: torch.Tensor, layer: Emulated) -> torch.Tensor:
        assert isinstance(layer.module, nn.Embedding)
        rows = layer.module.num_embeddings // layer.ranks
        parts = [y * (tokens // rows == rank).unsqueeze(-1).to(y.dtype) for rank in range(layer.ranks)]
        return summed(parts, layer.codec, layer.algorithm)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient, None, None


def emulate(
    model: nn.Module,
    ranks: int,
    plan: Plan | str | Path | None = None,
    codec: str | Codec = "int8",
    *,
    backward_codec: str | Codec = "none",
    algorithm: str = "auto",
) -> dict[str, Emulated]:
    """Put `Emulated` layers in place, as `compress` would the layers of ``ranks`` ranks; returns them by name.

    plan, codec, backward_codec, algorithm: as of `compress`. ValueError as `compress` raises it; the model is unchanged
    then. ``restore`` takes them out again.
    """
    if ranks < 1:
        raise ValueError(f"ranks: expected 1 or more, got {ranks}")
    back = parse(backward_codec)
    made = {
        name: Emulated(module, entry.kind, ranks, parse(entry.codec or codec), back, algorithm, name)
        for name, (module, entry) in resolve(model, plan, ranks).items()
    }
    for name, layer in made.items():
        _put(model, name, layer)
    return made


def restore(model: nn.Module, layers: dict[str, Emulated]) -> None:
    """The model as it was before `emulate`."""
    for name, layer in layers.items():
        _put(model, name, layer.module)


def _put(model: nn.Module, name: str, layer: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, layer)
