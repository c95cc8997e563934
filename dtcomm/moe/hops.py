"""One all-to-all of rows in both directions: `Hop.spread` copies rows to ranks, `Hop.collect` sums what comes back.

They are each other's transpose, so one is the backward pass of the other. A flat dispatch is one hop among all ranks.
A hierarchical one is a hop between hosts and a hop inside each host, whose source rows are what the first one received.

Index tensors are on the device of the rows. The numbers of rows are known to the host before a hop is made, and
nothing here waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist

from dtcomm.codecs import Codec
from dtcomm.collectives import all_to_all
from dtcomm.moe.encoded_rows import decode_rows, encode_rows
from dtcomm.moe.route import record
from dtcomm.streams import copy_to_device


class Arrived(NamedTuple):
    """Rows that a hop brought, with their metadata.

    Attributes:
        buffer: uint8 [more rows, bytes], which also holds the metadata.
        rows: int64 [rows], where the payload of each row is in the buffer, in the order of the ranks that sent them.
        metadata: uint8 [rows, bytes].
    """

    buffer: torch.Tensor
    rows: torch.Tensor
    metadata: torch.Tensor

    def payload(self, index: torch.Tensor) -> torch.Tensor:
        """Return the payload of some rows, uint8 [indices, bytes]."""
        return self.buffer.index_select(0, self.rows.index_select(0, index))


class Carried(NamedTuple):
    """What a hop carries: its name in reports, its codec, and the elements and the dtype of a row."""

    what: str
    codec: Codec
    features: int
    dtype: torch.dtype


@dataclass(frozen=True, kw_only=True)
class Hop:
    """One all-to-all of rows: which row goes to which ranks. A row goes to a rank at most once.

    Attributes:
        level: Between which ranks it is, for reports.
        sent, received: Number of rows that this rank sends to each rank, and receives from it.
        send_index: int64 [sum of ``sent``], the source row of each sent row.
        slots: int64 [source rows, columns], the positions of a row's copies among the sent rows, in the order of the
            sum of what comes back; ``sum(sent)`` in columns that are not used.
        begins: bool [source rows, columns]: the copy is the first one of a host. Copies are summed host by host, and
            then the hosts' sums, as a hierarchical dispatch does. None: there is one sum.
    """

    level: str
    sent: tuple[int, ...]
    received: tuple[int, ...]
    send_index: torch.Tensor
    slots: torch.Tensor
    begins: torch.Tensor | None
    rank: int
    group: dist.ProcessGroup | None

    def spread(self, payload: torch.Tensor, carried: Carried) -> torch.Tensor:
        """Send a copy of each row, uint8 [source rows, bytes], to each of its ranks.

        Returns what this rank received, [sum of ``received``, bytes], in the order of the ranks.
        """
        return self._exchange(payload.index_select(0, self.send_index), self.sent, self.received, carried)

    def spread_with_metadata(
        self, payload: torch.Tensor, source: torch.Tensor | None, metadata: torch.Tensor, carried: Carried
    ) -> Arrived:
        """Send a copy of each row and of its metadata to each of its ranks, in one message to each.

        ``source``, int64 [source rows], says where the source rows are in ``payload``, uint8 [payload rows, bytes];
        None: they are all of it, in order. ``metadata`` is uint8 [source rows, bytes].
        """
        row_bytes, size = payload.shape[1], metadata.shape[1]
        # A message is the rows for a rank and then their metadata, in as many more rows as they fill.
        more = [[-(-count * size // row_bytes) for count in counts] for counts in (self.sent, self.received)]
        index = self.send_index if source is None else source.index_select(0, self.send_index)
        buffer = payload.new_empty((self.send_index.numel() + sum(more[0]), row_bytes))
        places = _split(buffer, self.sent, more[0])
        for (rows, behind), chosen, metadata_of in zip(
            places,
            torch.split(index, list(self.sent)),
            torch.split(metadata.index_select(0, self.send_index), list(self.sent)),
            strict=True,
        ):
            if len(rows):
                torch.index_select(payload, 0, chosen, out=rows)
                behind = behind.view(-1)
                behind[: metadata_of.numel()] = metadata_of.reshape(-1)
                behind[metadata_of.numel() :].zero_()
        sent, received = (
            [count + extra for count, extra in zip(counts, extras, strict=True)]
            for counts, extras in zip((self.sent, self.received), more, strict=True)
        )
        arrived = self._exchange(buffer, sent, received, carried, self.sent)
        numbers = torch.arange(len(arrived), device=arrived.device)[:, None]
        return Arrived(
            arrived,
            torch.cat([rows for rows, _ in _split(numbers, self.received, more[1])]).view(-1),
            torch.cat(
                [
                    behind.reshape(-1)[: count * size].view(count, size)
                    for (_, behind), count in zip(
                        _split(arrived, self.received, more[1]), self.received, strict=True
                    )
                ]
            ),
        )

    def collect(self, rows: torch.Tensor, what: str, codec: Codec) -> torch.Tensor:
        """Send rows back to where their copies came from and sum those of each source row, in fp32.

        ``rows``, [sum of ``received``, features], are in the order in which the copies arrived; ``what`` is for
        reports. The result, [source rows, features], has their dtype.
        """
        carried = Carried(what, codec, rows.shape[1], rows.dtype)
        payload = encode_rows(rows, codec, self.rank)
        returned = self._exchange(payload, self.received, self.sent, carried)
        terms = decode_rows(returned, codec, rows.shape[1], rows.dtype, zero_row=True)
        return sum_slots(terms, self.slots, self.begins)

    def _exchange(
        self,
        payload: torch.Tensor,
        sent: Sequence[int],
        received: Sequence[int],
        carried: Carried,
        rows: Sequence[int] | None = None,
    ) -> torch.Tensor:
        """Exchange messages; ``rows`` are the rows of ``sent`` that are not metadata, if some are."""
        output = payload.new_empty((sum(received), payload.shape[1]))
        work = all_to_all(output, payload, list(received), list(sent), group=self.group, async_op=True)
        work.wait()
        numel = carried.features * sum(
            count for peer, count in enumerate(sent if rows is None else rows) if peer != self.rank
        )
        record(self.group, self.level, carried.what, str(carried.codec), carried.dtype, numel, work)
        return output


def _split(
    rows: torch.Tensor, counts: Sequence[int], more: Sequence[int]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return for each rank its ``counts`` rows and the ``more`` rows behind them, as views."""
    sizes = [size for pair in zip(counts, more, strict=True) for size in pair]
    parts = torch.split(rows, sizes)
    return list(zip(parts[::2], parts[1::2], strict=True))


