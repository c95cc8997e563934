"""The compressed collectives that FSDP2 modules use instead of torch's: all-gather, reduce-scatter and all-reduce.

`dtcomm.fsdp.compress` attaches one `CompressedAllGather` and one `CompressedReduceScatter` to every module, and a
`ReplicaAllReduce` if the model has replicas. `GradientReduction` holds what all reductions of gradients have in common;
the FSDP1 hook and `ShardedOptimizer` use it too.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from dtcomm import torch_compat
from dtcomm.codecs import Codec
from dtcomm.collectives import all_gather, all_reduce, reduce_scatter
from dtcomm.compress.measurements import ErrorSample, Reading
from dtcomm.compress.traffic import Traffic
from dtcomm.fsdp.guard import parameters_name
from dtcomm.fsdp.options import CompressionSpec
from dtcomm.fsdp.state import FSDPState, codec_spec_for
from dtcomm.profiling import MessageRecord, Timeline
from dtcomm.profiling.timeline import profiler_range
from dtcomm.profiling.trace import WaitInterval
from dtcomm.streams import record_streams
from dtcomm.torch_compat import AllGather, Comm, DDPMeshInfo, ReduceScatter
from dtcomm.work import COMPLETED, TorchWork, Work

MAX_PENDING = 1  # reduce-scatters of a backward pass, besides the newest one
_OPS = {dist.ReduceOp.SUM: "sum", dist.ReduceOp.AVG: "avg"}


class GradientReduction:
    """One reduction of a gradient: its codec and residual, and the measurement of its error.

    Args:
        kind: The name of the collective in the report. Default: ``"gradients"``.
        guarded: The guard may change the codec of this collective, and its errors are sampled. This must be True for
            only one collective per module. Default: True.

    Attributes:
        options: The keyword arguments of the collective, besides its tensors and group.
        traffic: The counters of the report.
    """

    def __init__(
        self,
        state: FSDPState,
        module: str,
        gradient: torch.Tensor,
        kind: str = "gradients",
        guarded: bool = True,
    ) -> None:
        state.note_reduction()
        self._state = state
        self._key = module if kind == "gradients" else f"{module}, {kind}"
        spec = state.spec(module, state.gradients)
        self.traffic = state.traffic(module, kind, spec)
        if guarded:
            spec = state.guard.current_spec(module, spec)
        shard_numel = gradient.numel() // state.num_shards
        codec_spec = codec_spec_for(spec, gradient.dtype, self.traffic, shard_numel, state.num_shards)
        state.note_choice(module, self.traffic)
        lossy = not self.traffic.reason and not spec.lossless(gradient.dtype)
        self._stored_residual = state.take_residual(self._key, gradient) if lossy else None
        self._residual = self._stored_residual
        self._sample: ErrorSample | None = None
        if lossy and guarded and state.guard.sampling:
            self._take_sample(module, spec, gradient)
        self._module, self._spec = module, spec
        self._sketched: Reading | None = None
        if lossy and guarded:
            self._sketched = state.guard.sketch_gradient(module, spec, gradient, state.num_shards)
        self.options: dict[str, Any] = {
            "codec": codec_spec,
            "seed": state.next_seed(),
            "residual": self._residual,
            "async_op": True,
        }

    def _take_sample(self, module: str, spec: CompressionSpec, gradient: torch.Tensor) -> None:
        if self._residual is None:  # the encoding writes its error into the residual
            self._residual = torch.zeros(gradient.numel(), dtype=torch.float32, device=gradient.device)
        self._sample = self._state.guard.take_sample(module, spec, gradient, self._residual)

    def finish(self, mean: torch.Tensor, *, is_shard: bool = True, divisor: int = 1) -> None:
        """Record the error and store the residual, after the collective has completed; on any thread.

        ``mean`` is the reduced gradient, or this rank's shard of it, times ``divisor``.
        """
        state = self._state
        if self._sketched is not None:
            shard = state.shard_index if is_shard else None
            gradient = self._sketched._replace(scale=divisor)
            state.guard.compare_mean(gradient, self._module, self._spec, mean, state.num_shards, shard)
        if self._sample is not None and self._residual is not None:
            self.traffic.relative_error = self._state.guard.record_error(self._sample, self._residual)
        self._state.put_residual(self._key, self._stored_residual)


class _CountedCollective:
    """A collective of one module, counted in the report and recorded in the timeline."""

    def __init__(self, state: FSDPState, module: str) -> None:
        self.state, self.module = state, module
        self._called_ns = 0  # of the most recent call; FSDP never makes two at once

    def pending(
        self,
        kind: str,
        work: Work | None,
        traffic: Traffic,
        plain_bytes: int,
        on_completion: Callable[[], None] | None = None,
    ) -> dist.Work:
        """Return the handle that FSDP waits for; ``on_completion`` runs in its first wait."""
        assert work is not None  # async_op was True
        label = f"{self.module or '(root)'} {kind}"
        return PendingCollective(
            work, traffic, plain_bytes, on_completion, self.state.timeline, label, self._called_ns
        )


class _FsdpCollective(_CountedCollective, Comm):
    """A collective with the allocator that FSDP2 asks for."""

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        return self.state.buffers.take([int(extent) for extent in size], dtype, device)


class CompressedAllGather(_FsdpCollective, AllGather):
    """The all-gather of one module's parameters.

    It returns a pending handle even if ``async_op`` is False. FSDP waits for any handle before it uses the parameters,
    so a prefetched all-gather overlaps with the computation of the module before, on CPUs too.
    """

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        self._called_ns = time.monotonic_ns()
        spec = self.state.spec(self.module, self.state.parameters)
        traffic = self.state.traffic(self.module, "parameters", spec)
        plain_bytes = input_tensor.numel() * input_tensor.element_size() * (group.size() - 1)
        if group.size() != self.state.num_shards:
            # reshard_after_forward=n keeps decoded parameters inside the host. Encoding them again would change them.
            work = all_gather(output_tensor, input_tensor, group=group, async_op=True)
            traffic = self.state.traffic(self.module, "kept copies", spec)
            traffic.codec = "none"
            traffic.reason = "decoded parameters, gathered again from this host's ranks"
            return self.pending("parameters", work, traffic, plain_bytes)
        if spec.prefix == "delta":
            return self._gather_differences(output_tensor, input_tensor, group, traffic, plain_bytes)
        spec = self.state.guard.current_spec(parameters_name(self.module), spec)
        codec_spec = codec_spec_for(spec, input_tensor.dtype, traffic, input_tensor.numel(), group.size())
        self.state.note_choice(self.module, traffic)
        # FSDP's input is a part of its output, which the gather overwrites with decoded values.
        sample = self._take_sample(spec, traffic, input_tensor, input_tensor)
        sent = None if sample is None else input_tensor.to(torch.float32, copy=True)
        work = all_gather(output_tensor, input_tensor, async_op=True, **self._options(codec_spec, group))

        def record_error() -> None:
            if sample is not None and sent is not None:
                self._record_error(sample, sent, output_tensor, group, traffic)

        return self.pending("parameters", work, traffic, plain_bytes, record_error)

    def _options(self, codec: str | Codec, group: dist.ProcessGroup) -> dict[str, Any]:
        return {
            "codec": codec,
            "algorithm": self.state.algorithm,
            "group": group,
            "seed": self.state.next_seed(),
        }

    def _take_sample(
        self, spec: CompressionSpec, traffic: Traffic, shard: torch.Tensor, sent: torch.Tensor
    ) -> ErrorSample | None:
        """Return a sample of what is about to be encoded, if one is due and the codec is lossy."""
        if traffic.reason or spec.lossless(shard.dtype):
            return None
        return self.state.guard.take_parameter_sample(self.module, spec, shard, sent)

    def _record_error(
        self,
        sample: ErrorSample,
        sent: torch.Tensor,
        decoded: torch.Tensor,
        group: dist.ProcessGroup,
        traffic: Traffic,
    ) -> None:
        """Record the error of this rank's own shard: every rank, its owner included, gets the decoded values."""
        # FSDP waits on another stream than it gathers on.
        record_streams(sent, decoded, sample.encoder_input, torch.as_tensor(sample.gradient_norm))
        lost = sent.float() - decoded.view(group.size(), -1)[group.rank()].float()
        traffic.relative_error = self.state.guard.record_parameter_error(sample, lost)

    def _gather_differences(
        self,
        output: torch.Tensor,
        shard: torch.Tensor,
        group: dist.ProcessGroup,
        traffic: Traffic,
        plain_bytes: int,
    ) -> dist.Work | None:
        """Add the decoded differences to the reference, which is the same on all ranks.

        The error of one encoding is part of the next difference.
        """
        reference = self.state.get_reference(self.module)
        if reference is None or reference.numel() != output.numel() or reference.dtype != output.dtype:
            return self._gather_values(output, shard, group, traffic, plain_bytes)
        if torch_compat.backward_pass() != -1:
            # In the backward pass the parameters are those of the forward pass: there is nothing to send.
            output.copy_(reference)
            traffic.save(plain_bytes)
            return TorchWork(COMPLETED, ())
        spec = self.state.guard.current_spec(parameters_name(self.module), self.state.parameters)
        codec_spec = codec_spec_for(spec, shard.dtype, traffic, shard.numel(), group.size())
        self.state.note_choice(self.module, traffic)
        shard_of_reference = reference.view(group.size(), -1)[group.rank()]
        differences = self.state.buffers.take(output.shape, output.dtype, output.device)
        difference = shard - shard_of_reference
        sample = self._take_sample(spec, traffic, shard, difference)
        work = all_gather(differences, difference, async_op=True, **self._options(codec_spec, group))

        def add_differences() -> None:
            record_streams(differences, reference)  # FSDP waits on another stream than it gathers on
            if sample is not None:
                self._record_error(sample, difference, differences, group, traffic)
            reference.add_(differences)
            output.copy_(reference)
            self.state.put_reference(self.module, reference)

        return self.pending("parameters", work, traffic, plain_bytes, add_differences)

    def _gather_values(
        self,
        output: torch.Tensor,
        shard: torch.Tensor,
        group: dist.ProcessGroup,
        traffic: Traffic,
        plain_bytes: int,
    ) -> dist.Work | None:
        """Make the reference: from uncompressed values, or, after a checkpoint, from its saved shards."""
        saved_shard = self.state.pop_saved_reference_shard(self.module)
        if saved_shard is not None:
            reference = output.new_empty(output.shape)
            all_gather(reference, saved_shard.to(output.device, output.dtype), group=group)
            self.state.put_reference(self.module, reference)
            return self._gather_differences(output, shard, group, traffic, plain_bytes)
        traffic.dtype, traffic.numel = str(output.dtype).removeprefix("torch."), output.numel()
        work = all_gather(output, shard, group=group, async_op=True)

        def copy_reference() -> None:
            self.state.put_reference(self.module, output.clone())

        return self.pending("parameters", work, traffic, plain_bytes, copy_reference)


