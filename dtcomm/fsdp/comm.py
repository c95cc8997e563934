"""The collectives that FSDP2 lets a module bring along."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, Comm, ReduceScatter

from dtcomm.collectives import Work, all_gather, all_reduce, reduce_scatter
from dtcomm.device.streams import record_streams
from dtcomm.fsdp.cpu_overlap import only_cuts
from dtcomm.fsdp.reduction import Reduction
from dtcomm.fsdp.report import Traffic
from dtcomm.fsdp.state import State, fitting
from dtcomm.profiling import Message, Timeline
from dtcomm.profiling.profiler_ranges import during
from dtcomm.profiling.step_record import Waited

_OPS = {dist.ReduceOp.SUM: "sum", dist.ReduceOp.AVG: "avg"}


class _Timed:
    """One module's collective of a kind, counted and timed."""

    def __init__(self, state: State, module: str) -> None:
        self.state, self.module = state, module
        self._called_ns = 0  # the last time; FSDP calls one of them after the other

    def under_way(
        self,
        kind: str,
        work: Work | None,
        traffic: Traffic,
        plain: int,
        then: Callable[[], None] | None = None,
    ) -> dist.Work:
        """The started collective as FSDP waits for it; ``then`` runs once it is done."""
        assert work is not None  # it is with async_op
        label = f"{self.module or '(root)'} {kind}"
        return _Later(work, traffic, plain, then, self.state.timeline, label, self._called_ns)

    def handed(self, later: dist.Work, async_op: bool) -> dist.Work | None:
        """To whoever waits for it by itself, or else once it is done."""
        if async_op:
            return later
        later.wait()
        return None


class _Collective(_Timed, Comm):
    """What FSDP2 asks of a collective besides moving bytes."""

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        return self.state.pool.take([int(extent) for extent in size], dtype, device)


class Gather(_Collective, AllGather):
    """One module's all-gather.

    It is always handed back under way, whatever ``async_op`` says: FSDP waits for whatever it is given when it takes
    the parameters out, so what it prefetches moves while the module before computes, on CPUs too.
    """

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        self._called_ns = time.monotonic_ns()
        recipe = self.state.parameters
        traffic = self.state.traffic(self.module, "parameters", recipe)
        plain = input_tensor.numel() * input_tensor.element_size() * (group.size() - 1)
        if group.size() != self.state.shards:
            # Copies kept inside a host (reshard_after_forward=n) are what was decoded: encoded again they would differ.
            work = all_gather(output_tensor, input_tensor, group=group, async_op=True)
            traffic = self.state.traffic(self.module, "kept copies", recipe)
            traffic.codec, traffic.why = "none", "decoded parameters, gathered again from this host's ranks"
            return self.under_way("parameters", work, traffic, plain)
        if recipe.word == "delta":
            return self._difference(output_tensor, input_tensor, group, traffic, plain)
        which = fitting(self.state.watching.in_force(self.module, recipe), input_tensor, traffic)
        seed = self.state.next_seed()
        work = all_gather(output_tensor, input_tensor, codec=which, group=group, seed=seed, async_op=True)
        return self.under_way("parameters", work, traffic, plain)

    def _difference(
        self,
        output: torch.Tensor,
        own: torch.Tensor,
        group: dist.ProcessGroup,
        traffic: Traffic,
        plain: int,
    ) -> dist.Work | None:
        """Everybody's reference, which all hold alike, moves by the decoded difference: what one encoding loses is
        part of the next difference.
        """
        reference = self.state.reference(self.module)
        if reference is None or reference.numel() != output.numel() or reference.dtype != output.dtype:
            return self._whole(output, own, group, traffic, plain)
        if torch._C._current_graph_task_id() != -1:
            # In backward nothing has changed since forward, so no rank has anything to tell.
            output.copy_(reference)
            traffic.save(plain)
            return _Done()
        which = fitting(self.state.watching.in_force(self.module, self.state.parameters), own, traffic)
        mine = reference.view(group.size(), -1)[group.rank()]
        differences = self.state.pool.take(output.shape, output.dtype, output.device)
        work = all_gather(
            differences,
            own - mine,
            codec=which,
            group=group,
            seed=self.state.next_seed(),
            async_op=True,
        )

        def then() -> None:
            record_streams(differences, reference)  # FSDP waits on another stream than it gathers on
            reference.add_(differences)
            output.copy_(reference)
            self.state.keep_reference(self.module, reference)

        return self.under_way("parameters", work, traffic, plain, then)

    def _whole(
        self,
        output: torch.Tensor,
        own: torch.Tensor,
        group: dist.ProcessGroup,
        traffic: Traffic,
        plain: int,
    ) -> dist.Work | None:
        """The first time, all of it, uncompressed; after a checkpoint what peers held then, and a difference to it."""
        saved = self.state.take_own_reference(self.module)
        if saved is not None:
            reference = output.new_empty(output.shape)
            all_gather(reference, saved.to(output.device, output.dtype), group=group)
            self.state.keep_reference(self.module, reference)
            return self._difference(output, own, group, traffic, plain)
        work = all_gather(output, own, group=group, async_op=True)

        def then() -> None:
            self.state.keep_reference(self.module, output.clone())

        return self.under_way("parameters", work, traffic, plain, then)