def make_hop(
    level: str,
    destinations: torch.Tensor,
    ranks: Sequence[int],
    sent: Sequence[int],
    received: Sequence[int],
    rank: int,
    group: dist.ProcessGroup | None,
    hosts: Sequence[int] | None = None,
) -> Hop:
    """Make a hop of the rows whose destinations `unique_destinations` returned; see `Hop` for the rest.

    ``ranks`` are the rank of each destination, and ``hosts`` its host, if sums are to be taken host by host.
    """
    device, count, total = destinations.device, len(ranks), sum(sent)
    chosen = one_hot(destinations, count)
    by_rank = sorted(range(count), key=ranks.__getitem__)
    totals = chosen.sum(0)
    if by_rank == list(range(count)):
        begins_at = totals.cumsum(0) - totals
    else:
        ordered = totals.index_select(0, constant(by_rank, device))
        inverse = sorted(range(count), key=by_rank.__getitem__)
        begins_at = (ordered.cumsum(0) - ordered).index_select(0, constant(inverse, device))
    positions = chosen.cumsum(0) - 1 + begins_at
    used = destinations < count
    known = destinations.clamp(max=count - 1)
    slots = torch.where(used, positions.gather(1, known), total)
    rows = torch.arange(len(destinations), device=device)[:, None].expand_as(slots)
    send_index = slots.new_zeros(total + 1).scatter_(0, slots.reshape(-1), rows.reshape(-1))[:total]
    begins = None
    if hosts is not None and destinations.shape[1] > 1:
        host = constant(hosts, device).index_select(0, known.reshape(-1)).view_as(known)
        begins = torch.zeros_like(used)
        begins[:, 1:] = used[:, 1:] & (host[:, 1:] != host[:, :-1])
    return Hop(
        level=level,
        sent=tuple(sent),
        received=tuple(received),
        send_index=send_index,
        slots=slots,
        begins=begins,
        rank=rank,
        group=group,
    )


def unique_destinations(destinations: torch.Tensor, count: int) -> torch.Tensor:
    """Return each row's destinations once, in ascending order, then ``count`` where none is left.

    ``destinations``, int64 [rows, choices], are 0 to ``count - 1``, or ``count`` for none; the result is int64 [rows,
    min(choices, count)].
    """
    ordered = destinations.sort(1).values
    repeated = torch.zeros_like(ordered, dtype=torch.bool)
    repeated[:, 1:] = ordered[:, 1:] == ordered[:, :-1]
    return torch.where(repeated, count, ordered).sort(1).values[:, :count]


def one_hot(destinations: torch.Tensor, count: int) -> torch.Tensor:
    """Return int64 [rows, count]: 1 where a row goes to a destination. Destinations ``count`` are none."""
    marks = destinations.new_zeros((len(destinations), count + 1))
    return marks.scatter_(1, destinations, torch.ones_like(destinations))[:, :count]


def sum_slots(terms: torch.Tensor, slots: torch.Tensor, begins: torch.Tensor | None = None) -> torch.Tensor:
    """Return for each row of ``slots`` the sum of the terms that it names, in fp32 and in the order of the columns.

    Args:
        terms: [rows, features]; the last row is zeros, where a slot names it for no term. See `with_zero_row`.
        slots: int64 [sums, columns], indices of terms.
        begins: bool [sums, columns], where another partial sum begins, which are summed at the end. None: nowhere.
    """
    partial = terms.index_select(0, slots[:, 0])
    if slots.shape[1] == 1:
        return partial
    partial, total = partial.float(), None
    for column in range(1, slots.shape[1]):
        term = terms.index_select(0, slots[:, column]).float()
        if begins is None:
            partial.add_(term)
            continue
        begin = begins[:, column, None]
        ended = torch.where(begin, partial, 0.0)
        total = ended if total is None else total + ended
        partial = torch.where(begin, term, partial + term)
    return (partial if total is None else total + partial).to(terms.dtype)


def with_zero_row(rows: torch.Tensor) -> torch.Tensor:
    """Return the rows and behind them a row of zeros."""
    return torch.cat([rows, rows.new_zeros(1, rows.shape[1])])


def constant(values: Sequence[int], device: torch.device) -> torch.Tensor:
    """Return int64 values on a device. The host does not wait, but a graph cannot capture the copy."""
    host = torch.tensor(values, dtype=torch.int64, device="cpu")
    return host if device.type == "cpu" else copy_to_device(host, device)
