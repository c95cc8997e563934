"""Writes schedules: `Builder` follows chunks from rank to rank; `sequence`, `reverse` and `remap` combine schedules.

Chunks are independent of each other: each takes its own path through the ranks. Therefore a schedule over some of the
ranks becomes a part of a larger one once its ranks and chunks are renamed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from dtcomm.errors import ScheduleError
from dtcomm.schedule.ir import Op, Schedule, Transfer


class Builder:
    """Builds a `Schedule` by following chunks; each transfer gets the earliest step that its chunk allows.

    ``builder.chunk(c).at(r)`` is chunk c as rank r holds it at this point of the program; ``reduce_to`` and ``copy_to``
    send it on. A transfer runs after those that made what it sends, and not before what it overwrites has been sent.
    Sums that arrive at a rank with no send from there between them may share a step and are then one sum. Chunks do not
    wait for each other.

    Args:
        collective: The collective's name, as in `Schedule`.
        ranks: The number of ranks, at least 1.
        chunks: How many chunks the tensor is cut into, as in `Schedule`.
        root: The root of broadcast, reduce, gather and scatter; 0 for the others.

    Raises:
        ValueError: If an argument is out of range.

    Example:
        >>> from dtcomm.schedule import Builder
        >>> ring = Builder("all_reduce", ranks=3, chunks=3)
        >>> for c in range(3):
        ...     right, left = (c + 1) % 3, (c + 2) % 3
        ...     at_owner = ring.chunk(c).at(right).reduce_to(left).reduce_to(c)
        ...     last = at_owner.copy_to(right).copy_to(left)
        >>> print(ring.build())
        all_reduce ranks=3 chunks=3
        rank 0 | c2+1 | c1+1 | c0=1 | c2=1
        rank 1 | c0+2 | c2+2 | c1=2 | c0=2
        rank 2 | c1+0 | c0+0 | c2=0 | c1=0
    """

    def __init__(self, collective: str, ranks: int, chunks: int, root: int = 0) -> None:
        self._schedule = Schedule(collective=collective, ranks=ranks, chunks=chunks, root=root)
        self._transfers: list[Transfer] = []
        self._arrivals: defaultdict[tuple[int, int], list[Transfer]] = defaultdict(list)  # by rank and chunk
        self._last_sent: defaultdict[tuple[int, int], int] = defaultdict(int)  # step by rank and chunk

    def chunk(self, chunk: int) -> Chunk:
        """Return a chunk to follow, by its index; it starts with ``at``."""
        return Chunk(self, chunk)

    def build(self) -> Schedule:
        """Return the schedule, equal to that of the same `Transfer` values. It is not verified yet."""
        return replace(self._schedule, transfers=tuple(self._transfers))

    def _ready(self, rank: int, chunk: int) -> int:
        """Return the first step in which a rank can send what it holds of a chunk at this point of the program."""
        return max((t.step + 1 for t in self._arrivals[rank, chunk]), default=0)

    def _send(self, src: int, dst: int, chunk: int, op: Op, level: int, ready: int) -> None:
        at = dst, chunk
        # Sums may arrive in one step; a copy may not arrive together with anything.
        earliest = [t.step + (op == "copy" or t.op == "copy") for t in self._arrivals[at]]
        step = max(ready, self._last_sent[at], *earliest)
        transfer = Transfer(step, src, dst, chunk, op, level)
        self._schedule.check(transfer)
        for arrived in self._arrivals[src, chunk]:
            if ready <= arrived.step < step:
                raise ScheduleError(f"{transfer}: by then rank {src} holds another version: {arrived}")
        self._transfers.append(transfer)
        self._arrivals[at].append(transfer)
        self._last_sent[src, chunk] = max(step, self._last_sent[src, chunk])


class Chunk:
    """A chunk on its way through the ranks, made by `Builder.chunk`: what a rank held of it at a point of the program.

    Args:
        builder: The builder that collects the transfers.
        chunk: The index of the chunk.
        rank: The rank that holds it; None until ``at`` names one.
        ready: The first step in which the rank can send it.

    Example:
        >>> from dtcomm.schedule import Builder
        >>> builder = Builder("all_reduce", ranks=3, chunks=1)
        >>> end = builder.chunk(0).at(1).reduce_to(2).reduce_to(0).copy_to(1, 2)
        >>> print(builder.build())
        all_reduce ranks=3 chunks=1
        rank 0 | .    | .    | c0=1,2
        rank 1 | c0+2 | .    | .
        rank 2 | .    | c0+0 | .
    """

    def __init__(self, builder: Builder, chunk: int, rank: int | None = None, ready: int = 0) -> None:
        self._builder, self._chunk, self._rank, self._ready = builder, chunk, rank, ready

    def at(self, rank: int, step: int = 0) -> Chunk:
        """Return the chunk as another rank holds it at this point of the program.

        Args:
            rank: The rank.
            step: The chunk is not sent before this step.

        Returns:
            The chunk at ``rank``. What arrives there in later steps does not change what it sends.
        """
        return Chunk(self._builder, self._chunk, rank, max(step, self._builder._ready(rank, self._chunk)))

    def reduce_to(self, *ranks: int, level: int = 0) -> Chunk:
        """Send the chunk to ranks that add it to what they hold.

        Args:
            *ranks: The receivers, at least one.
            level: The level of the hierarchy that the bytes cross, as in `Transfer`.

        Returns:
            The chunk at the last of the receivers, with the sum.

        Raises:
            ValueError: If there is no receiver, or no rank that holds the chunk.
            ScheduleError: If a rank or the chunk does not exist, or the sender holds another version by the time at
                which the receiver is free to take this one.
        """
        return self._send("reduce", ranks, level)

    def copy_to(self, *ranks: int, level: int = 0) -> Chunk:
        """Send the chunk to ranks that replace what they hold by it; see `reduce_to`."""
        return self._send("copy", ranks, level)

    def _send(self, op: Op, ranks: tuple[int, ...], level: int) -> Chunk:
        if self._rank is None:
            raise ValueError(
                f"chunk {self._chunk}: say at which rank it is, such as chunk({self._chunk}).at(0)"
            )
        if not ranks:
            raise ValueError(f"ranks: expected at least one rank that chunk {self._chunk} goes to")
        for dst in ranks:
            self._builder._send(self._rank, dst, self._chunk, op, level, self._ready)
        return self.at(ranks[-1])


def schedule_of(
    collective: str, ranks: int, chunks: int, transfers: Iterable[Transfer], root: int = 0
) -> Schedule:
    """Return the schedule of these transfers."""
    return Schedule(collective=collective, ranks=ranks, chunks=chunks, root=root, transfers=tuple(transfers))


def sequence(collective: str, first: Schedule, second: Schedule, root: int = 0) -> Schedule:
    """Return the schedule of ``collective`` that runs ``first`` and then ``second``, over the same ranks and chunks."""
    shifted = tuple(replace(t, step=t.step + first.steps) for t in second.transfers)
    return schedule_of(collective, first.ranks, first.chunks, first.transfers + shifted, root)


def reverse(transfers: Sequence[Transfer], op: Op) -> Iterator[Transfer]:
    """Yield the transfers in the opposite direction and order, so that a broadcast's paths become a reduce's."""
    last = max((t.step for t in transfers), default=0)
    for t in transfers:
        yield replace(t, step=last - t.step, src=t.dst, dst=t.src, op=op)


def remap(
    schedule: Schedule,
    ranks: Sequence[int],
    chunks: Mapping[int, Iterable[int]],
    first_step: int = 0,
    level: int = 0,
) -> Iterator[Transfer]:
    """Yield the transfers of ``schedule`` as a part of a larger schedule.

    Rank i becomes ``ranks[i]``. Chunk j is repeated for each of ``chunks[j]``, and left out if j is missing. Step 0
    becomes ``first_step``.
    """
    for t in schedule.transfers:
        for chunk in chunks.get(t.chunk, ()):
            yield Transfer(first_step + t.step, ranks[t.src], ranks[t.dst], chunk, t.op, level)
