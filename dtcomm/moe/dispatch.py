"""`dispatch` and `combine`: rows in the numbers that are needed, and each token once for a rank or for a host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, overload

import torch
import torch.distributed as dist
from typing_extensions import Unpack

from dtcomm.arguments import complete_options, shares_options
from dtcomm.codecs import Codec
from dtcomm.codecs import codec as parse
from dtcomm.collectives.groups import GroupOrMesh, host_groups, process_group_of
from dtcomm.moe.encoded_rows import EncodedRows, decode_rows, encode_rows
from dtcomm.moe.hops import Carried, Hop, make_hop, one_hot, sum_slots, unique_destinations, with_zero_row
from dtcomm.moe.placement import Counts, Hosts, gather_tables
from dtcomm.moe.route import (
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
    positions_of_choices,
    require_capacity,
    require_weights,
)
from dtcomm.torch_compat import autograd_apply, exclude_from_compilation


@dataclass(frozen=True, kw_only=True)
class Route:
    """Where `dispatch` sent this rank's tokens, which `combine` needs to bring their results back.

    A row is one (token, choice) pair on the rank of its expert. A token is sent to a rank once, however many experts it
    has there; hierarchically it is sent once to each host.

    Attributes:
        counts: Number of rows of each local expert, in the experts' order.
        choices_shape: Number of tokens of this rank, and of choices of each token.
        dropped: Number of this rank's (token, choice) pairs that exceeded the capacity: an int64 tensor on the device.
        codecs: The codecs of tokens, outputs and gradients.
        hops: The all-to-alls, in order; ``hops[0].sent`` is what this rank sent to each rank.
        pair_index: int64 [rows], for each row that `dispatch` returned the number of its pair (arrived token, choice).
        pair_slots: int64 [arrived tokens, choices], the inverse; the number of rows where a pair is not of this rank.
        hosts: The host of each rank.
        rank: This rank in the group.
        group: Process group; None is the default group.
    """

    counts: tuple[int, ...]
    choices_shape: tuple[int, int]
    dropped: torch.Tensor
    codecs: RowCodecs
    hops: tuple[Hop, ...]
    pair_index: torch.Tensor
    pair_slots: torch.Tensor
    hosts: tuple[int, ...]
    rank: int
    group: dist.ProcessGroup | None

    @property
    def rows_between_hosts(self) -> int:
        """Number of rows that this rank sends to other hosts in a dispatch, its own and those that it passes on."""
        return self._rows_sent(inside_host=False)

    @property
    def rows_inside_host(self) -> int:
        """Number of rows that this rank sends to the other ranks of its host in a dispatch."""
        return self._rows_sent(inside_host=True)

    def _rows_sent(self, inside_host: bool) -> int:
        peers = [peer for peer in range(len(self.hosts)) if peer != self.rank]
        chosen = [peer for peer in peers if (self.hosts[peer] == self.hosts[self.rank]) == inside_host]
        return sum(hop.sent[peer] for hop in self.hops for peer in chosen)

    def sum_rows(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the sum of the rows of each arrived token."""
        if 0 < len(self.pair_index) == len(self.pair_slots):  # every token has one row
            return sum_slots(rows, self.pair_slots.amin(1, keepdim=True))
        return sum_slots(with_zero_row(rows), self.pair_slots)

    def split(self, tokens: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Split the rows that `dispatch` returned into those of each local expert."""
        return torch.split(tokens, list(self.counts))

    def spread(self, x: torch.Tensor, what: str, codec: Codec) -> torch.Tensor:
        """Send rows of this rank's tokens to the ranks of their experts; return their payload, one row a token."""
        payload, carried = encode_rows(x, codec, self.rank), Carried(what, codec, x.shape[1], x.dtype)
        for hop in self.hops:
            payload = hop.spread(payload, carried)
        return payload

    def collect(self, rows: torch.Tensor, what: str, codec: Codec) -> torch.Tensor:
        """Send rows of arrived tokens back to their ranks and sum those of each token."""
        for hop in reversed(self.hops):
            rows = hop.collect(rows, what, codec)
        return rows

    def sum_gradients(self, gradient: torch.Tensor) -> torch.Tensor:
        """Send the gradients of the experts' rows back and return the sum for each token of this rank."""
        return self.collect(self.sum_rows(gradient), "gradients of tokens", self.codecs.backward)


@overload
def dispatch(
    x: torch.Tensor,
    experts: torch.Tensor,
    num_experts: int,
    *,
    capacity: int | None = None,
    priorities: torch.Tensor | None = None,
    hierarchical: bool | None = None,
    encoded: Literal[False] = False,
    group: GroupOrMesh = None,
    **options: Unpack[CodecOptions],
) -> tuple[torch.Tensor, Route]: ...


@overload
def dispatch(
    x: torch.Tensor,
    experts: torch.Tensor,
    num_experts: int,
    *,
    capacity: int | None = None,
    priorities: torch.Tensor | None = None,
    hierarchical: bool | None = None,
    encoded: Literal[True],
    group: GroupOrMesh = None,
    **options: Unpack[CodecOptions],
) -> tuple[EncodedRows, Route]: ...


@shares_options(DEFAULTS, CodecOptions)
@exclude_from_compilation
def dispatch(
    x: torch.Tensor,
    experts: torch.Tensor,
    num_experts: int,
    *,
    capacity: int | None = None,
    priorities: torch.Tensor | None = None,
    hierarchical: bool | None = None,
    encoded: bool = False,
    group: GroupOrMesh = None,
    **options: Unpack[CodecOptions],
) -> tuple[torch.Tensor | EncodedRows, Route]:
    """Send each token to the ranks that hold its experts. Differentiable with respect to ``x``.

    Every token is encoded once, by itself. Its bytes go once to each rank that has one of its experts, or, if
    hierarchical, once to each host, where the rank that receives them passes them on without decoding. Every row is
    decoded from these bytes, those of this rank's own tokens too, so with every codec the rows depend neither on the
    ranks that hold the experts nor on the other tokens.

    Args:
        experts: The experts of each token, int32 or int64, [tokens] or [tokens, choices], 0 to ``num_experts - 1``, on
            the device of ``x``.
        capacity: Most rows from this rank to one expert; what exceeds it is dropped and not sent. Ranks with different
            numbers of tokens may pass different ones. Default: no limit.
        hierarchical: Whether tokens go first between hosts and then inside them. Default: if there are several
            hosts and one of them has several ranks.

    Returns:
        The rows for this rank's experts, [rows, features], grouped by expert; the rows of an expert are ordered by
        their rank and then by token. With ``encoded`` they are `EncodedRows`. And the route, for `Route.split` and
        `combine`.

    Raises:
        TypeError, ValueError: An argument is not valid; the message names it.
        CollectiveMismatch: Ranks pass different sizes, dtypes or codecs; the message names the argument.

    Example::

        scores, experts = router(x).topk(2)                      # [tokens, 2]
        tokens, route = dtcomm.moe.dispatch(x, experts, 64)
        y = dtcomm.moe.combine(run_experts(tokens, route.counts), route, scores.softmax(-1))
    """
    group = process_group_of(group, "ep")
    world_size, rank = dist.get_world_size(group), dist.get_rank(group)
    choices = checked_choices(x, experts, num_experts, priorities, world_size)
    if capacity is not None:
        require_capacity(capacity)
    codecs = make_codecs(**complete_options("dtcomm.moe.dispatch", options, DEFAULTS))
    if codecs.combine.reproducible:
        raise ValueError(
            f"combine_codec: {codecs.combine} rounds once, and combine sums on the experts' ranks and hosts first; "
            "valid: with dispatch_padded, or another codec"
        )
    hosts = Hosts.of(host_groups(x, group))
    by_hosts = hosts.has_two_levels if hierarchical is None else hierarchical
    local_experts = num_experts // world_size

    # Values outside the range are reported once the host knows the counts, which is its only wait for the device.
    chosen = choices.clamp(0, num_experts - 1)
    kept = _kept(chosen, num_experts, capacity, priorities)
    positions = hosts.positions_of(chosen // local_experts)
    destinations = unique_destinations(torch.where(kept, positions, world_size), world_size)
    host_destinations = unique_destinations(hosts.hosts_of(destinations), hosts.count)
    tables = [
        make_header(x, choices, capacity, by_hosts, codecs),
        count_choices(torch.where(kept, chosen, num_experts).reshape(-1), num_experts + 1)[:num_experts],
        one_hot(destinations, world_size).sum(0),
        one_hot(host_destinations, hosts.count).sum(0),
    ]
    lists = gather_tables(torch.cat(tables), world_size, num_experts, group)
    check_headers([row[:HEADER] for row in lists], rank, num_experts, group)
    counts = Counts(lists, num_experts, world_size, hosts)

    carried = Carried("tokens", codecs.dispatch, x.shape[1], x.dtype)
    payload = encode_rows(x, codecs.dispatch, rank)
    metadata = _make_metadata(torch.where(kept, chosen, -1), rank)
    source: torch.Tensor | None = None
    hops: tuple[Hop, ...]
    if by_hosts:
        relays = hosts.relays_of(rank)
        between = make_hop(
            "between hosts", host_destinations, relays, *counts.between_hosts(rank), rank, group
        )
        payload, source, metadata = between.spread_with_metadata(payload, None, metadata, carried)
        passed_on, _ = _read_metadata(metadata)
        own_host = hosts.members(rank)
        inside = make_hop(
            "inside hosts",
            hosts.destinations_inside(passed_on, local_experts, rank),
            own_host,
            *counts.inside_host(rank),
            rank,
            group,
        )
        hops = (between, inside)
    else:
        grouped = hosts.of_position if hosts.has_two_levels else None
        hops = (
            make_hop(
                "all ranks", destinations, hosts.ranks, *counts.between_ranks(rank), rank, group, grouped
            ),
        )
    arrived = hops[-1].spread_with_metadata(payload, source, metadata, carried)

    arrived_choices, sources = _read_metadata(arrived.metadata)
    rows = counts.rows(range(rank * local_experts, (rank + 1) * local_experts))
    local = arrived_choices - rank * local_experts
    local = torch.where((local >= 0) & (local < local_experts), local, local_experts)
    pair_index, pair_slots = _expand(local, sources if by_hosts else None, sum(rows))
    route = Route(
        counts=tuple(rows),
        choices_shape=(len(x), choices.shape[1]),
        dropped=kept.numel() - kept.sum(),
        codecs=codecs,
        hops=hops,
        pair_index=pair_index,
        pair_slots=pair_slots,
        hosts=hosts.of_rank,
        rank=rank,
        group=group,
    )
    return deliver(x, arrived.payload(pair_index // choices.shape[1]), route, encoded), route


@exclude_from_compilation
def combine(outputs: torch.Tensor, route: Route, weights: torch.Tensor | None = None) -> torch.Tensor:
    """Return the experts' outputs to their tokens' ranks and sum those of each token. Differentiable.

    The outputs are weighted on the rank of the experts and summed in fp32: there, then on their host if the route is
    hierarchical, and then on the token's rank. So between two ranks, or hosts, one row per token is sent. Weights go to
    the experts' ranks first, uncompressed.

    Args:
        outputs: The results of this rank's experts, [rows, out_features], one per row that `dispatch` returned and in
            the same order.
        route: The route that `dispatch` returned.
        weights: Weights of the sum, [tokens, choices] (or [tokens] with one choice). Default: 1.

    Returns:
        [tokens, out_features], in the order of the tokens passed to `dispatch`. A choice that was dropped adds nothing.

    Raises:
        ValueError: A shape does not fit the route; the message names the argument.

    Example::

        y = dtcomm.moe.combine(outputs, route, weights)
    """
    if outputs.ndim != 2 or len(outputs) != sum(route.counts):
        raise ValueError(
            f"outputs: expected [{sum(route.counts)}, features], one row for each row that dispatch returned, "
            f"got {tuple(outputs.shape)}"
        )
    require_weights("weights", weights, route.choices_shape)
    if weights is not None:
        row_weights = autograd_apply(_Weights, weights.float().view(route.choices_shape), route)
        outputs = outputs * row_weights[:, None].to(outputs.dtype)
    combined: torch.Tensor = autograd_apply(_Combined, outputs, route)
    return combined


class _Combined(torch.autograd.Function):
    """Sums the rows of each token."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, route: Route) -> torch.Tensor:
        ctx.route = route
        return route.collect(route.sum_rows(rows), "outputs", route.codecs.combine)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        route: Route = ctx.route
        codec = route.codecs.backward
        payload = route.spread(gradient, "gradients of outputs", codec)
        payload = payload.index_select(0, route.pair_index // route.choices_shape[1])
        return decode_rows(payload, codec, gradient.shape[1], gradient.dtype), None


class _Weights(torch.autograd.Function):
    """Sends each (token, choice) pair's weight to its row."""

    @staticmethod
    def forward(ctx: Any, weights: torch.Tensor, route: Route) -> torch.Tensor:
        ctx.route = route
        none = parse("none")
        payload = route.spread(weights, "weights", none)
        arrived = decode_rows(payload, none, weights.shape[1], weights.dtype)
        return arrived.reshape(-1).index_select(0, route.pair_index)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        route: Route = ctx.route
        with_zero = torch.cat([gradient, gradient.new_zeros(1)])
        arrived = with_zero.index_select(0, route.pair_slots.reshape(-1)).view(route.pair_slots.shape)
        return route.collect(arrived, "gradients of weights", parse("none")), None


def _kept(
    chosen: torch.Tensor, num_experts: int, capacity: int | None, priorities: torch.Tensor | None
) -> torch.Tensor:
    """Return bool [tokens, choices]: the pairs that do not exceed the capacity."""
    if capacity is None:
        return torch.ones_like(chosen, dtype=torch.bool)
    flat = chosen.reshape(-1)
    positions = positions_of_choices(flat, count_choices(flat, num_experts), priorities)
    return (positions < capacity).view_as(chosen)


def _make_metadata(choices: torch.Tensor, rank: int) -> torch.Tensor:
    """Return the experts (-1: dropped) and the rank of each token as int32, uint8 [tokens, bytes]."""
    metadata = torch.cat([choices, torch.full_like(choices[:, :1], rank)], 1)
    return metadata.to(torch.int32).view(torch.uint8)


def _read_metadata(metadata: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what `_make_metadata` holds: experts [rows, choices] and ranks [rows], int64."""
    values = metadata.view(torch.int32).to(torch.int64)
    return values[:, :-1], values[:, -1]


def _expand(
    local: torch.Tensor, sources: torch.Tensor | None, rows: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``pair_index`` and ``pair_slots`` of a `Route` with ``rows`` pairs of this rank.

    ``local``, int64 [arrived tokens, choices], are local experts; one more than the last one for pairs of other ranks.
    ``sources``, int64 [arrived tokens], are the ranks of the tokens, by which the rows of an expert are ordered. None:
    they are in order.
    """
    choices = local.shape[1]
    if sources is None:
        pair_index = torch.argsort(local.reshape(-1), stable=True)[:rows]
    else:
        by_source = torch.argsort(sources, stable=True)
        order = torch.argsort(local.index_select(0, by_source).reshape(-1), stable=True)[:rows]
        pair_index = by_source.index_select(0, order // choices) * choices + order % choices
    slots = torch.full((local.numel(),), rows, dtype=torch.int64, device=local.device)
    slots.scatter_(0, pair_index, torch.arange(rows, device=local.device))
    return pair_index, slots.view_as(local)