class BackwardOverlap:
    """The reduce-scatters of a model that are in progress in the current backward pass, on CPUs.

    torch itself would wait for each one. After a reduce-scatter FSDP slices the reduced gradient into views and sets
    them as the parameters' ``grad``. It reads the values only if it has to divide, cast, accumulate or move them, or if
    the parameter has hooks. If it only slices (`result_is_only_sliced`), nothing reads the gradient before the end of
    the backward pass, so the reduce-scatter may complete later. Besides the one that has just started, `MAX_PENDING`
    may be in progress, which bounds the memory.
    """

    def __init__(self) -> None:
        self._pending: list[dist.Work] = []
        self._graph_task = -1  # identifies the backward pass

    def add(self, work: dist.Work) -> None:
        """Add one that has started. Waits for older ones beyond `MAX_PENDING`; the end of backward waits for all."""
        graph_task = torch_compat.backward_pass()
        if graph_task != self._graph_task:
            self.finish()  # a nested backward pass (checkpointing), or one after a pass that failed
            self._graph_task = graph_task
            torch_compat.after_backward(self._end_pass)
        self._pending.append(work)
        while len(self._pending) > MAX_PENDING + 1:
            self._pending.pop(0).wait()

    def _end_pass(self) -> None:
        # Where layers are roots of their own, FSDP starts the last reduce-scatters in callbacks behind this one: each
        # of them has to register another callback.
        self._graph_task = -1
        self.finish()

    def finish(self) -> None:
        """Wait for all. After an error the remaining ones are dropped, so that it is raised only once."""
        try:
            while self._pending:
                self._pending.pop(0).wait()
        except BaseException:
            self._pending.clear()
            raise


