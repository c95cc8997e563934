"""Schedules that the user wrote."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

import torch

from dtcomm.codecs import Codec
from dtcomm.collectives._arguments import Group, Op, SendOptions
from dtcomm.collectives._dispatch import CustomSchedule, own
from dtcomm.collectives.alltoall import all_to_all
from dtcomm.collectives.gather_ops import all_gather, broadcast, gather, scatter
from dtcomm.collectives.reduce_ops import all_reduce, reduce, reduce_scatter
from dtcomm.runtime.communicator_cache import get_communicator
from dtcomm.runtime.work import Work
from dtcomm.schedule import Schedule, parse, verify
from dtcomm.schedule.verify import Proof

if TYPE_CHECKING:
    from typing_extensions import Unpack

MOST_PROOFS = 64
# By identity: comparing schedules, transfer by transfer, would cost more than running them.
_proved: dict[int, tuple[Schedule | str, CustomSchedule, Proof]] = {}


@overload
def run(
    schedule: Schedule | str,
    tensor: torch.Tensor | None,
    input: torch.Tensor | None = None,
    op: Op = "sum",
    *,
    async_op: Literal[True],
    **options: Unpack[SendOptions],
) -> Work: ...


@overload
def run(
    schedule: Schedule | str,
    tensor: torch.Tensor | None,
    input: torch.Tensor | None = None,
    op: Op = "sum",
    *,
    async_op: bool = False,
    **options: Unpack[SendOptions],
) -> Work | None: ...


def run(
    schedule: Schedule | str,
    tensor: torch.Tensor | None,
    input: torch.Tensor | None = None,
    op: Op = "sum",
    *,
    codec: str | Codec = "none",
    group: Group = None,
    async_op: bool = False,
    seed: int | None = None,
    residual: torch.Tensor | None = None,
    checksum: bool | None = None,
) -> Work | None:
    """Run a schedule of one's own, or its text, once it is proved to do what its collective promises.

    ``tensor`` is worked on in place by all_reduce, broadcast and reduce; otherwise it is the output, None where a
    rank has none, and ``input`` the input. Everything else is as in the collective's own function; the schedule's
    root is a rank of the group. Raises ScheduleError naming rank, step and chunk where the schedule is wrong, and
    ValueError where it is for another number of ranks.
    """
    chosen, proof = verify_and_cache(schedule)
    schedule = chosen.schedule
    communicator = get_communicator(group)
    if schedule.ranks != communicator.size:
        raise ValueError(f"schedule: is for {schedule.ranks} ranks, the group has {communicator.size}")
    if residual is not None and not proof.encodes_once:
        (rank, chunk), times = max(proof.encodings.items(), key=lambda item: item[1])
        raise ValueError(
            f"residual: rank {rank} encodes chunk {chunk} {times} times in this schedule; "
            "error feedback needs at most one encoding of each"
        )
    options: dict[str, Any] = {
        "codec": codec,
        "algorithm": chosen,
        "group": group,
        "async_op": async_op,
        "seed": seed,
        "residual": residual,
        "checksum": checksum,
    }
    root = communicator.ranks[schedule.root]
    in_place: Any = tensor
    if schedule.collective in ("all_reduce", "broadcast", "reduce") and input is not None:
        raise ValueError(f"input: {schedule.collective} works on tensor in place; pass None")
    given: Any = input
    work: Work | None
    match schedule.collective:
        case "all_reduce":
            work = all_reduce(in_place, op, **options)
        case "broadcast":
            work = broadcast(in_place, root, **options)
        case "reduce":
            work = reduce(in_place, root, op, **options)
        case "reduce_scatter":
            work = reduce_scatter(in_place, given, op, **options)
        case "all_gather":
            work = all_gather(in_place, given, **options)
        case "gather":
            work = gather(given, tensor, root, **options)
        case "scatter":
            work = scatter(in_place, given, root, **options)
        case _:
            work = all_to_all(in_place, given, **options)
    return work


def verify_and_cache(schedule: Schedule | str) -> tuple[CustomSchedule, Proof]:
    """The schedule under the name that ranks compare, and what the proof found; proofs are kept."""
    if not isinstance(schedule, Schedule | str):
        raise TypeError(f"schedule: expected a Schedule or its text, got {type(schedule).__name__}")
    found = _proved.get(id(schedule))
    if found is None or found[0] is not schedule:
        parsed = parse(schedule) if isinstance(schedule, str) else schedule
        found = schedule, own(parsed), verify(parsed)
        if len(_proved) >= MOST_PROOFS:
            _proved.clear()
        _proved[id(schedule)] = found
    return found[1:]
