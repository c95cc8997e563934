"""The runtime of CUDA tensors on one host whose GPUs reach each other's memory: fused kernels on the current stream.

A call that has no fused kernel goes over the group's own backend, and the report counts the reasons; with
DTCOMM_RUNTIME=peer it is an error instead. The host never waits for the device: kernels record a missing rank in a word
of device memory, which is copied to the host after each call and checked by the next call or by ``wait``.
``dtcomm.runtime.bootstrap.cuda`` makes a :class:`PeerRuntime`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from dtcomm.errors import DtcommError, PeerLost
from dtcomm.kernels.epilogue import EpilogueTask
from dtcomm.kernels.local_tasks import LocalTask
from dtcomm.runtime import flight_recorder
from dtcomm.runtime.cuda_peer.launch import FusedEpilogue, FusedPlan, FusedRanks, NoFusedKernel
from dtcomm.runtime.flight_recorder import FlightEntry
from dtcomm.runtime.stream_runtime import StreamRuntime
from dtcomm.runtime.types import NO_HOOKS, TWO_SHOT_SYMMETRIC, Buffers, OpHooks, OpSpec, PreparedPlan, Runtime
from dtcomm.schedule import Schedule
from dtcomm.streams import Streams
from dtcomm.work import StreamWork, Work


class FallbackPlan(NamedTuple):
    """The plan of a call that the group's own backend serves, and the reason."""

    plan: PreparedPlan
    reason: str

    @property
    def table_bytes(self) -> int:
        """The memory that the plan itself takes."""
        return self.plan.table_bytes


