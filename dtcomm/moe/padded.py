"""`dispatch_padded` and `combine_padded`: rows of a fixed number, so that the host never waits for the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, overload

import torch
import torch.distributed as dist
from typing_extensions import Unpack

from dtcomm import torch_compat
from dtcomm.arguments import complete_options, require_bool, shares_options
from dtcomm.codecs import Codec
from dtcomm.codecs import codec as parse
from dtcomm.collectives import all_to_all
from dtcomm.collectives.groups import GroupOrMesh, host_groups, process_group_of
from dtcomm.errors import CollectiveMismatch
from dtcomm.kernels import local_tasks
from dtcomm.moe.encoded_rows import EncodedRows, decode_rows, encode_rows
from dtcomm.moe.hops import sum_slots, with_zero_row
from dtcomm.moe.placement import Hosts, Relays
from dtcomm.moe.route import (
    CAPACITY,
    DEFAULTS,
    HEADER,
    CodecOptions,
    RowCodecs,
    check_headers,
    checked_choices,
    count_choices,
    deliver,
    make_codecs,
    make_header,
    mismatch,
    positions_of_choices,
    record,
    require_capacity,
    require_weights,
)
from dtcomm.torch_compat import autograd_apply, exclude_from_compilation


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
        rank: This rank in the group.
        codecs: The codecs of tokens, outputs and gradients.
        group: Process group; None is the default group.
        relays: The hops between and inside hosts; None if rows go directly.
    """

    capacity: int
    choices_shape: tuple[int, int]
    counts: torch.Tensor
    slots: torch.Tensor
    world_size: int
    rank: int
    codecs: RowCodecs
    group: dist.ProcessGroup | None
    relays: Relays | None = None

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

    def exchange(
        self, payload: torch.Tensor, what: str, codec: Codec, features: int, dtype: torch.dtype
    ) -> torch.Tensor:
        """Send as many rows to each rank as it sends back: uint8 [num_experts * capacity, bytes]."""
        blocks = payload.view(self.world_size, -1, payload.shape[1])

        def exchange(
            message: torch.Tensor, sent: Sequence[int], received: Sequence[int], level: str
        ) -> torch.Tensor:
            output = message.new_empty((sum(received), *message.shape[1:]))
            work = all_to_all(output, message, list(received), list(sent), group=self.group, async_op=True)
            work.wait()
            to_others = sum(count for peer, count in enumerate(sent) if peer != self.rank)
            numel = to_others * blocks.shape[1] * features
            record(self.group, level, what, str(codec), dtype, numel, work)
            return output

        if self.relays is not None:
            return self.relays.exchange(blocks, exchange).view_as(payload)
        one_each = [1] * self.world_size
        return exchange(blocks, one_each, one_each, "all ranks, padded").view_as(payload)

    def give_back(self, rows: torch.Tensor, what: str, codec: Codec) -> torch.Tensor:
        """Send the experts' rows back; return them in the order in which they were sent, and a row of zeros."""
        payload = encode_rows(self.by_rank(rows), codec, self.rank)
        returned = self.exchange(payload, what, codec, rows.shape[2], rows.dtype)
        return decode_rows(returned, codec, rows.shape[2], rows.dtype, zero_row=True)

    def sum_gradients(self, gradient: torch.Tensor) -> torch.Tensor:
        """Send the gradients of the experts' rows back and return the sum for each token of this rank."""
        returned = self.give_back(gradient, "gradients of tokens", self.codecs.backward)
        return sum_slots(returned, self.slots.view(self.choices_shape))

    def by_expert(self, rows: torch.Tensor) -> torch.Tensor:
        """Return rows ordered by rank, expert and slot as [local experts, ranks * capacity, ...]."""
        shape = (self.world_size, len(self.counts), self.capacity, rows.shape[-1])
        return rows.view(shape).transpose(0, 1).flatten(1, 2)

    def by_rank(self, rows: torch.Tensor) -> torch.Tensor:
        """The inverse of `by_expert`, [num_experts * capacity, ...]."""
        shape = (len(self.counts), self.world_size, self.capacity, rows.shape[-1])
        return rows.reshape(shape).transpose(0, 1).reshape(-1, rows.shape[-1])


