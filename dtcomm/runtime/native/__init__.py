"""The runtime of the native engine: shared memory between the ranks of a host, TCP or UCX between hosts."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch

from dtcomm import _C, env
from dtcomm.codecs.base import ELEMENT_TYPES
from dtcomm.errors import DtcommError
from dtcomm.runtime import flight_recorder
from dtcomm.runtime.emulated_link import Link, links
from dtcomm.runtime.flight_recorder import STAGES, FlightEntry, PeerSnapshot
from dtcomm.runtime.native import copy_policy
from dtcomm.runtime.plans import forget_repeated
from dtcomm.runtime.types import GEOMETRY, OPS, Buffers, OpHooks, OpSpec
from dtcomm.schedule import Schedule, lower
from dtcomm.work import NativeWork, Work, completion, release_completed

if TYPE_CHECKING:  # imported when there is such a codec: most processes never need it
    from dtcomm.runtime.native.python_codecs import OrderedThread, PythonCodecOperation

# How long a rank yields before it sleeps. A core that ranks share goes to another rank at each yield, and a sleeper on
# it is not always run at once when it is woken: within 1 ms most messages arrive before it sleeps.
YIELD_US, SHARED_YIELD_US = 50.0, 1000.0
MIN_PAYLOADS = 128  # payloads of 4 KiB fill a slot: a user's own schedule may need as many


class ConnectionKeeper(Protocol):
    """Makes connections anew that have ended."""

    timeout_s: float  # how long it tries

    def close(self) -> None:
        """Stop."""


class NativeRuntime:
    """Executes operations with the native engine.

    Attributes:
        transport: How ranks reach each other: "memory", "sockets", "ucx", "memory and sockets", or "memory and ucx".
        ucx: What UCX is used, if it is: its version, and the devices that it may use.
        connections: TCP connections that carry the payloads to another rank, the most to any; 0 if there are none.
        round_trip_ms: The longest round trip between ranks that was measured when they connected; 0 inside a host.
        remote_hosts: The host of each rank that is reached over TCP.
        remember_rate: Called with such a host and the bytes per second that the connections to it have carried.
        keeper: What makes connections anew, of ranks with several; it is closed with this object.
        no_ucx: Why UCX is not used between ranks that share no memory; empty if it is, or if there are none.
        single_copy: Why receivers do not copy out of the senders' memory; empty if they do. The bootstrap sets it to
            what all ranks agree on.
        no_trials: Why the engine does not try variants of operations; empty if it does. Agreed on as well.
        codec_thread: Runs operations with codecs written in Python; None if there was none yet.
        threads: Threads with which this rank works on an operation, equal on all ranks.

    Args:
        slot_bytes: Bytes of a slot of shared memory; None: as many as ``threads`` need.
        wide_area: Whether ranks are far apart, so that the pieces in all slots are to be under way; equal on all.
    """

    name = "native"

    def __init__(
        self,
        rank: int,
        ranks: int,
        timeout_s: float,
        slot_bytes: int | None = None,
        threads: int = 1,
        *,
        wide_area: bool = False,
    ) -> None:
        self.rank = rank
        self.ranks = ranks
        self.threads = threads
        self.transport = "memory"
        self.connections = 0
        self.round_trip_ms = 0.0
        self._wide_area = wide_area
        self.ucx: Mapping[str, Any] = {}
        self.no_ucx = ""
        self.single_copy = self.no_trials = "not asked for yet"
        self.remote_hosts: Mapping[int, str] = {}
        self.remember_rate: Callable[[str, float], None] | None = None
        self.keeper: ConnectionKeeper | None = None
        self._recorded_failure = False
        self._failure: DtcommError | None = None  # of a codec written in Python; the engine knows its own
        self.codec_thread: OrderedThread | None = None
        emulated = links()
        self._link = emulated.inside
        if slot_bytes is None:
            slot_bytes = copy_policy.slot_bytes(threads)
        if self._link is not None:
            slot_bytes = max(slot_bytes, copy_policy.link_slot_bytes(self._link))
        self._slot_bytes = slot_bytes
        self.native = _C.NativeCommunicator(
            rank=rank,
            ranks=ranks,
            max_boxes=_max_payloads(ranks),
            slot_bytes=self._slot_bytes,
            timeout_s=timeout_s,
            yield_us=YIELD_US,
            inside=_link_rates(emulated.inside),
            between=_link_rates(emulated.between),
            wide_area=wide_area,
        )

    def attach(
        self,
        addresses: Sequence[Mapping[str, int]],
        names: Sequence[str],
        affinities: Sequence[Collection[int]],
        ranks_of_host: int,
        sockets: Mapping[int, Sequence[int]] | None = None,
        inside: Sequence[int] | None = None,
    ) -> None:
        """Connect to all ranks.

        OSError if the system refuses to connect to a rank; RuntimeError if a rank's memory is not what it announced.

        Args:
            addresses: ``native.address`` of every rank, what a peer needs to map its memory.
            names: How errors name each rank.
            affinities: The cores that each rank of the communicator on this host may run on.
            ranks_of_host: All ranks of this host, also those of other communicators.
            sockets: Connected sockets by rank, for ranks whose memory is not mapped; the engine owns them from now on.
            inside: The ranks of this host; None: all.
        """
        sockets = sockets or {}
        inside = range(self.ranks) if inside is None else inside
        self.native.attach(
            [
                _C.Address(
                    **address, sockets=list(sockets.get(rank, ())), other_host=rank not in inside, name=name
                )
                for rank, (address, name) in enumerate(zip(addresses, names, strict=True))
            ]
        )
        if sockets:
            self.transport = "sockets" if len(sockets) == self.ranks - 1 else "memory and sockets"
        # Ranks that share a core make progress only if they yield; polling a socket takes longer than polling memory.
        machine = os.cpu_count() or 1
        shares_cores = copy_policy.cores_per_rank(affinities, len(affinities), machine) < 1
        spins = 32 if sockets else 64 if shares_cores else 1000
        self.native.set_wait_policy(
            int(env.get("DTCOMM_SPINS")) or spins,
            float(env.get("DTCOMM_YIELD_US")) or (SHARED_YIELD_US if shares_cores else YIELD_US),
        )
        cores_per_rank = copy_policy.cores_per_rank(affinities, ranks_of_host, machine)
        self.native.set_tuning(cores_per_rank, always=env.get("DTCOMM_TRIALS") == "always")
        if self.threads > 1 and cores_per_rank < self.threads:
            _C.share_cores()
        # With two cores a rank, the progress thread runs beside the waiting one.
        self.native.waiters_help_progress = cores_per_rank < 2

    def connect_ucx(self, addresses: Sequence[bytes], ucx: Mapping[str, Any]) -> None:
        """Send payloads between ranks that share no memory through UCX; to be called after ``attach``.

        ``addresses`` are ``native.make_ucx_address`` of every rank, ``ucx`` is what ``info`` reports of UCX. The
        connections are ready when ``native.ucx_is_connected`` returns true. RuntimeError if UCX has no transport to a
        rank.
        """
        self.native.connect_ucx(addresses)
        self.transport = self.transport.replace("sockets", "ucx")
        self.ucx = ucx

    def why_no_single_copy(self) -> str:
        """Why this rank and its peers should not use single copy; empty if they may."""
        return copy_policy.why_no_single_copy(self.native, self.transport, self._link is not None)

    def why_no_trials(self) -> str:
        """Why this rank and its peers should not try variants of operations; empty if they may."""
        return copy_policy.why_no_trials(self.transport, self._link is not None)

    def prepare(self, spec: OpSpec, schedule: Schedule) -> NativeOperation | PythonCodecOperation:
        """A plan for calls of this operation."""
        if spec.in_python:
            from dtcomm.runtime.native.python_codecs import OrderedThread, PythonCodecOperation

            if self.codec_thread is None:
                self.codec_thread = OrderedThread("dtcomm-python-codecs", self.interrupted)
                forget_repeated()  # from now on native operations may have to queue behind the thread
            return PythonCodecOperation(self, self.codec_thread, spec, schedule, self.rank)
        return self.prepare_native(spec, schedule)

    def prepare_native(self, spec: OpSpec, schedule: Schedule) -> NativeOperation:
        """A plan for calls of this operation, whose codecs the engine runs."""
        shares_memory = self.transport == "memory"
        variants = copy_policy.variants(
            spec, self.ranks, not self.single_copy, not self.no_trials, self.threads
        )
        if not shares_memory and env.get("DTCOMM_PIECE_KIB") == "0":
            if self._wide_area:
                piece_bytes = copy_policy.wide_area_piece_bytes(spec, self.ranks, self._slot_bytes)
            else:
                piece_bytes = copy_policy.socket_piece_bytes(spec, self.ranks)
            variants.piece_bytes = piece_bytes
        elif self._link is not None:
            scale = self._slot_bytes // copy_policy.slot_bytes(self.threads)
            variants.piece_bytes *= scale
        # Tensors that ranks read in each other's memory would not go over an emulated link.
        uses_zero_copy = shares_memory and self._link is None
        plan = native_plan(
            spec,
            schedule,
            self.rank,
            variants,
            self._slot_bytes,
            _max_payloads(self.ranks),
            uses_zero_copy and copy_policy.can_use_zero_copy(spec, copy_policy.MIN_ZERO_COPY_BYTES),
        )
        return NativeOperation(self, plan)

    def abort(self, error: DtcommError) -> None:
        """Leave the group because of an error of this rank: peers raise PeerLost, and later calls this error."""
        if not self.failure:
            self._failure = error
        self.record_failure(error)
        self.native.close()
        self.stop_keeper()

    def interrupted(self, error: BaseException) -> None:
        """Leave the group because a wait for an operation of the thread of codecs was interrupted."""
        self.abort(DtcommError(f"rank {self.rank} was interrupted while it waited: {error!r}"))

    def call_failed(self, error: BaseException) -> None:
        """Prepare for the error of a call to be raised."""
        if isinstance(error, DtcommError):
            completion.hold_at_exit()
            self.record_failure(error)

    def record_failure(self, error: DtcommError) -> None:
        """Write the flight record once: the communicator raises the same error from then on."""
        if not self._recorded_failure:
            self._recorded_failure = True
            flight_recorder.failed(error)

    @property
    def failure(self) -> str:
        """The error that every later call raises; empty if there is none."""
        return self.native.failure if self._failure is None else str(self._failure)

    def flight_entries(self) -> list[FlightEntry]:
        """The last operations, oldest first."""
        return [
            FlightEntry(
                number=record.number,
                text=record.text,
                details=json.loads(record.call_info),
                stage=STAGES[record.stage],
                issued_ns=record.issued_ns,
                started_ns=record.started_ns,
                finished_ns=record.finished_ns,
                waiting_for=record.waiting_for,
                waited_for=record.waited_for,
            )
            for record in self.native.flight_records()
        ]

    def peer_snapshots(self) -> list[PeerSnapshot]:
        """What shared memory shows of every rank, in rank order."""
        return [PeerSnapshot(**snapshot) for snapshot in self.native.peer_snapshots()]

    def set_timeout(self, seconds: float) -> None:
        """Set how long later calls wait for the other ranks."""
        self.native.set_timeout(seconds)
        if self.keeper is not None:
            self.keeper.timeout_s = seconds

    def close(self) -> None:
        """Release all shared memory. Peers that wait for this rank raise PeerLost."""
        self.note_rates()
        self.native.close()
        release_completed()  # all of this communicator's operations have ended
        self.stop_keeper()
        if self.codec_thread is not None:
            self.codec_thread.stop()

    def note_rates(self) -> dict[str, float]:
        """Remember the rates of links that were measured, for later communicators; returns them in Gbit/s by host."""
        if not self.remote_hosts:
            return {}
        rates = self.native.measured_rates()
        found = {
            host: rates[rank]
            for rank, host in self.remote_hosts.items()
            if rank < len(rates) and rates[rank] > 0
        }
        if self.remember_rate is not None:
            for host, rate in found.items():
                self.remember_rate(host, rate)
        return {host: round(rate * 8e-9, 3) for host, rate in found.items()}

    def stop_keeper(self) -> None:
        """To be called when the engine has closed, which may need connections to send what it sends last."""
        if self.keeper is not None:
            self.keeper.close()

    def info(self) -> dict[str, Any]:
        """The transport, the kernels, how copies are made, and the counters."""
        thread = self.codec_thread
        in_python = {} if thread is None else {"python_codecs": thread.description()}
        return {
            "runtime": self.name,
            "transport": self.transport,
            **self._socket_info(),
            **self._ucx_info(),
            "kernels": _C.engine_kernels(),
            "threads": self.threads,
            **in_python,
            "memory": _shared_memory(),
            "single_copy": self.single_copy or "process_vm_readv",
            "pulled_bytes": self.native.single_copy_bytes,
            "trials": self.no_trials or env.get("DTCOMM_TRIALS"),
            "choices": self.native.size_classes(),
            "operations": self.native.operations,
            "wire_bytes": self.native.wire_bytes,
        }

    def _socket_info(self) -> dict[str, Any]:
        if not self.connections or self.ucx:
            return {}
        missing, restored = self.native.restoring_counts()
        return {
            "connections": self.connections,
            "round_trip_ms": self.round_trip_ms,
            "missing_connections": missing,
            "restored_connections": restored,
            "measured_gbit": self.note_rates(),
        }

    def _ucx_info(self) -> dict[str, Any]:
        if self.ucx:
            return {"ucx": {**self.ucx, "lanes": self.native.ucx_lanes()}}
        return {"no_ucx": self.no_ucx} if self.no_ucx else {}


def close_all(runtimes: Iterable[object]) -> None:
    """Close the native ones of several runtimes in the time that one takes."""
    native = [runtime for runtime in runtimes if isinstance(runtime, NativeRuntime)]
    for runtime in native:
        runtime.note_rates()
    _C.NativeCommunicator.close_all([runtime.native for runtime in native])
    for runtime in native:
        runtime.stop_keeper()


class NativeOperation:
    """An operation that the engine executes: its plan, and the runtime that made it."""

    __slots__ = ("_native", "_plan", "_runtime")

    def __init__(self, runtime: NativeRuntime, plan: _C.NativePlan) -> None:
        self._runtime = runtime
        self._native = runtime.native
        self._plan = plan

    @property
    def table_bytes(self) -> int:
        """The memory that the plan takes in the engine."""
        return self._plan.memory_bytes

    def run(self, buffers: Sequence[Buffers], seed: int, hooks: OpHooks | None = None) -> int:
        """Run to the end; returns the bytes sent."""
        thread = self._runtime.codec_thread
        if thread is not None and thread.busy:
            thread.drain()
        return self.run_now(buffers, seed, hooks)

    def run_now(self, buffers: Sequence[Buffers], seed: int, hooks: OpHooks | None = None) -> int:
        """As ``run``, without waiting for the thread of codecs in Python."""
        try:
            if hooks is not None:
                pointers = [part.pointers() for part in buffers]
                return self._native.run_all(self._plan, pointers, seed, *hooks.native())
            if len(buffers) == 1:
                return self._native.run(self._plan, *buffers[0].pointers(), seed)
            return self._native.run_all(self._plan, [part.pointers() for part in buffers], seed)
        except DtcommError as error:
            self._runtime.call_failed(error)
            raise

    def native(self) -> tuple[_C.NativeCommunicator, _C.NativePlan, Callable[[DtcommError], None]] | None:
        """Return what runs the operation, and what to call with its error.

        None if its calls may have to queue behind the thread of codecs in Python.
        """
        if self._runtime.codec_thread is not None:
            return None
        return self._native, self._plan, self._runtime.call_failed

    def submit(
        self,
        buffers: Sequence[Buffers],
        outputs: Sequence[torch.Tensor],
        seed: int,
        hooks: OpHooks | None = None,
    ) -> Work:
        """Queue the operation behind earlier ones."""
        thread = self._runtime.codec_thread
        if thread is not None and thread.busy:
            return thread.start_behind(outputs, lambda: self._submit_now(buffers, outputs, seed, hooks))
        return self._submit_now(buffers, outputs, seed, hooks)

    def _submit_now(
        self,
        buffers: Sequence[Buffers],
        outputs: Sequence[torch.Tensor],
        seed: int,
        hooks: OpHooks | None,
    ) -> Work:
        native_hooks = () if hooks is None else hooks.native()
        record_failure = self._runtime.record_failure
        try:
            work = self._native.submit(self._plan, [part.pointers() for part in buffers], seed, *native_hooks)
        except DtcommError as error:
            record_failure(error)
            raise
        return NativeWork(work, (buffers, hooks), outputs, record_failure)


def native_plan(
    spec: OpSpec,
    schedule: Schedule,
    rank: int,
    variants: _C.Variants,
    slot_bytes: int,
    max_payloads: int = 2**16,
    uses_zero_copy: bool | None = None,
) -> _C.NativePlan:
    """The engine's plan: the schedule lowered for ``rank`` and laid out over the tensors of ``spec``.

    ``uses_zero_copy`` None means wherever the operation can.
    """
    plan = _C.PlanSpec(
        program=_native_program(schedule, rank),
        geometry=GEOMETRY[spec.collective],
        op=OPS[spec.op],
        average=spec.op == "avg",
        segments=[
            (part.numel, ELEMENT_TYPES[part.dtype], part.codec.native(), part.at(1).native())
            for part in spec.parts
        ],
        text=str(spec),
        variants=variants,
        slot_bytes=slot_bytes,
        zero_copy=copy_policy.can_use_zero_copy(spec) if uses_zero_copy is None else uses_zero_copy,
        checksum=spec.checksum,
        max_boxes=max_payloads,
        splits=list(spec.splits),
        call_info=json.dumps(spec.details()),
    )
    if variants.tries_alternative and spec.alternative is not None:
        name, other_schedule = spec.alternative
        plan.alternative = _native_program(other_schedule, rank)
        plan.alternative_zero_copy = copy_policy.can_use_zero_copy(spec._replace(algorithm=name))
    return _C.NativePlan(plan)


def _native_program(schedule: Schedule, rank: int) -> _C.NativeProgram:
    program = lower(schedule, rank)
    return _C.NativeProgram(
        rank, schedule.ranks, program.chunks, list(program.payload_counts), program.flat()
    )


def _shared_memory() -> str:
    """Return where the engine takes memory from, as its C++ code finds it: ``memfd_create``, or what replaces it."""
    try:
        os.close(os.memfd_create("dtcomm-probe"))
    except OSError as error:
        return f"/dev/shm (memfd_create: {error.strerror})"
    return "memfd_create"


def _link_rates(link: Link | None) -> tuple[float, float, float]:
    """Microseconds of latency, nanoseconds of a byte, and nanoseconds of CPU time of a byte."""
    if link is None:
        return 0.0, 0.0, 0.0
    return link.latency_s * 1e6, link.ns_per_byte, link.cpu_ns_per_byte()


def _max_payloads(ranks: int) -> int:
    return max(MIN_PAYLOADS, 2 * ranks + 2)
