"""From checked arguments to an operation under way: the plan, kept by what the call looks like, and the work."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from dtcomm import algorithms, codecs, planner
from dtcomm.codecs import Codec
from dtcomm.collectives._arguments import op_name, require_dtype
from dtcomm.collectives._multi_stage import Groups, Message, MultiStagePlan
from dtcomm.collectives._reproducible_sum import ExactSum
from dtcomm.collectives._shared_randk_sum import SharedSum
from dtcomm.device.streams import record_streams
from dtcomm.kernels.local_tasks import LocalTask
from dtcomm.runtime.communicator import Communicator
from dtcomm.runtime.types import TWO_SHOT_SYMMETRIC, Buffers, OpHooks, OpSpec, TensorSpec
from dtcomm.runtime.work import ChainedWork, CompositeWork, Work
from dtcomm.schedule import Schedule
from dtcomm.schedule.ir import CUT_AT_GRANULES, REDUCING

MOST_PLANS = 4096  # a program of ever new sizes must not grow without end


class CustomSchedule(NamedTuple):
    """A schedule of the user's, proved, with the name that ranks compare; see ``dtcomm.collectives.run``."""

    name: str
    schedule: Schedule

    def __hash__(self) -> int:
        return hash(self.name)


Algorithm = str | CustomSchedule


def plan_for(
    communicator: Communicator,
    key: Any,
    collective: str,
    op: Any,
    numels: Sequence[int],
    dtypes: Sequence[torch.dtype],
    specs: Sequence[str | Codec],
    algorithm: Algorithm,
    root: int = 0,
    splits: tuple[int, ...] = (),
    checksum: bool | None = None,
    audit: bool = False,
) -> Any:
    """Check what does not depend on the tensors' memory, choose the algorithm and keep the plan under ``key``.

    Arguments as in ``OpSpec`` and ``TensorSpec``; ``checksum`` None is what DTCOMM_CHECKSUM says.
    """
    if checksum is None:
        checksum = communicator.checksum
    elif not isinstance(checksum, bool):
        raise TypeError(f"checksum: expected True, False or None, got {checksum!r}")
    name = op_name(op)
    parts = []
    for numel, dtype, spec in zip(numels, dtypes, specs, strict=True):
        inside, between = codecs.parse_levels(spec)
        for codec in (inside, between or inside):
            require_dtype(name, dtype, codec)
        parts.append(TensorSpec(numel, dtype, inside, between))
    message = Message(collective, name, tuple(parts), algorithm, root, "", checksum)
    multi_stage = collective in REDUCING and any(_on_common_ground(part) for part in parts)
    if multi_stage and communicator.size > 1:
        plan: Any = _on_ground(communicator, message, audit)
    else:
        plan = _prepare(communicator, message, splits)
    if len(communicator.plans) > MOST_PLANS:
        communicator.plans.clear()
    communicator.plans[key] = plan
    return plan


def _prepare(communicator: Communicator, message: Message, splits: tuple[int, ...] = ()) -> Any:
    """The runtime's plan of one operation."""
    algorithm = message.algorithm
    collective, root = message.collective, message.root
    chosen = algorithm
    if not isinstance(algorithm, CustomSchedule):
        chosen = _choose(communicator, collective, message.parts, algorithm)
    called = chosen.name if isinstance(chosen, CustomSchedule) else chosen
    shape = OpSpec(
        collective, message.op, message.parts, called, root, splits, message.checksum, message.purpose
    )
    return communicator.runtime.prepare(shape, _schedule(communicator, chosen, collective, root))


def _on_common_ground(part: TensorSpec) -> bool:
    found = [codec for codec in (part.codec, part.between) if codec is not None and codec.needs_agreement]
    if found and part.between is not None:
        raise ValueError(
            f"codec: {part.spec}: {found[0]} adds on the same ground on all levels of a hierarchy; give it alone"
        )
    return bool(found)


def _on_ground(communicator: Communicator, message: Message, audit: bool) -> MultiStagePlan:
    """The plan of a sum in which some parts are added on common ground."""
    make = functools.partial(_prepare, communicator)
    rank, ranks = communicator.rank, communicator.size
    exact = [i for i, part in enumerate(message.parts) if part.codec.reproducible]
    other = [i for i in range(len(message.parts)) if i not in exact]

    def only(positions: list[int]) -> Message:
        return message._replace(parts=tuple(message.parts[i] for i in positions))

    if not other:
        return ExactSum(make, message, rank, ranks, audit=audit)
    if not exact:
        return SharedSum(make, message, rank, ranks)
    return Groups(
        [
            (exact, ExactSum(make, only(exact), rank, ranks)),
            (other, SharedSum(make, only(other), rank, ranks)),
        ]
    )


