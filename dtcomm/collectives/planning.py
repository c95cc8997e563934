"""The plan of an operation: which algorithm runs it, in how many stages, and what the runtime prepares for it.

A call looks up its plan in ``communicator.plans`` by a `Request`. If there is none, `make_plan` chooses the algorithm
and stores the plan. While the ranks are not connected, the plan is a `DeferredPlan`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from dtcomm import algorithms, codecs, planner
from dtcomm.codecs import Codec
from dtcomm.codecs.cast import RoundedExact
from dtcomm.collectives._multi_stage import (
    MultiStagePlan,
    PrepareStage,
    ReproducibleSum,
    SharedRandKSum,
    SplitPlan,
    Stage,
)
from dtcomm.collectives._options import Algorithm, Group, NamedSchedule, Op
from dtcomm.collectives._rounded_sum import RoundedSum
from dtcomm.collectives.checks import op_name, require_auditable, require_dtype
from dtcomm.runtime.communicator import Communicator, Connecting
from dtcomm.runtime.plans import PlanCache
from dtcomm.runtime.types import TWO_SHOT_SYMMETRIC, Buffers, OpHooks, OpSpec, Plan, PreparedPlan, TensorSpec
from dtcomm.schedule import Schedule, parse, verify
from dtcomm.schedule.ir import CUT_AT_GRANULES, REDUCING
from dtcomm.streams import record_streams
from dtcomm.work import CompositeWork, Work

parse_text = functools.lru_cache(maxsize=64)(parse)


def require_algorithm(
    algorithm: Algorithm | NamedSchedule, group: Group = None, collective: str = "all_reduce"
) -> None:
    """Raise now what a collective without a root, over a group, would raise for ``algorithm``.

    Integrations call it where they are given the algorithm, long before the first call.
    """
    _custom_schedule(algorithm, collective, dist.get_world_size(group), root=0)


class Request(NamedTuple):
    """What distinguishes calls that need different plans; it is the key of the plan in ``communicator.plans``.

    ``parts`` has for each tensor its number of elements (of the whole tensor or of one shard, as in `TensorSpec`), its
    dtype and its codec. ``root`` is a rank in the communicator, and ``splits`` are as in `OpSpec`. ``feedback`` says
    whether a tensor has a residual. ``purpose`` names the stage of a larger operation that this one is, for errors.
    """

    collective: str
    parts: tuple[tuple[int, torch.dtype, str | Codec], ...]
    op: Op
    algorithm: Algorithm | NamedSchedule
    checksum: bool | None
    root: int = 0
    splits: tuple[int, ...] = ()
    feedback: bool = False
    audit: bool = False
    purpose: str = ""


def make_plan(communicator: Communicator, request: Request) -> Plan:
    """Check the arguments that do not depend on memory, choose the algorithm, and store the plan under the request.

    If the ranks are not connected yet, the returned plan chooses the algorithm when they are.
    """
    checksum = request.checksum
    if checksum is None:
        checksum = communicator.checksum
    elif not isinstance(checksum, bool):
        raise TypeError(f"checksum: expected True, False or None, got {checksum!r}")
    op = op_name(request.op)
    tensors = []
    for numel, dtype, spec in request.parts:
        inside, between = codecs.parse_levels(spec)
        for codec in (inside, between or inside):
            codecs.spec.require_fixed_length(codec, request.collective)
            require_dtype(op, dtype, codec)
        tensors.append(TensorSpec(numel, dtype, inside, between))
        if request.audit:
            require_auditable(spec)
    custom = _custom_schedule(request.algorithm, request.collective, communicator.size, request.root)
    name = custom.name if custom is not None else str(request.algorithm)
    spec_of_all = OpSpec(
        request.collective, op, tuple(tensors), name, request.root, request.splits, checksum, request.purpose
    )
    # The list, and not a generator: every tensor is checked.
    needs_agreement = [_needs_agreement(part) for part in tensors] if request.collective in REDUCING else []

    def make(plans: PlanCache) -> Plan:
        prepared: list[PreparedPlan] = []

        def prepare(stage: OpSpec) -> Plan:
            prepared.append(_prepare(communicator, custom, stage, request.feedback))
            return prepared[-1]

        plan: Plan
        if any(needs_agreement) and communicator.size > 1:
            stages = _multi_stage_plan(
                prepare, spec_of_all, communicator.rank, communicator.size, request.audit
            )
            plan = StagesOfCommunicator(communicator, stages)
        else:
            plan = prepare(spec_of_all)
        plans.keep(request, plan, sum(stage.table_bytes for stage in prepared))
        return plan

    connection = communicator.connection
    return make(communicator.plans) if connection is None else DeferredPlan(connection, request, make)


class DeferredPlan:
    """A plan that is made once the ranks are connected. An operation that is queued before does not wait for that.

    ``make`` makes the plan and stores it under ``key`` in the cache that is passed.
    """

    def __init__(self, connection: Connecting, key: Hashable, make: Callable[[PlanCache], Plan]) -> None:
        self._connection = connection
        self._key = key
        self._make = make

    def run(self, buffers: Sequence[Buffers], seed: int, hooks: OpHooks | None = None) -> int:
        """Wait until the ranks are connected, and run the operation to its end; returns the bytes sent."""
        self._connection.wait()
        return self._plan().run(buffers, seed, hooks)

    def submit(
        self,
        buffers: Sequence[Buffers],
        outputs: Sequence[torch.Tensor],
        seed: int,
        hooks: OpHooks | None = None,
    ) -> Work:
        """Queue the operation as soon as the ranks are connected."""
        return self._connection.start(outputs, lambda: self._plan().submit(buffers, outputs, seed, hooks))

    def _plan(self) -> Plan:
        plans = self._connection.plans
        plan = plans.get(self._key)
        return self._make(plans) if plan is None else plan


class StagesOfCommunicator:
    """The plan of a multi-stage operation, whose stages use the communicator's scratch memory.

    Its hooks are those of `start`, which run after the operation.
    """

    def __init__(self, communicator: Communicator, plan: MultiStagePlan) -> None:
        self._communicator = communicator
        self._plan = plan

    def run(self, buffers: Sequence[Buffers], seed: int, hooks: OpHooks | None = None) -> int:
        """Run all stages, the check of the result and the hooks; returns the bytes that the stages sent."""
        stages, tasks = self._begin(buffers, seed, hooks)
        sent = 0
        for stage in stages:
            if self._communicator.device is not None:  # the scratch memory may belong to another stream
                for tensors in stage.hooks.tensors():
                    record_streams(*tensors)
            sent += stage.plan.run(stage.buffers, seed, stage.hooks)
        for task in tasks:
            task()
        return sent

    def submit(
        self,
        buffers: Sequence[Buffers],
        outputs: Sequence[torch.Tensor],
        seed: int,
        hooks: OpHooks | None = None,
    ) -> Work:
        """Queue all stages. The check and the hooks run once, before anyone sees the result."""
        stages, tasks = self._begin(buffers, seed, hooks)
        works = [stage.plan.submit(stage.buffers, outputs, seed, stage.hooks) for stage in stages]
        work: Work = CompositeWork(works, outputs)
        for task in tasks:
            work = CompositeWork([work], outputs, task)
        return work

    def _begin(
        self, buffers: Sequence[Buffers], seed: int, hooks: OpHooks | None
    ) -> tuple[list[Stage], list[Callable[[], None]]]:
        stages, check = self._plan.stages(buffers, seed, self._communicator.scratch)
        assert hooks is None or not hooks.before
        return stages, [*([] if check is None else [check]), *(() if hooks is None else hooks.after)]


def _custom_schedule(
    algorithm: Algorithm | NamedSchedule, collective: str, ranks: int, root: int
) -> NamedSchedule | None:
    """Return the verified schedule that ``algorithm`` is, or None if it is a name, which must be valid."""
    if isinstance(algorithm, NamedSchedule):
        return algorithm
    if isinstance(algorithm, str) and "\n" not in algorithm:
        if algorithm != TWO_SHOT_SYMMETRIC:
            algorithms.require(algorithm, collective, besides=planner.CHOOSERS)
        if algorithms.is_registered(algorithm) and ":" not in algorithm:
            algorithms.build(algorithm, collective, ranks, root)  # raises now what is wrong with it
        return None
    if not isinstance(algorithm, str | Schedule):
        raise TypeError(f"algorithm: expected a name or a Schedule, got {type(algorithm).__name__}")
    schedule = parse_text(algorithm) if isinstance(algorithm, str) else algorithm
    if schedule.collective != collective:
        raise ValueError(f"algorithm: the schedule is for {schedule.collective}, not {collective}")
    if schedule.ranks != ranks:
        raise ValueError(f"algorithm: the schedule is for {schedule.ranks} ranks, the group has {ranks}")
    if schedule.root != root:
        raise ValueError(
            f"algorithm: the schedule's root is rank {schedule.root} of the group, the call's is {root}"
        )
    verify(schedule)
    return NamedSchedule.of(schedule)


def _prepare(
    communicator: Communicator, custom: NamedSchedule | None, request: OpSpec, feedback: bool
) -> PreparedPlan:
    """Choose the algorithm of one operation and return the runtime's plan of it.

    ``request.algorithm`` is what the caller asked for: a name, "auto" or "direct", or the name of ``custom``. With
    ``feedback`` the schedule may encode each chunk once on a rank: no residual could hold the errors of several.
    """
    if custom is None or request.algorithm != custom.name:
        algorithm = _choose_algorithm(communicator, request)
        groups, _ = levels(communicator)
        schedule = build_schedule(algorithm, request.collective, communicator.size, request.root, groups)
        if not algorithms.is_registered(algorithm):
            alternative = _alternative(communicator, request, algorithm)
            return communicator.runtime.prepare(
                request._replace(algorithm=algorithm, alternative=alternative), schedule
            )
        # Ranks may have registered different builders under one name.
        custom = NamedSchedule(f"{algorithm} ({NamedSchedule.of(schedule).name})", schedule)
    if feedback:
        encodings = verify(custom.schedule).encodings
        (rank, chunk), times = max(encodings.items(), key=lambda item: item[1], default=((0, 0), 0))
        if times > 1:
            raise ValueError(
                f"residual: rank {rank} encodes chunk {chunk} {times} times in {custom.name}; error feedback needs at "
                "most one encoding of each"
            )
    return communicator.runtime.prepare(request._replace(algorithm=custom.name), custom.schedule)


def _alternative(communicator: Communicator, request: OpSpec, algorithm: str) -> tuple[str, Schedule] | None:
    """Return the other direct algorithm of a sum of which both give the same bits, if the caller asked for neither."""
    other = {"one_shot": "two_shot", "two_shot": "one_shot"}.get(algorithm)
    if request.algorithm not in planner.CHOOSERS or request.collective != "all_reduce" or other is None:
        return None
    if not all(part.codec.lossless(part.dtype) for part in request.parts):
        return None
    groups, _ = levels(communicator)
    return other, build_schedule(other, request.collective, communicator.size, request.root, groups)


def _needs_agreement(part: TensorSpec) -> bool:
    """Return whether the part's ranks have to agree on a representation before they add."""
    codecs_of_part = (part.codec,) if part.between is None else (part.codec, part.between)
    agreeing = [codec for codec in codecs_of_part if codec.needs_agreement]
    if agreeing and part.between is not None:
        raise ValueError(
            f"codec: {part.spec}: {agreeing[0]} uses one representation on all levels of a hierarchy; give it alone"
        )
    return bool(agreeing)