class Scatter(_Collective, ReduceScatter):
    """One module's reduce-scatter, which backward goes on behind where it can (`dtcomm.fsdp.cpu_overlap`)."""

    def __init__(self, state: State, name: str, module: FSDPModule) -> None:
        super().__init__(state, name)
        self._of = weakref.ref(module)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        self._called_ns = time.monotonic_ns()
        reduction = Reduction(self.state, self.module, input_tensor)
        work = reduce_scatter(output_tensor, input_tensor, op_name(op), group=group, **reduction.options)
        sent = input_tensor.numel() * input_tensor.element_size() * (group.size() - 1) // group.size()
        later = self.under_way("gradients", work, reduction.traffic, sent, reduction.done)
        module = self._of()
        if not async_op and module is not None and only_cuts(module, input_tensor, op_name(op)):
            self.state.overlap.add(later)
            return None
        self.state.overlap.finish()  # among them may be the gradient that this one is added to
        return self.handed(later, async_op)


class Average(_Timed):
    """One module's all-reduce between replicas, after its reduce-scatter."""

    def __init__(self, state: State, module: str, group: dist.ProcessGroup) -> None:
        super().__init__(state, module)
        self.group = group

    def __call__(self, shard: torch.Tensor) -> None:
        self._called_ns = time.monotonic_ns()
        reduction = Reduction(self.state, self.module, shard, "replicas", watched=False)
        work = all_reduce(shard, "avg", group=self.group, **reduction.options)
        sent = 2 * shard.nbytes * (self.group.size() - 1) // self.group.size()
        self.under_way("replicas", work, reduction.traffic, sent, reduction.done).wait()


class _Later(dist.Work):
    """A started collective, as FSDP waits for it."""

    def __init__(
        self,
        work: Work,
        traffic: Traffic,
        plain: int,
        then: Callable[[], None] | None,
        timeline: Timeline,
        label: str,
        ready_ns: int,
    ) -> None:
        super().__init__()
        self._work, self._traffic, self._plain, self._then = work, traffic, plain, then
        self._timeline, self._label = timeline, label
        self._ready_ns, self._launched_ns = ready_ns, time.monotonic_ns()
        self._waited = False

    def wait(self, timeout: Any = None) -> bool:
        begin = time.monotonic_ns()
        with during(self._label):
            self._work.wait()
        if not self._waited:
            self._waited = True
            self._traffic.add(self._work, self._plain)
            end = time.monotonic_ns()
            if self._then is not None:
                self._then()
            if self._timeline.on:
                self._timeline.begin().messages.append(self._message(Waited(begin, end)))
        return True

    def _message(self, waited: Waited) -> Message:
        return Message(
            label=self._label,
            codec=self._traffic.codec,
            plain_bytes=self._plain,
            wire_bytes=self._work.wire_bytes,
            ready=self._ready_ns,
            launched=self._launched_ns,
            started=self._work.started_ns,
            finished=self._work.finished_ns,
            done=self._work.finished_ns,
            spans=self._work.spans(),
            waited=waited,
        )


class _Done(dist.Work):
    """Nothing to wait for."""

    def wait(self, timeout: Any = None) -> bool:
        return True


def op_name(op: Any) -> str:
    """FSDP's reduction as ours. ValueError for a sum that is multiplied first, whose factor torch does not tell."""
    name = _OPS.get(op)
    if name is None:
        raise ValueError(
            f"fsdp: the reduce-scatter's op is {op}, whose factor cannot be read; "
            "call set_force_sum_reduction_for_comms(True) on the module, or leave its divide factor alone"
        )
    return name