def start(
    communicator: Communicator,
    plan: Any,
    buffers: Sequence[Buffers],
    outputs: Sequence[torch.Tensor],
    seed: int | None,
    async_op: bool,
    epilogue: LocalTask | None = None,
) -> Work | None:
    """Run the plan on these tensors, or queue it; ``epilogue`` is applied to the result."""
    key = communicator.next_seed(seed)
    runtime = communicator.runtime
    if isinstance(plan, MultiStagePlan):
        work = _start_stages(communicator, plan, buffers, outputs, key, async_op)
        if epilogue is not None and work is not None:
            return ChainedWork(work, epilogue, outputs)
        if epilogue is not None:
            epilogue()
        return work
    hooks = None if epilogue is None else OpHooks(after=(epilogue,))
    if async_op:
        return runtime.submit(plan, buffers, outputs, key, hooks)
    runtime.run(plan, buffers, key, hooks)
    return None


def _start_stages(
    communicator: Communicator,
    plan: MultiStagePlan,
    buffers: Sequence[Buffers],
    outputs: Sequence[torch.Tensor],
    key: int,
    async_op: bool,
) -> Work | None:
    runtime = communicator.runtime
    stages, check = plan.stages(buffers, key, communicator.scratch)
    if async_op:
        works = [runtime.submit(stage.plan, stage.buffers, outputs, key, stage.hooks) for stage in stages]
        work = CompositeWork(works, outputs)
        return work if check is None else ChainedWork(work, check, outputs)
    for stage in stages:
        for tensors in stage.hooks.tensors() if communicator.device is not None else ():
            record_streams(*tensors)  # scratch may be another stream's
        runtime.run(stage.plan, stage.buffers, key, stage.hooks)
    if check is not None:
        check()
    return None


def own(schedule: Schedule) -> CustomSchedule:
    """``schedule`` under a name made of its text."""
    return CustomSchedule(f"schedule {zlib.crc32(str(schedule).encode()):08x}", schedule)


def _schedule(communicator: Communicator, chosen: Algorithm, collective: str, root: int) -> Schedule:
    if isinstance(chosen, CustomSchedule):
        return chosen.schedule
    return _build(chosen, collective, communicator.size, root, communicator.groups)


@functools.lru_cache(maxsize=256)
def _build(
    algorithm: str, collective: str, ranks: int, root: int, groups: tuple[tuple[int, ...], ...]
) -> Schedule:
    # The messages of a symmetric two-shot sum are those of a two-shot sum.
    name = "two_shot" if algorithm == TWO_SHOT_SYMMETRIC else algorithm
    return algorithms.build(name, collective, ranks, root=root, hosts=groups)


def _require_fused_kernels(communicator: Communicator) -> None:
    """ValueError where the ranks have no fused kernels, which alone encode the owner's contribution."""
    runtime = communicator.runtime
    if runtime.name not in ("peer", "none"):
        raise ValueError(
            f"algorithm: {TWO_SHOT_SYMMETRIC} needs fused CUDA kernels, and the runtime of these ranks is "
            f"{runtime.name}; valid: {', '.join((*planner.CHOOSERS, *algorithms.available('all_reduce')))}"
        )


def _choose(communicator: Communicator, collective: str, parts: Sequence[TensorSpec], algorithm: str) -> str:
    """The algorithm of a message: chosen for its whole size; the shots that suit every part's codec."""
    if not isinstance(algorithm, str):
        raise TypeError(f"algorithm: expected a name, got {type(algorithm).__name__}")
    if algorithm == TWO_SHOT_SYMMETRIC and collective == "all_reduce":
        _require_fused_kernels(communicator)
        return algorithm
    if any(part.between for part in parts) and communicator.hosts > 1:
        levels = "hierarchical" if algorithm == "auto" else algorithm
        if levels.partition(":")[0] != "hierarchical":
            given = next(part.spec for part in parts if part.between)
            raise ValueError(
                f"codec: {given} has a codec for each level, which {algorithm} does not; hierarchical has"
            )
        algorithm = levels
    scale = 1 if collective in CUT_AT_GRANULES else communicator.size
    numel = sum(part.numel for part in parts) * scale
    table = planner.parse(communicator.tuning_table)
    names = [
        planner.select(
            collective,
            numel,
            dtype,
            codec,
            communicator.size,
            hosts=communicator.hosts,
            table=table,
            algorithm=algorithm,
        )
        for dtype, codec in dict.fromkeys((part.dtype, part.codec) for part in parts)
    ]
    if not names:
        names = [planner.select(collective, 0, torch.float32, codecs.codec("none"), communicator.size)]
    if len(set(names)) == 1:
        return names[0]
    # Parts that would go different ways alone go together by the shots, which suit all codecs.
    return next(shots for shots in ("two_shot", "one_shot") if shots in algorithms.available(collective))