@overload
def dispatch_padded(
    x: torch.Tensor,
    experts: torch.Tensor,
    num_experts: int,
    capacity: int,
    *,
    priorities: torch.Tensor | None = None,
    hierarchical: bool = False,
    encoded: Literal[False] = False,
    group: GroupOrMesh = None,
    **options: Unpack[CodecOptions],
) -> tuple[torch.Tensor, PaddedRoute]: ...


@overload
def dispatch_padded(
    x: torch.Tensor,
    experts: torch.Tensor,
    num_experts: int,
    capacity: int,
    *,
    priorities: torch.Tensor | None = None,
    hierarchical: bool = False,
    encoded: Literal[True],
    group: GroupOrMesh = None,
    **options: Unpack[CodecOptions],
) -> tuple[EncodedRows, PaddedRoute]: ...


@shares_options(DEFAULTS, CodecOptions)
@exclude_from_compilation
def dispatch_padded(
    x: torch.Tensor,
    experts: torch.Tensor,
    num_experts: int,
    capacity: int,
    *,
    priorities: torch.Tensor | None = None,
    hierarchical: bool = False,
    encoded: bool = False,
    group: GroupOrMesh = None,
    **options: Unpack[CodecOptions],
) -> tuple[torch.Tensor | EncodedRows, PaddedRoute]:
    """Send each token to the ranks that hold its experts, without waiting for the device. Differentiable in ``x``.

    All sizes are known to the host: each rank sends ``capacity`` rows to each expert. Rows that are not in use are
    zeros and are sent too, and a token is sent once for each of its experts. Of more than ``capacity`` rows for one
    expert the last ones are dropped, as in GShard.

    Args:
        experts: The experts of each token, int32 or int64, [tokens] or [tokens, choices], 0 to ``num_experts - 1``, on
            the device of ``x``. On CUDA another value is a failed assertion of the device.
        capacity: Rows from one rank to one expert. The largest that a rank passes holds for all, so each may compute it
            from its own number of tokens; on CUDA, where the host does not wait, all ranks pass the same. If it is the
            number of tokens, and no token chooses an expert twice, nothing is ever dropped.
        hierarchical: Whether rows go first between hosts, to one rank of each, and then inside them: the same rows
            and the same bytes between hosts, in fewer messages. Default: False, they go directly.

    Returns:
        The rows for this rank's experts, [local experts, ranks * capacity, features], and the route, for
        `combine_padded`. Rows of an expert are ordered by their rank and then by token, or by priority. With
        ``encoded`` they are `EncodedRows`. The route's ``mask``, bool [local experts, ranks * capacity], says which
        rows are in use; its ``counts``, int64 [local experts, ranks], says how many; ``dropped`` counts this rank's
        pairs that exceeded the capacity.

    Raises:
        TypeError, ValueError: An argument is not valid; the message names it.
        CollectiveMismatch: Ranks pass different sizes, dtypes or codecs; the message names the argument. On CUDA this
            is a failed assertion of the device, as different capacities are.

    Example::

        scores, experts = router(x).topk(2)                                              # [tokens, 2]
        capacity = dtcomm.moe.expert_capacity(len(x), 64, choices=2)
        rows, route = dtcomm.moe.dispatch_padded(x, experts, 64, capacity)
        y = dtcomm.moe.combine_padded(torch.bmm(rows, expert_weights), route, scores.softmax(-1))
    """
    group = process_group_of(group, "ep")
    world_size, rank = dist.get_world_size(group), dist.get_rank(group)
    choices = checked_choices(x, experts, num_experts, priorities, world_size)
    require_capacity(capacity)
    require_bool("hierarchical", hierarchical)
    codecs = make_codecs(**complete_options("dtcomm.moe.dispatch_padded", options, DEFAULTS))
    flat = choices.reshape(-1).clamp(0, num_experts - 1)
    counts = count_choices(flat, num_experts)
    positions = positions_of_choices(flat, counts, priorities)
    header = make_header(x, choices, capacity, hierarchical, codecs)
    received_counts, capacity = _exchange_counts(header, counts, capacity, rank, num_experts, group)
    total = num_experts * capacity
    slots = torch.where(positions < capacity, flat * capacity + positions, total)
    route = PaddedRoute(
        capacity=capacity,
        choices_shape=(len(x), choices.shape[1]),
        counts=received_counts.t().contiguous(),
        slots=slots,
        world_size=world_size,
        rank=rank,
        codecs=codecs,
        group=group,
        relays=Relays.of(Hosts.of(host_groups(x, group)), rank) if hierarchical else None,
    )
    # Rows that are not in use hold the payload of zeros; one more row takes what is dropped.
    payload = encode_rows(with_zero_row(x.detach()), codecs.dispatch, rank)
    tokens = torch.arange(len(flat), device=x.device) // choices.shape[1]
    sent = payload[-1:].repeat(total + 1, 1).index_copy_(0, slots, payload.index_select(0, tokens))[:total]
    arrived = route.by_expert(route.exchange(sent, "tokens", codecs.dispatch, x.shape[1], x.dtype))
    return deliver(x, arrived, route, encoded), route