class CompressedReduceScatter(_FsdpCollective, ReduceScatter):
    """The reduce-scatter of one module's gradients; all modules of the model have ``overlap`` in common."""

    def __init__(self, state: FSDPState, name: str, module: FSDPModule, overlap: BackwardOverlap) -> None:
        super().__init__(state, name)
        self._module_ref = weakref.ref(module)
        self._overlap = overlap

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        pending = self.start(output_tensor, input_tensor, group, op)
        module = self._module_ref()
        may_overlap = module is not None and result_is_only_sliced(module, input_tensor, op_name(op))
        if may_overlap and not async_op:
            self._overlap.add(pending)
            return None
        self._overlap.finish()  # this gradient may be added to one of the pending ones
        if async_op:
            return pending
        pending.wait()
        return None

    def start(
        self, output: torch.Tensor, gradient: torch.Tensor, group: dist.ProcessGroup, op: Any
    ) -> dist.Work:
        """Start the reduce-scatter; ``output`` is complete after the handle's ``wait``."""
        self._called_ns = time.monotonic_ns()
        reduction = GradientReduction(self.state, self.module, gradient)
        options = {"algorithm": self.state.algorithm, "group": group, **reduction.options}
        work = reduce_scatter(output, gradient, op_name(op), **options)
        divisor = group.size() if op_name(op) == "sum" else 1
        finish = partial(reduction.finish, output, divisor=divisor)
        plain_bytes = gradient.numel() * gradient.element_size() * (group.size() - 1) // group.size()
        return self.pending("gradients", work, reduction.traffic, plain_bytes, finish)


