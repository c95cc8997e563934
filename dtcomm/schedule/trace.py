"""What a schedule means, version by version: the one reading that every other reader is built on.

Every (rank, chunk) holds a *version*; the first is the input. The transfers of a step read the versions that
were held when the step began. All ``reduce`` transfers into one (rank, chunk) of a step, with the receiver's
own version, make ONE fp32 sum in rank order. A version is encoded at most once, when it is first sent, and
whoever reads it from then on, its owner included, reads the decoded bytes. ``copy`` adopts the bytes
unchanged.

A version is overwritten by the step that reads it last, so its owner never reads it before it is first sent:
either a version is sent at some time, and is read decoded by everybody, or it is not, and only its owner
reads it.
"""

from __future__ import annotations

import enum
import functools
import itertools
from dataclasses import dataclass, field

from dtcomm.errors import ScheduleError
from dtcomm.schedule.ir import Schedule, Transfer


class Origin(enum.Enum):
    """How a version came to be."""

    INPUT = "input"
    SUM = "sum"
    COPY = "copy"


@dataclass(eq=False, kw_only=True)
class Version:
    """What ``rank`` holds of ``chunk`` from the end of ``step`` (-1: from the start) on.

    ``sources`` are the terms of a sum in rank order, the rank's own among them, or the version that a copy
    adopted, in bytes of ``adopted_level``'s codec. ``contributors`` and ``repeated`` are bit sets of ranks: whose
    inputs are in it, and which of them twice or more. Versions belong to their history and are not to be changed.
    """

    rank: int
    chunk: int
    step: int
    origin: Origin
    sources: tuple[Version, ...] = ()
    contributors: int = 0
    repeated: int = 0
    adopted_level: int = 0
    sends: list[Transfer] = field(default_factory=list)

    @property
    def encoded(self) -> bool:
        """Whether the rank itself encodes it (a copy is bytes already)."""
        return bool(self.sends) and self.origin is not Origin.COPY

    @property
    def first_sent(self) -> int | None:
        """The step that sends it first, None where none does."""
        return self.sends[0].step if self.sends else None

    @property
    def level(self) -> int:
        """The level whose codec it is encoded with; bytes that are passed on keep theirs."""
        if self.origin is Origin.COPY:
            return self.adopted_level
        return self.sends[0].level if self.sends else 0


@dataclass(frozen=True)
class History:
    """All versions in the order in which they come to be, and those that the collective leaves as outputs."""

    versions: tuple[Version, ...]
    held: dict[tuple[int, int], Version]
    outputs: dict[tuple[int, int], Version]

    def requantizations(self) -> int:
        """The most encodings that any contribution to an output goes through."""
        encodings: dict[Version, int] = {}
        for version in self.versions:
            so_far = max((encodings[source] for source in version.sources), default=0)
            encodings[version] = so_far + version.encoded
        return max((encodings[version] for version in self.outputs.values()), default=0)


@functools.lru_cache(maxsize=32)
def trace(schedule: Schedule) -> History:
    """Plays the transfers step by step.

    Raises ``ScheduleError`` where a step reads what is not there yet, or where what arrives at a (rank,
    chunk) in one step has no meaning: two copies, a copy and a sum, the same transfer twice, two levels for
    one encoding.
    """
    places = itertools.product(range(schedule.ranks), range(schedule.chunks))
    held = {
        (rank, chunk): Version(rank=rank, chunk=chunk, step=-1, origin=Origin.INPUT, contributors=1 << rank)
        for rank, chunk in places
        if schedule.starts(rank, chunk)
    }
    versions = list(held.values())
    for step, transfers in itertools.groupby(schedule.transfers, key=lambda t: t.step):
        arriving: dict[tuple[int, int], list[tuple[Transfer, Version]]] = {}
        for transfer in transfers:
            version = held.get((transfer.src, transfer.chunk))
            if version is None:
                raise ScheduleError(f"{transfer}: rank {transfer.src} holds nothing of it yet")
            _send(version, transfer)
            arriving.setdefault((transfer.dst, transfer.chunk), []).append((transfer, version))
        made = {
            place: _arrive(step, held.get(place), arrivals) for place, arrivals in sorted(arriving.items())
        }
        held.update(made)
        versions += made.values()
    outputs = {place: version for place, version in held.items() if schedule.ends(*place)}
    return History(tuple(versions), held, outputs)


def _send(version: Version, transfer: Transfer) -> None:
    first = version.sends[0] if version.sends else transfer
    if version.origin is not Origin.COPY and first.step == transfer.step and first.level != transfer.level:
        raise ScheduleError(
            f"{transfer}: the same version is first sent at level {first.level} and at this one"
        )
    version.sends.append(transfer)


def _arrive(step: int, own: Version | None, arrivals: list[tuple[Transfer, Version]]) -> Version:
    first = arrivals[0][0]
    sources = [version for _, version in arrivals]
    for (one, _), (other, _) in itertools.combinations(arrivals, 2):
        if one.src == other.src:
            raise ScheduleError(f"{one}: twice in one step")
        if "copy" in (one.op, other.op):
            raise ScheduleError(f"{one}: rank {other.src} sends it the same chunk in this step ({other.op})")
    if first.op == "copy":
        origin = Origin.COPY
    elif own is None:
        raise ScheduleError(f"{first}: rank {first.dst} holds nothing of it to add to")
    else:
        origin = Origin.SUM
        sources = sorted([*sources, own], key=lambda version: version.rank)
    contributors = repeated = 0
    for source in sources:
        repeated |= source.repeated | (contributors & source.contributors)
        contributors |= source.contributors
    return Version(
        rank=first.dst,
        chunk=first.chunk,
        step=step,
        origin=origin,
        sources=tuple(sources),
        contributors=contributors,
        repeated=repeated,
        adopted_level=sources[0].level,
    )
