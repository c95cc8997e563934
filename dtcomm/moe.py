"""Expert parallelism with compressed tokens: dispatch to the ranks that hold the experts, and combine what comes back.

    tokens, route = dtcomm.moe.dispatch(x, experts, total, codec="fp8_e4m3")
    outputs = [expert(part) for expert, part in zip(mine, route.split(tokens))]
    y = dtcomm.moe.combine(torch.cat(outputs), route, weights)

Experts are shared out evenly, in order: of `total` on n ranks, rank r holds r * total / n to (r + 1) * total / n - 1.
Both directions are differentiable, each the other's backward; the gradients travel in `backward_codec`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from dtcomm.codecs import Codec
from dtcomm.codecs import codec as parse
from dtcomm.collectives import all_to_all


@dataclass(frozen=True, kw_only=True)
class Route:
    """Where this rank's tokens went and whose it got.

    sent, received: rows to and from each rank. counts: rows of each local expert, in order, as `tokens` holds them.
    """

    sent: tuple[int, ...]
    received: tuple[int, ...]
    counts: tuple[int, ...]
    shape: tuple[int, int]  # of `experts`: tokens, choices of each
    order: torch.Tensor  # the (token, choice) pair, as an index, of each row that was sent
    grouped: torch.Tensor  # the received row that each row of `tokens` is
    codec: Codec
    backward_codec: Codec
    group: dist.ProcessGroup | None

    def split(self, tokens: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The rows of each local expert."""
        return torch.split(tokens, list(self.counts))

    def reverse(self) -> Route:
        """The way back: what was received is sent."""
        return Route(
            sent=self.received,
            received=self.sent,
            counts=self.counts,
            shape=self.shape,
            order=self.order,
            grouped=self.grouped,
            codec=self.codec,
            backward_codec=self.backward_codec,
            group=self.group,
        )


def dispatch(
    x: torch.Tensor,
    experts: torch.Tensor,
    total: int,
    *,
    codec: str | Codec = "none",
    backward_codec: str | Codec = "none",
    group: dist.ProcessGroup | None = None,
) -> tuple[torch.Tensor, Route]:
    """Send each token to its experts; returns the rows for this rank's experts, grouped by expert, and the route.

    x: [tokens, features]; experts: integers [tokens] or [tokens, choices], 0 to total - 1. Rows of an expert are in the
    order of their rank and then of their token. ValueError and TypeError name the argument.
    """
    ranks = dist.get_world_size(group)
    if x.ndim != 2:
        raise ValueError(f"x: expected [tokens, features], got {tuple(x.shape)}")
    if (
        experts.dtype not in (torch.int32, torch.int64)
        or experts.ndim not in (1, 2)
        or len(experts) != len(x)
    ):
        raise ValueError(
            f"experts: expected integers [{len(x)}] or [{len(x)}, choices], got {experts.dtype} {tuple(experts.shape)}"
        )
    if total < 1 or total % ranks:
        raise ValueError(f"total: {total} experts do not divide among {ranks} ranks")
    choices = experts if experts.ndim == 2 else experts[:, None]
    flat = choices.reshape(-1)
    if flat.numel() and not 0 <= int(flat.min()) <= int(flat.max()) < total:
        raise ValueError(f"experts: expected 0 to {total - 1}, got {int(flat.min())} to {int(flat.max())}")
    order = torch.argsort(flat, stable=True)
    mine = total // ranks
    asked = torch.bincount(flat, minlength=total)
    told = torch.empty_like(asked)  # [rank, local expert]: rows that each rank sends to each of mine
    all_to_all(told, asked, group=group)
    told = told.view(ranks, mine)
    # Rows arrive by rank and, of a rank, by expert: regroup them by expert and, of an expert, by rank.
    kind = torch.arange(mine).repeat(ranks).repeat_interleave(told.reshape(-1))
    grouped = torch.argsort(kind, stable=True)
    route = Route(
        sent=tuple(asked.view(ranks, mine).sum(1).tolist()),
        received=tuple(told.sum(1).tolist()),
        counts=tuple(told.sum(0).tolist()),
        shape=(len(x), choices.shape[1]),
        order=order,
        grouped=grouped,
        codec=parse(codec),
        backward_codec=parse(backward_codec),
        group=group,
    )
    rows = x.index_select(0, order // choices.shape[1]) if len(x) else x
    arrived: torch.Tensor = _differentiable(_Exchange, rows, route)
    return arrived.index_select(0, grouped), route


def combine(outputs: torch.Tensor, route: Route, weights: torch.Tensor | None = None) -> torch.Tensor:
    """Send the experts' outputs back; each token's are added, times its weights where given.

    outputs: [rows, features'], rows as `dispatch` gave them. weights: [tokens] or [tokens, choices]. Returns
    [tokens, features']. ValueError names the argument.
    """
    if outputs.ndim != 2 or len(outputs) != sum(route.counts):
        raise ValueError(
            f"outputs: expected [{sum(route.counts)}, features], got {tuple(outputs.shape)}: one row a dispatched one"
        )
    tokens, choices = route.shape
    if weights is not None and weights.numel() != tokens * choices:
        raise ValueError(f"weights: expected [{tokens}, {choices}], got {tuple(weights.shape)}")
    back = torch.empty_like(route.grouped)
    back[route.grouped] = torch.arange(len(back))
    returned: torch.Tensor = _differentiable(_Exchange, outputs.index_select(0, back), route.reverse())
    place = torch.empty_like(route.order)
    place[route.order] = torch.arange(len(place))
    rows = returned.index_select(0, place).view(tokens, choices, outputs.shape[1])
    if weights is not None:
        rows = rows * weights.view(tokens, choices, 1).to(rows.dtype)
    return rows.sum(1)


class _Exchange(torch.autograd.Function):
    """Rows along a route; gradients back along it."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, route: Route) -> torch.Tensor:
        ctx.route = route
        return _exchanged(rows, route.sent, route.received, route.codec, route.group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        route = ctx.route
        return _exchanged(gradient, route.received, route.sent, route.backward_codec, route.group), None


def _exchanged(
    rows: torch.Tensor,
    sent: Sequence[int],
    received: Sequence[int],
    which: Codec,
    group: dist.ProcessGroup | None,
) -> torch.Tensor:
    arrived = torch.empty((sum(received), rows.shape[1]), dtype=rows.dtype, device=rows.device)
    all_to_all(arrived, rows.detach().contiguous(), list(received), list(sent), codec=which, group=group)
    return arrived


def _differentiable(function: Any, *arguments: Any) -> Any:
    return function.apply(*arguments)
