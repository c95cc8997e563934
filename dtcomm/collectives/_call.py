"""The path of a call: repeated call, communicator, plan, start.

A public function first asks `run_repeated`, which runs a call that repeats an earlier one. All other calls have their
arguments checked by the function, and take this path: `run` looks up the plan of the operation, which
`dtcomm.collectives.planning` makes if there is none, and `start` runs it on the tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dtcomm.collectives._options import Group, NamedSchedule, Op, Options
from dtcomm.collectives.checks import require_residual
from dtcomm.collectives.planning import Request, make_plan
from dtcomm.errors import CollectiveMismatch
from dtcomm.runtime.communicator import Communicator, get_communicator_for
from dtcomm.runtime.plans import keep_repeated, run_repeated
from dtcomm.runtime.types import Buffers, OpHooks, Plan
from dtcomm.schedule import Schedule, Transfer
from dtcomm.work import Work

# A message is a broadcast over two ranks in which only the receiver has an output. Indexed by the root.
_MESSAGES = [
    NamedSchedule(
        "send",
        Schedule(
            collective="broadcast",
            ranks=2,
            chunks=1,
            root=root,
            transfers=(Transfer(0, root, 1 - root, 0, "copy"),),
        ),
    )
    for root in (0, 1)
]


class Call(NamedTuple):
    """A collective and its tensors, which are checked; None for a tensor that this rank does not have.

    ``splits`` are the elements that each rank sends to each rank in an all_to_all of unequal shards, as in `OpSpec`.
    ``purpose`` names the stage of a larger operation that this one is, for errors.
    """

    collective: str
    input: Tensor | None
    output: Tensor | None
    op: Op = "sum"
    root: int = 0
    splits: tuple[int, ...] = ()
    purpose: str = ""

    def part(self, ranks: int) -> tuple[int, torch.dtype]:
        """The elements of the whole tensor, or of one shard (as in `TensorSpec`), and their dtype."""
        tensor = self.output if self.collective in ("reduce_scatter", "scatter") else self.input
        tensor = self.output if tensor is None else tensor
        assert tensor is not None
        if self.splits:
            return max(self.splits), tensor.dtype
        return tensor.numel() // (ranks if self.collective == "all_to_all" else 1), tensor.dtype


def run(
    communicator: Communicator,
    call: Call,
    options: Options,
    outputs: Sequence[Tensor] | None = None,
    repeated: tuple[Any, ...] | None = None,
) -> Work | None:
    """Run a collective: find or make its plan, and start it.

    ``outputs`` are the tensors that its ``Work`` gives; None: the output. ``repeated`` is what `run_repeated` was asked
    for: from the next call on it runs the operation.
    """
    if options.residual is not None:
        assert call.input is not None
        require_residual(options.residual, call.input, "residual", call.op)
    request = Request(
        call.collective,
        ((*call.part(communicator.size), options.codec),),
        call.op,
        options.algorithm,
        options.checksum,
        call.root,
        call.splits,
        options.residual is not None,
        options.audit,
        call.purpose,
    )
    plan = communicator.plans.get(request) or make_plan(communicator, request)
    if outputs is None:
        outputs = [] if call.output is None else [call.output]
    buffers = Buffers(call.input, call.output, options.residual)
    return start(communicator, plan, [buffers], outputs, options, repeated)


def start(
    communicator: Communicator,
    plan: Plan,
    buffers: Sequence[Buffers],
    outputs: Sequence[Tensor],
    options: Options,
    repeated: tuple[Any, ...] | None = None,
) -> Work | None:
    """Run a plan on the tensors of all its parts, or queue it if ``async_op``; see `run`."""
    seed = communicator.next_seed(options.seed)
    hooks = None if options.epilogue is None else OpHooks(after=(options.epilogue,))
    work = None
    if options.async_op:
        work = plan.submit(buffers, outputs, seed, hooks)
    else:
        plan.run(buffers, seed, hooks)
    if repeated is not None:
        keep_repeated(repeated, plan, buffers[0], communicator.rank, communicator.counter)
    return work


def run_internal(call: Call, options: Options) -> Work | None:
    """Run a collective that a larger operation of dtcomm consists of; all its ranks are those of the group."""
    key = (options.group, call.input, call.output, call.collective, call.op, call.root, call.purpose)
    is_fixed = options.codec == "none" and not call.splits
    repeated = (*key, options.algorithm, options.checksum) if is_fixed else None
    if repeated is not None:
        done: Work | bool | None = run_repeated(repeated, options.async_op, options.seed)
        if not isinstance(done, bool):
            return done
    tensor = call.output if call.input is None else call.input
    return run(get_communicator_for(options.group, tensor, "tensor"), call, options, repeated=repeated)


def exchange_splits(
    communicator: Communicator, sent: list[int], received: list[int], group: Group
) -> tuple[int, ...]:
    """Return the elements that every rank sends to every rank, at index sender * ranks + receiver."""
    ranks = communicator.size
    gathered = torch.empty(ranks, 2 * ranks, dtype=torch.int64)
    call = Call("all_gather", torch.tensor(sent + received), gathered)
    run_internal(call, Options(group=group))
    sizes = gathered.tolist()  # of each rank what it sends to every rank, and what it expects of every rank
    for src in range(ranks):
        for dst in range(ranks):
            size, expected = sizes[src][dst], sizes[dst][ranks + src]
            if size != expected:
                raise CollectiveMismatch(
                    f"rank {communicator.ranks[src]} sends {size} elements to rank {communicator.ranks[dst]}, "
                    f"which expects {expected}: input_splits of the sender and output_splits of the receiver differ"
                )
    return tuple(size for row in sizes for size in row[:ranks])


def run_message(
    communicator: Communicator,
    memory: Tensor,
    sends: bool,
    options: Options,
    outputs: Sequence[Tensor] | None = None,
    repeated: tuple[Any, ...] | None = None,
) -> Work | None:
    """Run a message of the two ranks of a communicator; ``memory`` is contiguous. For the rest see `run`."""
    root = communicator.rank if sends else 1 - communicator.rank
    call = Call("broadcast", memory if sends else None, None if sends else memory, root=root)
    options = options._replace(algorithm=_MESSAGES[root])
    return run(communicator, call, options, [memory] if outputs is None else outputs, repeated)
