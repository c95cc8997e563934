"""Compressed gradients for DistributedDataParallel.

    state = dtcomm.ddp.compress(model, "int8")

or, for a framework that registers the hook itself,

    model.register_comm_hook(dtcomm.ddp.State("int8"), dtcomm.ddp.hook)

Each bucket becomes one message in which every parameter keeps blocks, codec and error feedback of its own.
The gradients are averaged in place, as DDP itself does.

An error in a collective is raised from ``backward()`` with its own type (`PeerLost`, `CollectiveTimeout`,
...), kept as ``state.error``, and raised again by the next forward or backward; a future's exception DDP
would print as "Unable to cast". After it, the model needs a new DDP around it.
"""

# Annotations stay objects in this file: register_comm_hook compares the hook's with the types themselves.
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket  # dist.GradBucket, where type checkers find it
from torch.nn.parallel import DistributedDataParallel

from dtcomm.collectives import Work, all_reduce_coalesced
from dtcomm.compress.checkpoint import VERSION, require_fit, share_of
from dtcomm.compress.feedback import Residuals
from dtcomm.compress.packing import Packing, Segment, pack
from dtcomm.compress.policy import Policy, as_policy
from dtcomm.compress.powersgd import Factors, PowerSGD, Task, stages
from dtcomm.compress.report import Report, Tally, rows
from dtcomm.compress.scheme import Scheme
from dtcomm.compress.sequence import Sequencer


@dataclass
class _Flight:
    """A bucket under way. ``residuals`` are those handed to the collective, one or None per lossy segment;
    ``deferred`` marks those that are added to the stored ones afterwards, ``signals`` (the gradients' norms)
    is there on sampled steps."""

    work: Work
    packing: Packing
    residuals: list[torch.Tensor | None]
    deferred: list[bool]
    signals: list[torch.Tensor] | None