def _multi_stage_plan(
    prepare: PrepareStage, request: OpSpec, rank: int, ranks: int, audit: bool
) -> MultiStagePlan:
    """Return the plan of a sum in which some parts need an agreement of the ranks first."""
    kinds: dict[type[MultiStagePlan], list[int]] = {}
    for i, part in enumerate(request.parts):
        rounded = isinstance(part.codec, RoundedExact)
        kind = RoundedSum if rounded else ReproducibleSum if part.codec.reproducible else SharedRandKSum
        kinds.setdefault(kind, []).append(i)
    plans: list[tuple[list[int], MultiStagePlan]] = []
    for make in (RoundedSum, ReproducibleSum, SharedRandKSum):
        if indices := kinds.get(make):
            only = request._replace(parts=tuple(request.parts[i] for i in indices))
            plan = (
                ReproducibleSum(prepare, only, rank, ranks, audit=audit)
                if make is ReproducibleSum
                else make(prepare, only, rank, ranks)
            )
            plans.append((indices, plan))
    return plans[0][1] if len(plans) == 1 else SplitPlan(plans)


@functools.lru_cache(maxsize=256)
def build_schedule(
    algorithm: str, collective: str, ranks: int, root: int, groups: tuple[tuple[int, ...], ...]
) -> Schedule:
    """Return the schedule of an algorithm; it is kept."""
    # The messages of a symmetric two-shot sum are those of a two-shot sum.
    name = "two_shot" if algorithm == TWO_SHOT_SYMMETRIC else algorithm
    return algorithms.build(name, collective, ranks, root=root, hosts=groups)


