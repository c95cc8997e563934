"""The two collectives that FSDP2 lets a module bring along."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, Comm, ReduceScatter

from dtcomm.collectives import Work, all_gather, reduce_scatter
from dtcomm.fsdp.report import Traffic
from dtcomm.fsdp.state import State, fitting
from dtcomm.insight import Message, Timeline
from dtcomm.insight.ranges import during
from dtcomm.insight.step import Waited

_OPS = {dist.ReduceOp.SUM: "sum", dist.ReduceOp.AVG: "avg"}


class _Collective(Comm):
    """What FSDP2 asks of a collective besides moving bytes."""

    def __init__(self, state: State, module: str) -> None:
        self.state, self.module = state, module
        self._called_ns = 0  # the last time; FSDP calls one of them after the other

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        return self.state.pool.take([int(extent) for extent in size], dtype, device)

    def finish(
        self,
        kind: str,
        work: Work | None,
        traffic: Traffic,
        plain: int,
        async_op: bool,
        then: Callable[[], None] | None = None,
    ) -> dist.Work | None:
        """Hand the started collective to FSDP, or wait for it; ``then`` runs once it is done."""
        assert work is not None  # it is with async_op
        label = f"{self.module or '(root)'} {kind}"
        later = _Later(work, traffic, plain, then, self.state.timeline, label, self._called_ns)
        if async_op:
            return later
        later.wait()
        return None


class Gather(_Collective, AllGather):
    """One module's all-gather."""

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
            return self.finish("parameters", work, traffic, plain, async_op)
        if recipe.word == "delta":
            return self._difference(output_tensor, input_tensor, group, traffic, plain, async_op)
        which = fitting(recipe, input_tensor, traffic)
        seed = self.state.next_seed()
        work = all_gather(output_tensor, input_tensor, codec=which, group=group, seed=seed, async_op=True)
        return self.finish("parameters", work, traffic, plain, async_op)

    def _difference(
        self,
        output: torch.Tensor,
        own: torch.Tensor,
        group: dist.ProcessGroup,
        traffic: Traffic,
        plain: int,
        async_op: bool,
    ) -> dist.Work | None:
        """Everybody's reference, which all hold alike, moves by the decoded difference: what one encoding loses is
        part of the next difference.
        """
        reference = self.state.references.get(self.module)
        if reference is None or reference.numel() != output.numel() or reference.dtype != output.dtype:
            return self._whole(output, own, group, traffic, plain, async_op)
        if torch._C._current_graph_task_id() != -1:
            # In backward nothing has changed since forward, so no rank has anything to tell.
            output.copy_(reference)
            traffic.save(plain)
            return _Done() if async_op else None
        which = fitting(self.state.parameters, own, traffic)
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
            reference.add_(differences)
            output.copy_(reference)

        return self.finish("parameters", work, traffic, plain, async_op, then)

    def _whole(
        self,
        output: torch.Tensor,
        own: torch.Tensor,
        group: dist.ProcessGroup,
        traffic: Traffic,
        plain: int,
        async_op: bool,
    ) -> dist.Work | None:
        """The first time, all of it, uncompressed; after a checkpoint what peers held then, and a difference to it."""
        saved = self.state.take_own_reference(self.module)
        if saved is not None:
            reference = output.new_empty(output.shape)
            all_gather(reference, saved.to(output.device, output.dtype), group=group)
            self.state.references[self.module] = reference
            return self._difference(output, own, group, traffic, plain, async_op)
        work = all_gather(output, own, group=group, async_op=True)

        def then() -> None:
            self.state.references[self.module] = output.clone()

        return self.finish("parameters", work, traffic, plain, async_op, then)


class Scatter(_Collective, ReduceScatter):
    """One module's reduce-scatter."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        self._called_ns = time.monotonic_ns()
        recipe = self.state.gradients
        traffic = self.state.traffic(self.module, "gradients", recipe)
        which = fitting(recipe, input_tensor, traffic)
        lossy = not all(each.lossless(input_tensor.dtype) for each in recipe.codecs()) and not traffic.why
        residual = self.state.take_residual(self.module, input_tensor) if lossy else None
        work = reduce_scatter(
            output_tensor,
            input_tensor,
            op_name(op),
            codec=which,
            group=group,
            seed=self.state.next_seed(),
            residual=residual,
            async_op=True,
        )
        sent = input_tensor.numel() * input_tensor.element_size() * (group.size() - 1) // group.size()
        return self.finish(
            "gradients",
            work,
            traffic,
            sent,
            async_op,
            lambda: self.state.give_residual(self.module, residual),
        )


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
