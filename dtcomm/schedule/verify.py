"""The verifier: proves that a schedule does what its collective promises, or says where it does not."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from dtcomm.errors import ScheduleError
from dtcomm.schedule.ir import Schedule
from dtcomm.schedule.trace import History, Origin, Version, trace


@dataclass(frozen=True, kw_only=True)
class Proof:
    """What was found out on the way.

    ``encodings`` counts how often each (rank, chunk) is encoded; places that never are have no entry. One
    residual of the tensor's size serves for error feedback where no count exceeds 1.
    """

    encodings: dict[tuple[int, int], int]
    requantizations: int

    @property
    def encodes_once(self) -> bool:
        """Whether no rank encodes a chunk twice."""
        return max(self.encodings.values(), default=0) <= 1


def verify(schedule: Schedule) -> Proof:
    """Proves the post-condition: every output holds every contribution exactly once, and is the same
    everywhere.

    Also that nothing is read before it is there, that ranks which end with the same chunk end with the same
    bits (the same sums in the same order, encoded by the same ranks), and that every transfer and every step
    brings the collective forward. Raises ``ScheduleError`` naming rank, step and chunk.
    """
    history = trace(schedule)
    needed = _needed(history)
    _check_counts(history, needed)
    _check_outputs(schedule, history)
    values = _values(history)
    _check_agreement(schedule, history, values)
    _check_progress(schedule, history, needed, values)
    return Proof(
        encodings=dict(Counter((v.rank, v.chunk) for v in history.versions if v.encoded)),
        requantizations=schedule.requantizations(),
    )


def _at(schedule: Schedule, rank: int, chunk: int, version: Version | None) -> str:
    made = -1 if version is None else version.step
    step = made if made >= 0 else max(schedule.steps - 1, 0)
    return f"rank {rank} step {step} chunk {chunk}"


def _ranks(mask: int) -> str:
    names = [str(rank) for rank in range(mask.bit_length()) if mask >> rank & 1]
    return f"rank {names[0]}" if len(names) == 1 else f"ranks {', '.join(names)}"


def _needed(history: History) -> set[Version]:
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
                f"the sum counts {_ranks(version.repeated)} more than once"
            )


def _check_outputs(schedule: Schedule, history: History) -> None:
    for chunk in range(schedule.chunks):
        expected = sum(1 << rank for rank in schedule.contributors(chunk))
        for rank in range(schedule.ranks):
            if not schedule.ends(rank, chunk):
                continue
            version = history.outputs.get((rank, chunk))
            at = _at(schedule, rank, chunk, version)
            if version is None:
                raise ScheduleError(f"{at}: nothing has arrived by the last step")
            if missing := expected & ~version.contributors:
                raise ScheduleError(f"{at}: the output lacks what {_ranks(missing)} put in")
            if foreign := version.contributors & ~expected:
                raise ScheduleError(f"{at}: the output holds what {_ranks(foreign)} put in")


def _values(history: History) -> dict[Version, int]:
    # Two versions get the same number where every codec and every input make them equal: the same sums of the
    # same terms in the same order, each encoding made by the same rank (two ranks round differently under
    # stochastic rounding, and each would add a residual of its own).
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
                f"{_at(schedule, rank, chunk, version)}: ends with {describe(version)}, "
                f"but rank {model.rank} with {describe(model)}"
            )


def _check_progress(
    schedule: Schedule, history: History, needed: set[Version], values: dict[Version, int]
) -> None:
    held: dict[tuple[int, int], Version] = {}
    for version in history.versions:
        before = held.get((version.rank, version.chunk))
        held[version.rank, version.chunk] = version
        at = f"rank {version.rank} step {version.step} chunk {version.chunk}"
        if version.origin is not Origin.INPUT and version not in needed:
            raise ScheduleError(f"{at}: no progress: no output depends on what arrives")
        if before is not None and values[before] == values[version]:
            raise ScheduleError(f"{at}: no progress: it already holds what arrives")
    idle = set(range(schedule.steps)) - {t.step for t in schedule.transfers}
    if idle:
        raise ScheduleError(f"step {min(idle)}: no progress: no rank sends any chunk")


def describe(version: Version, limit: int = 80) -> str:
    """The version as an expression of about ``limit`` characters; ``q1(x0+x1)`` was encoded by rank 1."""
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
            text += ("+" if text else "") + describe(source, limit - len(text) - 5)
        text = text if version.encoded else f"({text})"
    return f"q{version.rank}({text})" if version.encoded else text