def levels(communicator: Communicator) -> tuple[tuple[tuple[int, ...], ...], planner.Table]:
    """Return the groups of ranks that hierarchies are made of, and the table that ``auto`` decides by.

    The groups are the hosts, or those that fast links join where DTCOMM_TOPOLOGY names the rates.
    """
    table = planner.parse(communicator.tuning_table)
    if communicator.device is not None:  # the other times are those of CPU tensors
        table = planner.Table(compress_from=table.compress_from)
    job_ranks = dist.get_world_size() if communicator.links and dist.is_initialized() else None
    return planner.levels_of(
        communicator.links, table, tuple(communicator.ranks), communicator.groups, job_ranks
    )


def _choose_algorithm(communicator: Communicator, request: OpSpec) -> str:
    """Return the algorithm of a message, chosen for its whole size and for the codecs of all its parts."""
    collective, parts, algorithm = request.collective, request.parts, request.algorithm
    if algorithm == TWO_SHOT_SYMMETRIC and collective == "all_reduce":
        _require_fused_kernels(communicator)
        return algorithm
    groups, table = levels(communicator)
    if algorithm == "auto" and communicator.runtime.name == "peer":
        algorithm = "direct"  # fused kernels have no other, and the table was measured without them
    if any(part.between for part in parts) and len(groups) > 1:
        requested = algorithm
        algorithm = "hierarchical" if requested == "auto" else requested
        if algorithm.partition(":")[0] != "hierarchical":
            spec = next(part.spec for part in parts if part.between)
            raise ValueError(
                f"codec: {spec} names a codec for each level, and {requested} has no levels; use hierarchical or auto"
            )
    scale = 1 if collective in CUT_AT_GRANULES else communicator.size
    numel = sum(part.numel for part in parts) * scale
    names = [
        planner.select(
            collective,
            numel,
            dtype,
            codec,
            communicator.size,
            hosts=len(groups),
            table=table,
            algorithm=algorithm,
        )
        for dtype, codec in dict.fromkeys((part.dtype, part.codec) for part in parts)
    ]
    if not names:
        names = [planner.select(collective, 0, torch.float32, codecs.codec("none"), communicator.size)]
    if len(set(names)) == 1:
        return names[0]
    if "hierarchical" in names:  # it crosses hosts once for all ranks of a host, whatever the codec
        return "hierarchical"
    # Parts for which different algorithms would be chosen share a direct one, which suits all codecs.
    return next(shots for shots in ("two_shot", "one_shot") if shots in algorithms.available(collective))


def _require_fused_kernels(communicator: Communicator) -> None:
    """Check that the ranks have fused kernels, which alone encode the owner's contribution to its own chunk."""
    if communicator.runtime.name not in ("peer", "none"):
        raise ValueError(
            f"algorithm: {TWO_SHOT_SYMMETRIC} needs fused CUDA kernels, and the runtime of these ranks is "
            f"{communicator.runtime.name}; valid: {', '.join((*planner.CHOOSERS, *algorithms.available('all_reduce')))}"
        )
