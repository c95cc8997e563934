"""`run`: the collective of a schedule that the user wrote; ``algorithm=`` of each collective takes one too."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from dtcomm.codecs import Codec
from dtcomm.collectives._options import Group, Op, documented
from dtcomm.collectives.gather_ops import all_gather, all_to_all, broadcast, gather, scatter
from dtcomm.collectives.planning import parse_text
from dtcomm.collectives.reduce_ops import all_reduce, reduce, reduce_scatter
from dtcomm.runtime.communicator import get_communicator
from dtcomm.schedule import Schedule
from dtcomm.work import Work


@documented(
    whole="the input",
    ScheduleError="If the schedule is wrong. The message names rank, step and chunk.",
)
def run(
    schedule: Schedule | str,
    tensor: Tensor | None,
    input: Tensor | None = None,
    op: Op = "sum",
    *,
    codec: str | Codec = "none",
    group: Group = None,
    async_op: bool = False,
    seed: int | None = None,
    residual: Tensor | None = None,
    checksum: bool | None = None,
) -> Work | None:
    """Run a collective by a schedule of your own.

    The schedule is verified before it first runs: it must do what its collective promises. The text form is described
    in `dtcomm.schedule.ir`.

    Args:
        schedule: A `dtcomm.schedule.Schedule`, or its text. It is for as many ranks as the group has, and its root is a
            rank of the group.
        tensor: The tensor of all_reduce, broadcast and reduce, which is worked on in place; for the other collectives
            the output, None on ranks that have none.
        input: The input of the collectives that are not in place; None for the others.
        residual: Error feedback: an fp32 tensor with as many elements as the input. It is added to this rank's
            contribution and then overwritten with the error of encoding it. None means no feedback. A schedule that
            encodes a chunk more than once on a rank does not allow it.

    Example:
        Sum over three ranks by a schedule that relays chunk 0 through rank 1::

            schedule = \"\"\"all_reduce ranks=3 chunks=2
            rank 0 | c0+1 | .      | c1=1,2
            rank 1 | c1+0 | c0+2   | .
            rank 2 | c1+0 | .      | c0=0,1\"\"\"
            dtcomm.run(schedule, tensor, codec="int8")
    """
    if not isinstance(schedule, Schedule | str):
        raise TypeError(f"schedule: expected a Schedule or its text, got {type(schedule).__name__}")
    schedule = parse_text(schedule) if isinstance(schedule, str) else schedule
    communicator = get_communicator(group)
    if schedule.ranks != communicator.size:
        raise ValueError(f"schedule: is for {schedule.ranks} ranks, the group has {communicator.size}")
    options = dict[str, Any](codec=codec, algorithm=schedule, group=group, async_op=async_op)
    options.update(seed=seed, residual=residual, checksum=checksum)
    root = communicator.ranks[schedule.root]
    if schedule.collective in ("all_reduce", "broadcast", "reduce") and input is not None:
        raise ValueError(f"input: {schedule.collective} works on tensor in place; pass None")
    # The collectives themselves check that the tensors they need are given.
    target: Any = tensor
    source: Any = input
    match schedule.collective:
        case "all_reduce":
            return all_reduce(target, op, **options)
        case "broadcast":
            return broadcast(target, root, **options)
        case "reduce":
            return reduce(target, root, op, **options)
        case "reduce_scatter":
            return reduce_scatter(target, source, op, **options)
        case "all_gather":
            return all_gather(target, source, **options)
        case "gather":
            return gather(source, tensor, root, **options)
        case "scatter":
            return scatter(target, source, root, **options)
        case _:
            return all_to_all(target, source, **options)
