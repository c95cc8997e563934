"""The verifier: proves that a schedule does what its collective promises.

`dtcomm.run` verifies every schedule of a user before it runs; the tests verify every algorithm.
"""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import dataclass

from dtcomm.errors import ScheduleError
from dtcomm.schedule.ir import History, Origin, Schedule, Version, trace


@dataclass(frozen=True, kw_only=True)
class Proof:
    """Facts about a verified schedule.

    ``encodings`` counts how often each (rank, chunk) is encoded; pairs that are never encoded have no entry. Error
    feedback works with one residual of the tensor's size if no count exceeds 1. ``requantizations`` is
    `Schedule.requantizations`.
    """

    encodings: dict[tuple[int, int], int]
    requantizations: int

    @property
    def encodes_once(self) -> bool:
        """Whether no rank encodes a chunk more than once."""
        return max(self.encodings.values(), default=0) <= 1


@functools.lru_cache(maxsize=64)
def verify(schedule: Schedule) -> Proof:
    """Prove that a schedule does what its collective promises.

    The proof covers that every output contains every contribution exactly once, that nothing is read before it has
    arrived, and that every transfer and every step is needed. All ranks that end with the same chunk end with the same
    bits: the same sums in the same order, encoded by the same ranks.

    Args:
        schedule: The schedule to verify.

    Returns:
        How often each rank encodes each chunk, and the most encodings of any contribution.

    Raises:
        ScheduleError: If a property does not hold. The message names rank, step and chunk.

    Example:
        >>> from dtcomm import algorithms
        >>> from dtcomm.schedule import verify
        >>> verify(algorithms.build("ring", "all_reduce", 4)).requantizations
        4
    """
    history = trace(schedule)
    needed = _needed_versions(history)
    _check_counts(history, needed)
    _check_outputs(schedule, history)
    values = _symbolic_values(history)
    _check_agreement(schedule, history, values)
    _check_every_transfer_is_needed(schedule, history, needed, values)
    return Proof(
        encodings=dict(Counter((v.rank, v.chunk) for v in history.versions if v.encoded)),
        requantizations=schedule.requantizations(),
    )


def _location(schedule: Schedule, rank: int, chunk: int, version: Version | None) -> str:
    created = -1 if version is None else version.step
    step = created if created >= 0 else max(schedule.steps - 1, 0)
    return f"rank {rank} step {step} chunk {chunk}"


def _rank_names(mask: int) -> str:
    names = [str(rank) for rank in range(mask.bit_length()) if mask >> rank & 1]
    return f"rank {names[0]}" if len(names) == 1 else f"ranks {', '.join(names)}"


def _needed_versions(history: History) -> set[Version]:
    needed = set(history.outputs.values())
    for version in reversed(history.versions):
        if version in needed:
            needed.update(version.sources)
    return needed


def _check_counts(history: History, needed: set[Version]) -> None:
    for version in history.versions:
        if version.repeated and version in needed:
            raise ScheduleError(
                f"rank {version.rank} step {version.step} chunk {version.chunk}: "
                f"the sum counts {_rank_names(version.repeated)} more than once"
            )


def _check_outputs(schedule: Schedule, history: History) -> None:
    for chunk in range(schedule.chunks):
        expected = sum(1 << rank for rank in schedule.contributors(chunk))
        for rank in range(schedule.ranks):
            if not schedule.ends(rank, chunk):
                continue
            version = history.outputs.get((rank, chunk))
            at = _location(schedule, rank, chunk, version)
            if version is None:
                raise ScheduleError(f"{at}: missing output: no transfer delivers this chunk by the last step")
            if missing := expected & ~version.contributors:
                raise ScheduleError(f"{at}: the output lacks the contribution of {_rank_names(missing)}")
            if unexpected := version.contributors & ~expected:
                raise ScheduleError(
                    f"{at}: the output contains the contribution of {_rank_names(unexpected)}, which is not part of it"
                )


def _symbolic_values(history: History) -> dict[Version, int]:
    """Number the versions so that two have the same number if they are equal for every codec and every input.

    They are equal if they are the same sums of the same terms in the same order, and each encoding is made by the same
    rank: two ranks round differently under stochastic rounding, and each would add a residual of its own.
    """
    numbers: dict[tuple[object, ...], int] = {}
    values: dict[Version, int] = {}
    for version in history.versions:
        key: tuple[object, ...]
        match version.origin:
            case Origin.COPY:
                values[version] = values[version.sources[0]]
                continue
            case Origin.INPUT:
                key = ("input", version.rank, version.chunk)
            case Origin.SUM:
                key = ("sum", *(values[source] for source in version.sources))
        value = numbers.setdefault(key, len(numbers))
        if version.encoded:
            value = numbers.setdefault(("encoded", version.rank, value), len(numbers))
        values[version] = value
    return values


def _check_agreement(schedule: Schedule, history: History, values: dict[Version, int]) -> None:
    first: dict[int, Version] = {}
    for (rank, chunk), version in sorted(history.outputs.items()):
        model = first.setdefault(chunk, version)
        if values[version] != values[model]:
            raise ScheduleError(
                f"{_location(schedule, rank, chunk, version)}: ends with {expression(version)}, "
                f"but rank {model.rank} with {expression(model)}"
            )


def _check_every_transfer_is_needed(
    schedule: Schedule, history: History, needed: set[Version], values: dict[Version, int]
) -> None:
    current: dict[tuple[int, int], Version] = {}
    for version in history.versions:
        before = current.get((version.rank, version.chunk))
        current[version.rank, version.chunk] = version
        at = f"rank {version.rank} step {version.step} chunk {version.chunk}"
        if version.origin is not Origin.INPUT and version not in needed:
            raise ScheduleError(f"{at}: useless transfer: no output depends on what it delivers")
        if before is not None and values[before] == values[version]:
            raise ScheduleError(f"{at}: redundant transfer: the destination already holds this version")
    idle = set(range(schedule.steps)) - {t.step for t in schedule.transfers}
    if idle:
        raise ScheduleError(f"step {min(idle)}: empty step: no rank sends any chunk")


def expression(version: Version, limit: int = 80) -> str:
    """Return the version as an expression of about ``limit`` characters; ``q1(x0+x1)`` was encoded by rank 1."""
    while version.origin is Origin.COPY:
        version = version.sources[0]
    if limit <= 0:
        return "..."
    if version.origin is Origin.INPUT:
        text = f"x{version.rank}"
    else:
        text = ""
        for source in version.sources:
            if len(text) > limit:
                text += "+..."
                break
            text += ("+" if text else "") + expression(source, limit - len(text) - 5)
        text = text if version.encoded else f"({text})"
    return f"q{version.rank}({text})" if version.encoded else text