class State:
    """What the hook remembers: which codec each parameter gets, the residuals, and what was counted.

    spec: a codec or compressor (or its spec: "int8", "powersgd:rank=4"), which goes to matrices under
        `default_policy`; or a `Policy` (or its text).
    group: the process group of the model; None is the default group.
    feedback: keep each rank's encoding errors and add them to the next gradient, fp32, per parameter.
    algorithm: of the all-reduce. With the direct ones a result does not depend on the bucket a parameter is
        in, so a run resumed from a checkpoint continues bit for bit though DDP starts with other buckets.
    seed: of stochastic rounding; mixed with the step.
    parameters: (name, parameter) pairs, as of ``module.named_parameters()``. Without them a parameter is
        called ``parameter.K`` where K counts the parameters in the order in which buckets first bring them.
        That order is DDP's, the same in every process and every run with the same model and bucket size.
    sample_every: measure the relative error on every step whose number it divides; 0: never.
    """

    def __init__(
        self,
        spec: str | Scheme | Policy = "int8",
        group: dist.ProcessGroup | None = None,
        feedback: bool = True,
        *,
        algorithm: str = "direct",
        seed: int = 0,
        parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
        sample_every: int = 50,
    ) -> None:
        if sample_every < 0:
            raise ValueError(f"sample_every={sample_every}: want 0 (never) or more")
        self.policy = as_policy(spec)
        self.group = group
        self.feedback = feedback
        self.algorithm = algorithm
        self.seed = seed
        self.sample_every = sample_every
        self.steps = 0
        self.error: Exception | None = None
        # The parameters are kept so that an id is never reused; without names, they come with the buckets.
        self._parameters: dict[int, tuple[str, torch.Tensor]] = {}
        self._named = parameters is not None
        for name, parameter in parameters or ():
            self._parameters[id(parameter)] = (name, parameter)
        self._residuals = Residuals()
        self._factors = Factors()
        # Where buckets take several collectives, all of them start on one thread, in an order that ranks share.
        in_stages = any(isinstance(rule.codec, PowerSGD) for rule in self.policy.rules)
        self._sequencer = Sequencer() if in_stages else None
        self._packings: dict[int, Packing] = {}
        self._retired: list[Packing] = []
        self._flights: list[_Flight] = []
        self._in_backward = False
        # What `compress` finds out about the model: see `_end_backward` and `_launch`.
        self._wait_before_ddp = False
        self._may_leave_unused = True

    def report(self) -> Report:
        """What was compressed, with what, and what it saved, up to the last finished backward."""
        packings = [*self._retired, *self._packings.values()]
        tallies: dict[str, Tally] = {}
        for packing in packings:
            packing.add_to(tallies)
        return Report(
            policy=str(self.policy),
            feedback=self.feedback,
            steps=self.steps,
            messages=sum(packing.messages for packing in packings),
            wire_bytes=sum(packing.wire_bytes for packing in packings),
            plain_bytes=round(sum(packing.plain_bytes for packing in packings)),
            seconds=sum(packing.seconds for packing in packings),
            residual_bytes=self._residuals.nbytes(),
            rows=rows(tallies.items()),
        )

    def rescale(self, factor: float) -> None:
        """Multiply the residuals by ``factor``: for a loss scale that changed by it between two steps."""
        self._residuals.scale(factor)

    def state_dict(self) -> dict[str, Any]:
        """This rank's residuals by parameter name, and the counters; every rank saves its own."""
        return {
            "version": VERSION,
            "steps": self.steps,
            "seed": self.seed,
            "rank": dist.get_rank(self.group),
            "world_size": dist.get_world_size(self.group),
            "residuals": self._residuals.state_dict(),
            "factors": self._factors.state_dict(),
        }

    def load_state_dict(
        self,
        state: Mapping[str, Any] | Sequence[Mapping[str, Any]],
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        """Continue from `state_dict`: this rank's own, or the list of every rank's in rank order.

        From a list, the residuals are shared out so that their sum over ranks is kept, whatever the number of
        ranks now (``rank`` of ``world_size``, by default the group's). ValueError where one state alone comes
        from another number of ranks, or where its parameters are not this model's.
        """
        rank = dist.get_rank(self.group) if rank is None else rank
        world_size = dist.get_world_size(self.group) if world_size is None else world_size
        first, residuals = share_of(state, rank, world_size)
        if self._named:
            require_fit(residuals, {name: tensor.numel() for name, tensor in self._parameters.values()})
        self._residuals.load_state_dict(residuals)
        self._factors.load_state_dict(first.get("factors", {}))
        self.steps, self.seed = first["steps"], first["seed"]

    def reduce(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Start averaging the bucket in place; the future holds its buffer once that is done."""
        buffer = bucket.buffer()
        if bucket.index() == 0:
            self._begin_backward()
        done: torch.futures.Future[torch.Tensor]
        try:
            if self.error is not None:
                raise self.error
            flight = self._launch(bucket, buffer)
        except Exception as error:
            if not self._in_backward:
                raise
            self.error = error
            done = torch.futures.Future()
            done.set_result(buffer)
            return done
        self._flights.append(flight)
        if bucket.is_last():
            self.steps += 1
        carries_error = not self._in_backward

        def finish(future: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
            try:
                future.value()
            except Exception as error:
                self.error = self.error or error
                if carries_error:
                    raise
            return buffer

        return flight.work.get_future().then(finish)

    def _begin_backward(self) -> None:
        # Left by a backward that some error cut short, or by DDP's join(), which reduces outside of one.
        left, self._flights = self._flights, []
        if self._sequencer is not None:
            self._sequencer.restart()
        for flight in left:
            if flight.work.is_completed():
                self._settle(flight)
        try:
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)
            self._in_backward = True
        except RuntimeError:  # called by hand, outside of a backward: the future must carry an error itself
            self._in_backward = False

    def _end_backward(self) -> None:
        """Runs before DDP's own callback, which waits for the futures; another, after it, raises the errors.

        So DDP's timers see the waiting, and DDP is through with its step when the error comes. Only where DDP
        itself reduces a map of unused parameters would it trip over a lost peer before we could say so.
        """
        if self._wait_before_ddp:
            self._settle_all()
        else:
            torch.autograd.Variable._execution_engine.queue_callback(self._settle_all)

    def _settle_all(self) -> None:
        flights, self._flights = self._flights, []
        for flight in flights:
            try:
                flight.work.wait()
                self._settle(flight)
            except Exception as error:
                self.error = self.error or error
        if self.error is not None:
            raise self.error

    def _launch(self, bucket: GradBucket, buffer: torch.Tensor) -> _Flight:
        packing = self._packing(bucket, buffer)
        tensors = packing.cut(buffer)
        sampled = self.sample_every > 0 and self.steps % self.sample_every == 0
        residuals: list[torch.Tensor | None] = []
        deferred: list[bool] = []
        signals: list[torch.Tensor] | None = [] if sampled else None
        handed: list[torch.Tensor | None] = []
        for segment, tensor in zip(packing.segments, tensors, strict=True):
            residual = None
            if not segment.lossless:
                postpone = False
                if self.feedback:
                    # For a parameter that no rank used DDP drops the result, and with it what the residuals
                    # gave to it: where a gradient is all zeros its residual waits for one that is not.
                    postpone = self._may_leave_unused and segment.name in self._residuals and _is_zero(tensor)
                    if not postpone:
                        residual = self._residuals.get(segment.name, tensor)
                if postpone or (sampled and residual is None):
                    residual = torch.zeros(tensor.numel(), dtype=torch.float32, device=tensor.device)
                if signals is not None:
                    signals.append(torch.linalg.vector_norm(tensor, dtype=torch.float32))
                residuals.append(residual)
                deferred.append(postpone)
            handed.append(residual)
        if self._sequencer is None:
            work = all_reduce_coalesced(
                tensors,
                "avg",
                codec=[segment.codec for segment in packing.segments],  # type: ignore[misc]
                algorithm=self.algorithm,
                group=self.group,
                async_op=True,
                seed=self.seed + self.steps,
                residuals=handed,
                bucket_bytes=max(1, buffer.numel() * buffer.element_size()),
            )
        else:
            work = self._in_stages(packing, tensors, handed, buffer, last=bucket.is_last())
        assert work is not None  # it is with async_op
        return _Flight(work, packing, residuals, deferred, signals)

    def _in_stages(
        self,
        packing: Packing,
        tensors: Sequence[torch.Tensor],
        residuals: Sequence[torch.Tensor | None],
        buffer: torch.Tensor,
        *,
        last: bool,
    ) -> Work:
        assert self._sequencer is not None
        tasks, others, codecs, kept = [], [], [], []
        for segment, tensor, residual in zip(packing.segments, tensors, residuals, strict=True):
            if isinstance(segment.codec, PowerSGD):
                tasks.append(Task(segment.name, segment.codec, *segment.matrix, tensor, residual))
            else:
                others.append(tensor)
                codecs.append(segment.codec)
                kept.append(residual)
        work = stages(
            tasks,
            others,
            codecs,
            kept,
            factors=self._factors,
            step=self.steps,
            algorithm=self.algorithm,
            group=self.group,
            seed=self.seed + self.steps,
        )
        return self._sequencer.submit(work, [buffer], last=last)

    def _settle(self, flight: _Flight) -> None:
        packing = flight.packing
        packing.messages += 1
        packing.wire_bytes += flight.work.wire_bytes
        packing.seconds += flight.work.seconds
        for position, (segment, residual, deferred) in enumerate(
            zip(packing.lossy, flight.residuals, flight.deferred, strict=True)
        ):
            if residual is None:
                continue
            if flight.signals is not None:
                _sample(segment, float(flight.signals[position]), float(torch.linalg.vector_norm(residual)))
            if deferred:
                self._residuals.get(segment.name, residual).add_(residual)

    def _packing(self, bucket: GradBucket, buffer: torch.Tensor) -> Packing:
        parameters = bucket.parameters()
        layout = tuple(map(id, parameters))
        packing = self._packings.get(bucket.index())
        if packing is not None:
            if packing.layout == layout and packing.dtype == buffer.dtype:
                return packing
            self._retired.append(packing)
        if buffer.layout != torch.strided:
            raise TypeError(
                f"bucket {bucket.index()}: {buffer.layout} gradients cannot be compressed, only dense ones"
            )
        names = [self._name(parameter) for parameter in parameters]
        packing = pack(buffer, zip(names, bucket.gradients(), strict=True), layout, self.policy)
        self._packings[bucket.index()] = packing
        return packing

    def _name(self, parameter: torch.Tensor) -> str:
        if id(parameter) not in self._parameters:
            self._parameters[id(parameter)] = (f"parameter.{len(self._parameters)}", parameter)
        return self._parameters[id(parameter)][0]


def hook(state: State, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The DDP communication hook; register it with a `State` of its own for each model."""
    return state.reduce(bucket)


def compress(model: DistributedDataParallel, spec: str | Scheme | Policy = "int8", **options: Any) -> State:
    """Compress the gradients of a DDP model; ``options`` are those of `State` but group and parameters.

    TypeError where ``model`` is no DistributedDataParallel; RuntimeError where it has a hook already.
    """
    if not isinstance(model, DistributedDataParallel):
        raise TypeError(f"model: want a DistributedDataParallel, got {type(model).__name__}")
    state = State(spec, group=model.process_group, parameters=model.module.named_parameters(), **options)

    def refuse_after_failure(module: torch.nn.Module, args: Any) -> None:
        if state.error is not None:
            raise state.error

    state._wait_before_ddp = model.find_unused_parameters
    state._may_leave_unused = model.find_unused_parameters or model.static_graph
    model.register_comm_hook(state, hook)
    model.register_forward_pre_hook(refuse_after_failure)
    return state


def _is_zero(gradient: torch.Tensor) -> bool:
    """Whether every element is 0, at next to no cost where the first or the last is not."""
    return gradient.numel() == 0 or not (bool(gradient[0]) or bool(gradient[-1]) or bool(gradient.any()))


def _sample(segment: Segment, signal: float, error: float) -> None:
    if torch.isfinite(torch.tensor([signal, error])).all():
        segment.signal += signal * signal
        segment.error += error * error
