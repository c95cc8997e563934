"""Expert parallelism: `dispatch` sends tokens to the ranks that hold their experts, `combine` brings the results back.

Example::

    tokens, route = dtcomm.moe.dispatch(x, experts, num_experts, codec="fp8_e4m3")
    outputs = [expert(part) for expert, part in zip(local_experts, route.split(tokens))]
    y = dtcomm.moe.combine(torch.cat(outputs), route, weights)

Experts are distributed evenly and in order: of n ranks, rank r holds the experts ``r * num_experts / n`` to
``(r + 1) * num_experts / n - 1``. Both functions are differentiable; each one's gradient travels the other's way, in
``backward_codec``. This is the all-to-all scheme of GShard (Lepikhin et al. 2020, arXiv:2006.16668) without a capacity:
no token is dropped.

On CUDA tensors all index tensors stay on the device. `dispatch` waits for the device once: to learn how many rows to
send and to receive, which the size of its result depends on. `combine` and the backward passes do not wait.
`dispatch_padded` and `combine_padded` never wait, so they can be captured in graphs: every rank sends room for
``capacity`` rows to every expert, and the counts stay on the device. A row that exceeds the capacity is dropped, as in
GShard.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from dtcomm._autograd import autograd_apply
from dtcomm.codecs import Codec
from dtcomm.codecs import codec as parse
from dtcomm.collectives import all_to_all


@dataclass(frozen=True, kw_only=True)
class Route:
    """Where `dispatch` sent this rank's tokens, which `combine` needs to bring their results back.

    A row is one (token, choice) pair: a token that chooses two experts is sent as two rows.

    Attributes:
        sent: Number of rows sent to each rank.
        received: Number of rows received from each rank.
        counts: Number of received rows of each local expert, in the experts' order.
        choices_shape: Number of tokens, and of choices of each token.
        send_order: [sent rows], for each sent row the index of its (token, choice) pair.
        expert_order: [received rows], for each row that `dispatch` returned its position among the received rows.
        codec: Codec of the rows.
        backward_codec: Codec of the rows' gradients.
        group: Process group; None is the default group.
    """

    sent: tuple[int, ...]
    received: tuple[int, ...]
    counts: tuple[int, ...]
    choices_shape: tuple[int, int]
    send_order: torch.Tensor
    expert_order: torch.Tensor
    codec: Codec
    backward_codec: Codec
    group: dist.ProcessGroup | None

    def split(self, tokens: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Split the rows that `dispatch` returned into those of each local expert."""
        return torch.split(tokens, list(self.counts))

    def reverse(self) -> Route:
        """Return the route in the other direction: it sends what was received."""
        return replace(self, sent=self.received, received=self.sent)


