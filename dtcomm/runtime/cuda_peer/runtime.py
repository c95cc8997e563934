"""Collectives inside a host as one kernel, or one a step, over memory that all its GPUs reach, queued on the current
stream.

What has no fused kernel goes over the group's own backend, and the report counts why; with DTCOMM_RUNTIME=peer it is an
error instead. The host waits for nothing: a rank that did not come stands in a word of device memory, which is copied
to the host behind each call and looked at by the next one, or by ``wait``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from dtcomm.device.streams import Streams
from dtcomm.errors import DtcommError, PeerLost
from dtcomm.kernels.epilogue import EpilogueTask
from dtcomm.kernels.local_tasks import LocalTask
from dtcomm.runtime import flight_recorder
from dtcomm.runtime.cuda_peer.launch import After, FusedPlan, FusedRanks, NoKernel
from dtcomm.runtime.flight_recorder import FlightEntry
from dtcomm.runtime.torchdist.stream_runtime_base import Streamed
from dtcomm.runtime.types import NO_HOOKS, TWO_SHOT_SYMMETRIC, Buffers, OpHooks, OpSpec, Runtime
from dtcomm.runtime.work import StreamWork, Work
from dtcomm.schedule import Schedule


class Below(NamedTuple):
    """The plan of a call that the group's backend serves, and why."""

    plan: Any
    reason: str


class PeerRuntime(Streamed):
    """One rank of ``fused``; ``below`` serves what has no fused kernel, unless the kernels are ``forced``.

    ``names[rank]`` is how errors call a rank; ``memory`` says what kind the ranks reach, and ``held`` keeps it.
    """

    name = "peer"

    def __init__(
        self,
        fused: FusedRanks,
        streams: Streams,
        below: Runtime[Any],
        names: Sequence[str],
        memory: str,
        held: Any = None,
        forced: bool = False,
    ) -> None:
        super().__init__(streams)
        self._fused = fused
        self._below = below
        self._names = list(names)
        self._memory = memory
        self._held = held
        self._forced = forced
        self._missing = streams.staging(4).view(torch.int32).zero_()
        self._word = self._missing.numpy()  # the same memory, read as it is
        self._looked: Any = None
        self._reasons: Counter[str] = Counter()

    def prepare(self, shape: OpSpec, schedule: Schedule) -> FusedPlan | Below:
        """A plan for calls of this shape. ValueError where only fused kernels are allowed and there is none."""
        try:
            return self._fused.prepare(shape, schedule)
        except NoKernel as reason:
            if shape.algorithm == TWO_SHOT_SYMMETRIC:  # no schedule expresses it
                raise
            if self._forced:
                raise ValueError(f"DTCOMM_RUNTIME=peer: {reason}") from None
            return Below(self._below.prepare(shape, schedule), str(reason))

    def run(
        self, plan: FusedPlan | Below, buffers: Sequence[Buffers], seed: int, hooks: OpHooks | None = None
    ) -> int:
        """Queue on the current stream; returns the bytes sent."""
        with self._lock:
            if isinstance(plan, Below):
                self._require_usable()
                self._reasons[plan.reason] += 1
                return self._below.run(plan.plan, buffers, seed, hooks)
            self._queue(plan, buffers, hooks or NO_HOOKS)
        return plan.sent_bytes

    def submit(
        self,
        plan: FusedPlan | Below,
        buffers: Sequence[Buffers],
        outputs: Sequence[torch.Tensor],
        seed: int,
        hooks: OpHooks | None = None,
    ) -> Work:
        """Queue beside the current stream, after what that was given so far."""
        with self._lock:
            if isinstance(plan, Below):
                self._require_usable()
                self._reasons[plan.reason] += 1
                return self._below.submit(plan.plan, buffers, outputs, seed, hooks)
            done = self._beside(
                buffers, hooks or NO_HOOKS, lambda: self._queue(plan, buffers, hooks or NO_HOOKS)
            )
        return StreamWork(self._streams, done, outputs, plan.sent_bytes, self.check)

    def set_timeout(self, seconds: float) -> None:
        """How long kernels of the plans from now on wait for the other ranks."""
        self._fused.set_budget(seconds)
        self._below.set_timeout(seconds)

    def close(self) -> None:
        """Give the memory back, and leave the group."""
        self._held = None
        self._failure = self._failure or DtcommError("group: its communicator has been released")
        self._below.close()

    def check(self) -> None:
        """PeerLost where the kernels are known to have missed a rank. The device is not waited for."""
        missing = int(self._word[0])
        if missing and not isinstance(self._failure, PeerLost):
            self._failure = PeerLost(
                f"{self._names[missing - 1]} did not come to a fused collective within its timeout"
            )
            flight_recorder.failed(self._failure)
        self._require_usable()

    def info(self) -> dict[str, Any]:
        """For reports. ``elsewhere`` counts the calls that had no fused kernel, by the reason."""
        below = self._below.info()
        return {
            "runtime": self.name,
            "transport": f"fused kernels over {self._memory} of {self._streams.device}",
            "kernels": "fused",
            "operations": self._operations + below["operations"],
            "wire_bytes": self._wire_bytes + below["wire_bytes"],
            "elsewhere": dict(self._reasons),
            "elsewhere transport": below["transport"],
        }

    @property
    def failure(self) -> str:
        """Why calls raise; empty where they do not."""
        return str(self._failure) if self._failure is not None else self._below.failure

    def flight_entries(self) -> list[FlightEntry]:
        """The last operations of both kinds, oldest first."""
        return sorted(
            [*super().flight_entries(), *self._below.flight_entries()], key=lambda each: each.issued_ns
        )

    def _queue(self, plan: FusedPlan, buffers: Sequence[Buffers], hooks: OpHooks) -> Any:
        self.check()
        taken, left = finishing(plan, buffers, hooks.after)

        def begin() -> None:
            for step in hooks.before:
                step()
            self._fused.launch(plan, [buffers], taken)
            for step in left:
                step()

        done = self._enter(
            plan,
            begin,
            lambda error: DtcommError(f"a fused collective could not be started: {error}"),
        )
        self._look(done)
        return done

    def _look(self, done: Any) -> None:
        """Have the word of who is missing copied, one copy at a time; a graph does not look, later calls do."""
        streams = self._streams
        if streams.capturing():
            return
        if self._looked is None or streams.query(self._looked):
            with streams.on(streams.side_stream()):
                streams.wait(done)
                self._missing.copy_(self._fused.pads[0], non_blocking=True)
                self._looked = streams.record()


def finishing(
    plan: FusedPlan, buffers: Sequence[Buffers], steps: Sequence[LocalTask]
) -> tuple[list[After], list[LocalTask]]:
    """What the kernel of a sum adds to it, and the steps that are left."""
    if not (plan.finishes and len(buffers) == 1 and steps and isinstance(steps[0], EpilogueTask)):
        return [], list(steps)
    first, output = steps[0], buffers[0].output
    if output is None or first.out.data_ptr() != output.data_ptr() or first.out.numel() != output.numel():
        return [], list(steps)
    if first.bias is None and first.residual is None:
        return [], list(steps)
    norm = first.norm()
    return [After(first.bias, first.residual)], [*([norm] if norm else []), *steps[1:]]