def result_is_only_sliced(module: FSDPModule, gradient: torch.Tensor, op: str) -> bool:
    """Return whether FSDP only slices the reduced ``gradient``, and a backward pass is running."""
    group = torch_compat.fsdp2_parameter_group(module)
    if group is None or gradient.device.type != "cpu" or torch_compat.backward_pass() == -1:
        return False
    if (
        op != "avg"
        or torch_compat.fsdp2_all_reduce_hook(group) is not None
        or isinstance(group.mesh_info, DDPMeshInfo)
    ):
        return False
    return all(_is_only_sliced(parameter, gradient.dtype) for parameter in group.fsdp_params)


def _is_only_sliced(parameter: Any, reduced_dtype: torch.dtype) -> bool:
    sharded = parameter.sharded_param
    return (
        sharded.grad is None
        and torch_compat.sharded_gradient_dtype(parameter) in (None, reduced_dtype)
        and not parameter.offload_to_cpu
        and not torch_compat.has_accumulation_hooks(sharded)
    )


class ReplicaAllReduce(_CountedCollective):
    """The all-reduce of one module's gradient shards between replicas, after its reduce-scatter."""

    def __init__(self, state: FSDPState, module: str, group: dist.ProcessGroup) -> None:
        super().__init__(state, module)
        self.group = group

    def __call__(self, shard: torch.Tensor) -> None:
        self._called_ns = time.monotonic_ns()
        reduction = GradientReduction(self.state, self.module, shard, "replicas", guarded=False)
        work = all_reduce(shard, "avg", group=self.group, **reduction.options)
        finish = partial(reduction.finish, shard)
        self.pending("replicas", work, reduction.traffic, self.plain_bytes(shard), finish).wait()

    def reduce_uncompressed(self, shard: torch.Tensor) -> Work | None:
        """Start the all-reduce of a shard as it is."""
        return all_reduce(shard, "avg", group=self.group, async_op=True)

    def plain_bytes(self, shard: torch.Tensor) -> int:
        """Return the bytes that a rank would send uncompressed."""
        return 2 * shard.nbytes * (self.group.size() - 1) // self.group.size()


class PendingCollective(TorchWork):
    """The handle of a collective in progress, for FSDP: its first ``wait`` counts it and finishes its result.

    It is not a `TorchWork` with a callback because the timeline also shows when that ``wait`` began.
    """

    def __init__(
        self,
        work: Work,
        traffic: Traffic,
        plain_bytes: int,
        on_completion: Callable[[], None] | None,
        timeline: Timeline,
        label: str,
        ready_ns: int,
    ) -> None:
        super().__init__(work, ())
        self._traffic, self._plain_bytes = traffic, plain_bytes
        self._on_completion = on_completion
        self._timeline, self._label = timeline, label
        self._ready_ns, self._launched_ns = ready_ns, time.monotonic_ns()
        self._waited = False

    def wait(self, timeout: timedelta | None = None) -> bool:
        begin = time.monotonic_ns()
        with profiler_range(self._label):
            super().wait(timeout)
        if not self._waited:
            self._waited = True
            self._traffic.add(self._work, self._plain_bytes)
            end = time.monotonic_ns()
            complete, self._on_completion = self._on_completion, None  # it keeps tensors alive
            if complete is not None:
                complete()
            if self._timeline.on:
                self._timeline.current_step().messages.append(self._message(WaitInterval(begin, end)))
        return True

    def _message(self, waited: WaitInterval) -> MessageRecord:
        return MessageRecord(
            label=self._label,
            codec=self._traffic.codec,
            plain_bytes=self._plain_bytes,
            wire_bytes=self._work.wire_bytes,
            ready=self._ready_ns,
            launched=self._launched_ns,
            started=self._work.started_ns,
            finished=self._work.finished_ns,
            done=self._work.finished_ns,
            spans=self._work.spans(),
            waited=waited,
        )


def op_name(op: Any) -> str:
    """Return the name of FSDP's reduction operator; ValueError for a sum with a factor, which torch hides."""
    name = _OPS.get(op)
    if name is None:
        raise ValueError(
            f"fsdp: the reduce-scatter's op is {op}, whose factor cannot be read; "
            "call set_force_sum_reduction_for_comms(True) on the module, or do not set its divide factor"
        )
    return name