def dispatch(
    x: torch.Tensor,
    experts: torch.Tensor,
    num_experts: int,
    *,
    codec: str | Codec = "none",
    backward_codec: str | Codec = "none",
    group: dist.ProcessGroup | None = None,
) -> tuple[torch.Tensor, Route]:
    """Send each token to the ranks that hold its experts. Differentiable with respect to ``x``.

    Args:
        x: This rank's tokens, [tokens, features]; fp32, fp16 or bf16. The number of tokens may differ between ranks
            and may be 0.
        experts: The experts of each token, int32 or int64, [tokens] or [tokens, choices], 0 to ``num_experts - 1``, on
            the device of ``x``.
        num_experts: Number of experts on all ranks together; divisible by the number of ranks.
        codec: Codec of the tokens, a spec or a `Codec`. Default: ``"none"``.
        backward_codec: Codec of the gradients. Default: ``"none"``.
        group: Process group. Default: all ranks.

    Returns:
        The rows for this rank's experts, [rows, features], grouped by expert; the rows of an expert are ordered by
        their rank and then by token. And the route, for `Route.split` and `combine`.

    Raises:
        ValueError: A shape, dtype, device or value does not fit; the message names the argument.

    Example::

        scores, experts = router(x).topk(2)                      # [tokens, 2]
        tokens, route = dtcomm.moe.dispatch(x, experts, 64, codec="fp8_e4m3", backward_codec="fp8_e5m2")
        y = dtcomm.moe.combine(run_experts(tokens, route.counts), route, scores.softmax(-1))
    """
    world_size = dist.get_world_size(group)
    _require_choices(x, experts, num_experts, world_size)
    choices = experts if experts.ndim == 2 else experts[:, None]
    asked = choices.reshape(-1)
    # Values outside the range are reported once the host knows the counts, which is its only wait for the device.
    lowest_and_highest = torch.stack(torch.aminmax(asked if asked.numel() else asked.new_zeros(1)))
    flat = asked.clamp(0, num_experts - 1)
    send_order = torch.argsort(flat, stable=True)
    local_experts = num_experts // world_size
    send_counts = _count(flat, num_experts)
    receive_counts = torch.empty_like(send_counts)
    all_to_all(receive_counts, send_counts, group=group)
    send_matrix = send_counts.view(world_size, local_experts)  # rows for [rank, expert of that rank]
    receive_matrix = receive_counts.view(world_size, local_experts)  # rows from [rank] for [local expert]
    # One transfer to the host for all lists.
    *totals, lowest, highest = torch.cat(
        [send_matrix.sum(1), receive_matrix.sum(1), receive_matrix.sum(0), lowest_and_highest.to(torch.int64)]
    ).tolist()
    if not 0 <= lowest <= highest < num_experts:
        raise ValueError(f"experts: expected 0 to {num_experts - 1}, got {lowest} to {highest}")
    sent, received = totals[:world_size], totals[world_size : 2 * world_size]
    # Received rows are ordered by rank and then by expert: a stable sort by expert orders them by expert, then by rank.
    row_experts = (
        torch.arange(local_experts, device=x.device)
        .repeat(world_size)
        .repeat_interleave(receive_counts, output_size=sum(received))
    )
    expert_order = torch.argsort(row_experts, stable=True)
    route = Route(
        sent=tuple(sent),
        received=tuple(received),
        counts=tuple(totals[2 * world_size :]),
        choices_shape=(len(x), choices.shape[1]),
        send_order=send_order,
        expert_order=expert_order,
        codec=parse(codec),
        backward_codec=parse(backward_codec),
        group=group,
    )
    rows = x.index_select(0, send_order // choices.shape[1]) if len(x) else x
    arrived: torch.Tensor = autograd_apply(_Exchange, rows, route)
    return arrived.index_select(0, expert_order), route


def combine(outputs: torch.Tensor, route: Route, weights: torch.Tensor | None = None) -> torch.Tensor:
    """Return the experts' outputs to their tokens' ranks and sum those of each token. Differentiable.

    Args:
        outputs: The results of this rank's experts, [rows, out_features], one per row that `dispatch` returned and in
            the same order.
        route: The route that `dispatch` returned.
        weights: Weights of the sum, [tokens, choices] (or [tokens] with one choice). Default: 1.

    Returns:
        [tokens, out_features], in the order of the tokens passed to `dispatch`.

    Raises:
        ValueError: A shape does not fit the route; the message names the argument.
    """
    if outputs.ndim != 2 or len(outputs) != sum(route.counts):
        raise ValueError(
            f"outputs: expected [{sum(route.counts)}, features], one row for each row that dispatch returned, "
            f"got {tuple(outputs.shape)}"
        )
    _require_weights(weights, route.choices_shape)
    rows = outputs.index_select(0, _inverse_permutation(route.expert_order))
    returned: torch.Tensor = autograd_apply(_Exchange, rows, route.reverse())
    return _weighted_sum(
        returned.index_select(0, _inverse_permutation(route.send_order)), route.choices_shape, weights
    )


@dataclass(frozen=True, kw_only=True)
class PaddedRoute:
    """Where `dispatch_padded` sent this rank's tokens, which `combine_padded` needs to bring their results back.

    Attributes:
        capacity: Number of rows that a rank sends to each expert, used or not.
        choices_shape: Number of tokens, and of choices of each token.
        counts: [local experts, ranks], int64: number of rows in use of each local expert, from each rank.
        slots: [tokens * choices], int64: the row of each (token, choice) pair among the rows that this rank sent;
            ``num_experts * capacity`` for a pair that was dropped.
        world_size: Number of ranks.
        codec: Codec of the rows.
        backward_codec: Codec of the rows' gradients.
        group: Process group; None is the default group.
    """

    capacity: int
    choices_shape: tuple[int, int]
    counts: torch.Tensor
    slots: torch.Tensor
    world_size: int
    codec: Codec
    backward_codec: Codec
    group: dist.ProcessGroup | None

    @property
    def mask(self) -> torch.Tensor:
        """[local experts, ranks * capacity], bool: the rows in use. The others are zeros."""
        positions = torch.arange(self.capacity, device=self.counts.device)
        return (positions < self.counts[:, :, None]).flatten(1)

    @property
    def dropped(self) -> torch.Tensor:
        """Number of this rank's (token, choice) pairs that exceeded the capacity: an int64 tensor on the device."""
        sent = len(self.counts) * self.world_size * self.capacity
        return (self.slots == sent).sum()


def dispatch_padded(
    x: torch.Tensor,
    experts: torch.Tensor,
    num_experts: int,
    capacity: int,
    *,
    codec: str | Codec = "none",
    backward_codec: str | Codec = "none",
    group: dist.ProcessGroup | None = None,
) -> tuple[torch.Tensor, PaddedRoute]:
    """Send each token to the ranks that hold its experts, without waiting for the device. Differentiable in ``x``.

    All sizes are known to the host: each rank sends ``capacity`` rows to each expert. Rows that are not in use are
    zeros and travel, too. Of more than ``capacity`` rows for one expert the last ones are dropped.

    Args:
        x: This rank's tokens, [tokens, features]; fp32, fp16 or bf16. The number of tokens may differ between ranks
            and may be 0.
        experts: The experts of each token, int32 or int64, [tokens] or [tokens, choices], 0 to ``num_experts - 1``, on
            the device of ``x``. On CUDA another value is a failed assertion of the device.
        num_experts: Number of experts on all ranks together; divisible by the number of ranks.
        capacity: Rows from one rank to one expert, the same on all ranks. If it is the number of tokens, and no token
            chooses an expert twice, nothing is ever dropped.
        codec: Codec of the tokens, a spec or a `Codec`. Default: ``"none"``.
        backward_codec: Codec of the gradients. Default: ``"none"``.
        group: Process group. Default: all ranks.

    Returns:
        The rows for this rank's experts, [local experts, ranks * capacity, features], and the route, for
        `PaddedRoute.mask` and `combine_padded`. Rows of an expert are ordered by their rank and then by token.

    Raises:
        ValueError: A shape, dtype, device or value does not fit; the message names the argument.

    Example::

        scores, experts = router(x).topk(2)                                              # [tokens, 2]
        rows, route = dtcomm.moe.dispatch_padded(x, experts, 64, capacity=len(x) // 16, codec="fp8_e4m3")
        y = dtcomm.moe.combine_padded(torch.bmm(rows, expert_weights), route, scores.softmax(-1))
    """
    world_size = dist.get_world_size(group)
    _require_choices(x, experts, num_experts, world_size)
    if not isinstance(capacity, int) or capacity < 1:
        raise ValueError(f"capacity: expected a positive number of rows, got {capacity!r}")
    choices = experts if experts.ndim == 2 else experts[:, None]
    flat = choices.reshape(-1).to(torch.int64)
    in_range = ((flat >= 0) & (flat < num_experts)).all()
    message = f"experts: expected 0 to {num_experts - 1}"
    if x.is_cpu:
        if not in_range:
            raise ValueError(f"{message}, got {int(flat.min())} to {int(flat.max())}")
    else:
        torch._assert_async(in_range, message)
    counts = _count(flat, num_experts)
    # The position of a pair among those of its expert, in the pairs' order.
    order = torch.argsort(flat, stable=True)
    sorted_experts = flat.index_select(0, order)
    begins = counts.cumsum(0) - counts
    positions = torch.arange(len(flat), device=x.device) - begins.index_select(0, sorted_experts)
    total = num_experts * capacity
    slots_in_order = torch.where(positions < capacity, sorted_experts * capacity + positions, total)
    slots = torch.empty_like(slots_in_order).scatter_(0, order, slots_in_order)
    tokens = torch.arange(len(flat), device=x.device) // choices.shape[1]
    # One more row takes what is dropped.
    sent = x.new_zeros(total + 1, x.shape[1]).index_copy(0, slots, x.index_select(0, tokens))[:total]
    sent_counts = counts.clamp(max=capacity)
    received_counts = torch.empty_like(sent_counts)
    all_to_all(received_counts, sent_counts, group=group)
    route = PaddedRoute(
        capacity=capacity,
        choices_shape=(len(x), choices.shape[1]),
        counts=received_counts.view(world_size, -1).t().contiguous(),
        slots=slots,
        world_size=world_size,
        codec=parse(codec),
        backward_codec=parse(backward_codec),
        group=group,
    )
    arrived: torch.Tensor = autograd_apply(_PaddedExchange, sent, route)
    by_rank = arrived.view(world_size, num_experts // world_size, capacity, x.shape[1])
    return by_rank.transpose(0, 1).flatten(1, 2), route


def combine_padded(
    outputs: torch.Tensor, route: PaddedRoute, weights: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the experts' outputs to their tokens' ranks and sum those of each token. Differentiable.

    Args:
        outputs: The results of this rank's experts, [local experts, ranks * capacity, out_features], one row for each
            row that `dispatch_padded` returned. Rows that are not in use may have any values.
        route: The route that `dispatch_padded` returned.
        weights: Weights of the sum, [tokens, choices] (or [tokens] with one choice). Default: 1.

    Returns:
        [tokens, out_features], in the order of the tokens passed to `dispatch_padded`. A dropped choice adds nothing.

    Raises:
        ValueError: A shape does not fit the route; the message names the argument.
    """
    local_experts, rows = len(route.counts), route.world_size * route.capacity
    if outputs.ndim != 3 or outputs.shape[:2] != (local_experts, rows):
        raise ValueError(
            f"outputs: expected [{local_experts}, {rows}, features], one row for each row that dispatch_padded "
            f"returned, got {tuple(outputs.shape)}"
        )
    _require_weights(weights, route.choices_shape)
    by_expert = outputs.view(local_experts, route.world_size, route.capacity, outputs.shape[2])
    sent = by_expert.transpose(0, 1).reshape(-1, outputs.shape[2])
    returned: torch.Tensor = autograd_apply(_PaddedExchange, sent, route)
    with_zeros = torch.cat([returned, returned.new_zeros(1, outputs.shape[2])])
    return _weighted_sum(with_zeros.index_select(0, route.slots), route.choices_shape, weights)


def _require_choices(x: torch.Tensor, experts: torch.Tensor, num_experts: int, world_size: int) -> None:
    """Raise ValueError if the arguments of a dispatch do not fit each other."""
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
    if experts.device != x.device:
        raise ValueError(f"experts: expected a tensor on {x.device}, as x, got one on {experts.device}")
    if num_experts < 1 or num_experts % world_size:
        raise ValueError(f"num_experts: {num_experts} experts are not divisible by the {world_size} ranks")


def _require_weights(weights: torch.Tensor | None, choices_shape: tuple[int, int]) -> None:
    tokens, choices = choices_shape
    if weights is not None and weights.numel() != tokens * choices:
        raise ValueError(f"weights: expected [{tokens}, {choices}], got {tuple(weights.shape)}")


def _weighted_sum(
    results: torch.Tensor, choices_shape: tuple[int, int], weights: torch.Tensor | None
) -> torch.Tensor:
    """Return the sum over the choices of each token; ``results`` has a row for each (token, choice) pair."""
    results = results.view(*choices_shape, results.shape[1])
    if weights is not None:
        results = results * weights.view(*choices_shape, 1).to(results.dtype)
    return results.sum(1)


def _count(experts: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Return how often each expert occurs, int64. `torch.bincount` would wait for a CUDA device."""
    counts = torch.zeros(num_experts, dtype=torch.int64, device=experts.device)
    return counts.scatter_add_(0, experts.to(torch.int64), torch.ones_like(experts, dtype=torch.int64))


def _inverse_permutation(permutation: torch.Tensor) -> torch.Tensor:
    inverse = torch.empty_like(permutation)
    inverse[permutation] = torch.arange(len(permutation), device=permutation.device)
    return inverse


class _Exchange(torch.autograd.Function):
    """Sends rows along a route, and their gradients in the other direction."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, route: Route) -> torch.Tensor:
        ctx.route = route
        return _exchange(rows, route.sent, route.received, route.codec, route.group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        route = ctx.route
        return _exchange(gradient, route.received, route.sent, route.backward_codec, route.group), None


class _PaddedExchange(torch.autograd.Function):
    """Sends as many rows to each rank as it sends back, and their gradients in the other direction."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, route: PaddedRoute) -> torch.Tensor:
        ctx.route = route
        return _exchange_equal(rows, route.codec, route.group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return _exchange_equal(gradient, ctx.route.backward_codec, ctx.route.group), None


def _exchange_equal(rows: torch.Tensor, codec: Codec, group: dist.ProcessGroup | None) -> torch.Tensor:
    output = torch.empty_like(rows, memory_format=torch.contiguous_format)
    all_to_all(output, rows.detach().contiguous(), codec=codec, group=group)
    return output


def _exchange(
    rows: torch.Tensor,
    sent: Sequence[int],
    received: Sequence[int],
    codec: Codec,
    group: dist.ProcessGroup | None,
) -> torch.Tensor:
    output = torch.empty((sum(received), rows.shape[1]), dtype=rows.dtype, device=rows.device)
    all_to_all(output, rows.detach().contiguous(), list(received), list(sent), codec=codec, group=group)
    return output