class PeerRuntime(StreamRuntime[FusedPlan | FallbackPlan]):
    """Runs a rank's collectives with fused kernels, and all others with ``fallback``.

    Args:
        fused: The fused kernels, with this rank as the only local rank.
        memory: The kind of memory that the ranks reach, for reports.
        buffers: Kept until the runtime is closed, so that the memory stays mapped.
        forced: Refuse calls that have no fused kernel.
    """

    name = "peer"

    def __init__(
        self,
        fused: FusedRanks,
        streams: Streams,
        fallback: Runtime,
        names: Sequence[str],
        memory: str,
        buffers: Any = None,
        forced: bool = False,
    ) -> None:
        super().__init__(streams)
        self._fused = fused
        self._fallback = fallback
        self._names = list(names)
        self._memory = memory
        self._buffers = buffers
        self._forced = forced
        self._missing = streams.staging(4).view(torch.int32).zero_()
        self._missing_on_host = self._missing.numpy()  # the same memory, which torch need not be asked for
        self._copied: Any = None  # the event behind the last copy of the word
        self._reasons: Counter[str] = Counter()

    def make_plan(self, spec: OpSpec, schedule: Schedule) -> FusedPlan | FallbackPlan:
        """The fused kernels of the operation, or the plan of the fallback runtime.

        ValueError if there are no fused kernels, and only they are allowed.
        """
        try:
            return self._fused.prepare(spec)
        except NoFusedKernel as reason:
            if spec.algorithm == TWO_SHOT_SYMMETRIC:  # no schedule expresses it
                raise
            if self._forced:
                raise ValueError(f"DTCOMM_RUNTIME=peer: {reason}") from None
            return FallbackPlan(self._fallback.prepare(spec, schedule), str(reason))

    def run(
        self,
        plan: FusedPlan | FallbackPlan,
        buffers: Sequence[Buffers],
        seed: int,
        hooks: OpHooks | None = None,
    ) -> int:
        """Queue a call on the current stream and return the bytes it sends."""
        with self._lock:
            if isinstance(plan, FallbackPlan):
                self._require_usable()
                self._reasons[plan.reason] += 1
                return plan.plan.run(buffers, seed, hooks)
            self._queue(plan, buffers, hooks or NO_HOOKS)
        return plan.sent_bytes

    def submit(
        self,
        plan: FusedPlan | FallbackPlan,
        buffers: Sequence[Buffers],
        outputs: Sequence[torch.Tensor],
        seed: int,
        hooks: OpHooks | None = None,
    ) -> Work:
        """Queue a call on a side stream, after the work already queued on the current stream."""
        with self._lock:
            if isinstance(plan, FallbackPlan):
                self._require_usable()
                self._reasons[plan.reason] += 1
                return plan.plan.submit(buffers, outputs, seed, hooks)
            done = self._on_side_stream(
                buffers, hooks or NO_HOOKS, lambda: self._queue(plan, buffers, hooks or NO_HOOKS)
            )
        return StreamWork(self._streams, done, outputs, plan.sent_bytes, self.check)

    def set_timeout(self, seconds: float) -> None:
        """Let kernels of later plans wait for other ranks for so many seconds."""
        self._fused.set_timeout(seconds)
        self._fallback.set_timeout(seconds)

    def close(self) -> None:
        """Release the memory and the fallback runtime; later calls raise DtcommError."""
        self._buffers = None
        self._failure = self._failure or DtcommError("group: its communicator has been released")
        self._fallback.close()

    def check(self) -> None:
        """Raise PeerLost if a kernel is known to have missed a rank. Does not wait for the device."""
        missing = int(self._missing_on_host[0])
        if missing and not isinstance(self._failure, PeerLost):
            self._failure = PeerLost(
                f"{self._names[missing - 1]} did not arrive at a fused collective within the timeout"
            )
            flight_recorder.failed(self._failure)
        self._require_usable()

    def info(self) -> dict[str, Any]:
        """Facts for reports. ``elsewhere`` counts the calls that had no fused kernel, by reason."""
        fallback = self._fallback.info()
        return {
            "runtime": self.name,
            "transport": f"fused kernels over {self._memory} of {self._streams.device}",
            "kernels": "fused",
            "operations": self._operations + fallback["operations"],
            "wire_bytes": self._wire_bytes + fallback["wire_bytes"],
            "elsewhere": dict(self._reasons),
            "elsewhere transport": fallback["transport"],
        }

    @property
    def failure(self) -> str:
        """Why calls raise; empty while they do not."""
        return str(self._failure) if self._failure is not None else self._fallback.failure

    def flight_entries(self) -> list[FlightEntry]:
        """The last operations of both runtimes, oldest first."""
        return sorted(
            [*super().flight_entries(), *self._fallback.flight_entries()], key=lambda entry: entry.issued_ns
        )

    def _queue(self, plan: FusedPlan, buffers: Sequence[Buffers], hooks: OpHooks) -> Any:
        self.check()
        epilogues, remaining = split_epilogue(plan, buffers, hooks.after)

        def begin() -> None:
            for step in hooks.before:
                step()
            self._fused.launch(plan, [buffers], epilogues)
            for step in remaining:
                step()

        done = self._execute(plan, begin)
        self._copy_missing_rank(done)
        return done

    def _failure_of(self, error: BaseException) -> DtcommError:
        return DtcommError(f"a fused collective could not be started: {error}")

    def _copy_missing_rank(self, done: Any) -> None:
        """Copy the word that names a missing rank to the host, one copy at a time. A captured graph makes no copy."""
        streams = self._streams
        if streams.capturing():
            return
        if self._copied is None or streams.query(self._copied):
            with streams.on(streams.side_stream()):
                streams.wait(done)
                self._missing.copy_(self._fused.pads[0], non_blocking=True)
                self._copied = streams.record()


def split_epilogue(
    plan: FusedPlan, buffers: Sequence[Buffers], steps: Sequence[LocalTask]
) -> tuple[list[FusedEpilogue], list[LocalTask]]:
    """Split the steps after a sum into the epilogue that its kernel applies, and the remaining steps."""
    if not (plan.fuses_epilogue and len(buffers) == 1 and steps and isinstance(steps[0], EpilogueTask)):
        return [], list(steps)
    first, output = steps[0].call, buffers[0].output
    if output is None or first.out.data_ptr() != output.data_ptr() or first.out.numel() != output.numel():
        return [], list(steps)
    if not first.adds:
        return [], list(steps)
    norm = steps[0].norm()
    return [FusedEpilogue(first.bias, first.addend)], [*([norm] if norm else []), *steps[1:]]