@exclude_from_compilation
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

    Example::

        y = dtcomm.moe.combine_padded(torch.bmm(rows, expert_weights), route, weights)
    """
    local_experts, rows = len(route.counts), route.world_size * route.capacity
    if outputs.ndim != 3 or outputs.shape[:2] != (local_experts, rows):
        raise ValueError(
            f"outputs: expected [{local_experts}, {rows}, features], one row for each row that dispatch_padded "
            f"returned, got {tuple(outputs.shape)}"
        )
    require_weights("weights", weights, route.choices_shape)
    returned: torch.Tensor = autograd_apply(_Returned, outputs, route)
    results = returned.view(*route.choices_shape, outputs.shape[2])
    if weights is not None:
        results = results * weights.view(*route.choices_shape, 1).to(results.dtype)
    if route.codecs.combine.reproducible:
        rounded: torch.Tensor = autograd_apply(_RoundedSum, results)
        return rounded
    return results.sum(1)


class _RoundedSum(torch.autograd.Function):
    """Sums the choices of each token, [tokens, choices, features]: the exact sum, rounded once."""

    @staticmethod
    def forward(ctx: Any, terms: torch.Tensor) -> torch.Tensor:
        ctx.choices = terms.shape[1]
        total, _ = local_tasks.sum_rounded(terms.transpose(0, 1).flatten(1).contiguous())
        return total.view(len(terms), terms.shape[2])

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient[:, None].expand(-1, ctx.choices, -1)


class _Returned(torch.autograd.Function):
    """Returns the row of each (token, choice) pair, zeros for those that were dropped."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, route: PaddedRoute) -> torch.Tensor:
        ctx.route = route
        codec = parse("none") if route.codecs.combine.reproducible else route.codecs.combine
        return route.give_back(rows, "outputs", codec).index_select(0, route.slots)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        route: PaddedRoute = ctx.route
        codec, features = route.codecs.backward, gradient.shape[1]
        payload = encode_rows(with_zero_row(gradient), codec, route.rank)
        total = len(route.counts) * route.world_size * route.capacity
        sent = payload[-1:].repeat(total + 1, 1).index_copy_(0, route.slots, payload[:-1])[:total]
        arrived = route.exchange(sent, "gradients of outputs", codec, features, gradient.dtype)
        return decode_rows(route.by_expert(arrived), codec, features, gradient.dtype), None


def _exchange_counts(
    header: torch.Tensor,
    counts: torch.Tensor,
    capacity: int,
    rank: int,
    num_experts: int,
    group: dist.ProcessGroup | None,
) -> tuple[torch.Tensor, int]:
    """Send each rank the counts of its experts, and check the headers.

    Returns the counts of rows, int64 [ranks, local experts], and the capacity, on which the ranks agree.
    """
    ranks = dist.get_world_size(group)
    sent = torch.cat([header.expand(ranks, -1), counts.view(ranks, -1)], 1)
    received = torch.empty_like(sent)
    try:
        all_to_all(received, sent, group=group)
    except CollectiveMismatch as error:
        raise mismatch(num_experts, error) from None
    headers = received[:, :HEADER]
    if header.is_cpu:
        lists = headers.tolist()
        check_headers(lists, rank, num_experts, group)
        capacity = max(values[CAPACITY] for values in lists)
    else:
        torch_compat.assert_async(
            (headers[:, :-2] == header[:-2]).all(), "dispatch_padded: the ranks pass different arguments"
        )
        in_range = ((headers[:, -2] >= 0) & (headers[:, -1] < num_experts)).all()
        torch_compat.assert_async(in_range, f"experts: expected 0 to {num_experts - 1}")
    return received[:, HEADER:].clamp(max=capacity), capacity
