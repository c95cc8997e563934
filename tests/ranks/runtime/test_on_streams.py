"""The torch.distributed runtime of devices, on CPU tensors: the engine's bits, and the order of streams."""

import functools
import threading
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

import dtcomm.collectives as C
from dtcomm import algorithms
from dtcomm.codecs import codec
from dtcomm.codecs import spec as registry
from dtcomm.errors import CollectiveMismatch
from dtcomm.launch.ranks import run_ranks
from dtcomm.runtime.bootstrap import cuda
from dtcomm.runtime.communicator import Communicator, _new, group_entry
from dtcomm.runtime.process_groups import require_group
from dtcomm.runtime.torchdist.runtime import TorchDistRuntime
from dtcomm.runtime.torchdist.transport import GlooTransport, GroupTransport, NcclTransport
from dtcomm.runtime.types import Buffers, OpSpec, TensorSpec
from tests.support import python_codecs
from tests.support.op_recorder import not_recording, recording
from tests.support.stream_checker import HOST, RecordedStreams
from tests.support.thread_transport import ThreadTransport
from tests.unit.kernels.inputs import floats
from tests.unit.runtime.every_collective import calls
from tests.unit.runtime.thread_messages import Port, Rendezvous

SHARED = "randk:positions=shared,ratio=0.1"


def communicator_of_fake_device(backend: str) -> Communicator:
    """Return the default group's communicator for a fake device, the CPU, as if the group had ``backend`` for it."""
    cuda.backend_of = lambda group, device: backend.removeprefix("unknown ")
    cuda.CudaBootstrap._nccl_transport = _unknown if backend.startswith("unknown") else _over_gloo
    group = require_group(None)
    entry = group_entry(group)
    name = f"as_on_a_device/{backend}"
    communicator = _new(group, entry, name, device=torch.device("cpu"))
    communicator.connect()
    entry.communicator = communicator
    assert isinstance(communicator.runtime, TorchDistRuntime)
    communicator.runtime._message_bytes = 16 * 1024
    return communicator


def _over_gloo(self: cuda.CudaBootstrap) -> NcclTransport:
    return NcclTransport(self._private_backend("gloo"), "nccl", torch.device("cpu"))


def _unknown(self: cuda.CudaBootstrap) -> GroupTransport:
    """As if the group had an engine that is not torch's: public calls on the group, which is one of Gloo."""
    return GroupTransport(self._group, "nccl", self.ranks)


def compare_runtimes(rank: int, world_size: int) -> dict[str, object]:
    python_codecs.register()
    few = {"specs": ("none", "int8:round=stochastic", "scaled"), "sizes": (1, 20_001)}
    native = calls(rank, world_size, **few)
    summed = [
        multi_stage_sum("exact", rank),
        multi_stage_sum("exact:bits=16", rank),
        multi_stage_sum(SHARED, rank),
    ]
    C.release()
    report: dict[str, object] = {"results": len(native), "exact there": summed}
    for backend in ("nccl", "gloo", "unknown nccl"):
        communicator = communicator_of_fake_device(backend)
        results = calls(rank, world_size, timed=backend == "gloo", **few)
        if backend == "nccl":
            splits = [[rank + 1] * world_size, [peer + 1 for peer in range(world_size)]]
            out = torch.zeros(sum(splits[1]))
            C.all_to_all(out, torch.full((sum(splits[0]),), float(rank)), splits[1], splits[0])
            report["exchanged"] = out.tolist()
            report["exact"] = [
                multi_stage_sum("exact", rank),
                multi_stage_sum("exact:bits=16", rank),
                multi_stage_sum(SHARED, rank),
            ]
            report["checksum"] = error_of(ValueError, lambda: C.all_reduce(torch.ones(9), checksum=True))
        report[backend] = [i for i, (a, b) in enumerate(zip(native, results)) if not torch.equal(a, b)]
        report[backend + " info"] = communicator.info()
        C.release()
    return report


def multi_stage_sum(spec: str, rank: int) -> list[float]:
    """Return a multi-stage sum and its residual."""
    x, residual = floats("normal", 9000, seed=rank), floats("normal", 9000, seed=9)
    C.all_reduce(x, "avg", codec=spec, seed=3, residual=residual)
    if spec.startswith("exact"):
        C.all_reduce(x, codec=spec, audit=True)
    return [*x.tolist(), *residual.tolist()]


def error_of(kind: type[Exception], call: Callable[[], object]) -> str:
    try:
        call()
    except kind as error:
        return str(error)
    return "not refused"


def test_bits_equal_those_of_the_engine() -> None:
    for report in run_ranks(compare_runtimes, 3, env={"DTCOMM_PIECE_KIB": "16"}):
        assert report["nccl"] == report["gloo"] == report["unknown nccl"] == [] and report["results"] > 90
        assert report["exchanged"] == [0.0, 1.0, 1.0, 2.0, 2.0, 2.0]
        assert report["exact"] == report["exact there"]
        assert "expected False" in report["checksum"]
        assert "an engine that dtcomm does not know" in report["unknown nccl info"]["transport"]
        for backend, transport in (("nccl", "queued on streams"), ("gloo", "through the host's memory")):
            info = report[backend + " info"]
            assert transport in info["transport"] and info["wire_bytes"] > 3e5
            assert info["reason"].startswith(
                f"the group has {backend} for cpu; fused kernels have not run between GPUs yet"
            )


def reduce_unequal_sizes(rank: int, world_size: int) -> list[str]:
    communicator_of_fake_device("nccl")
    x = torch.ones(1000 + rank)
    C.all_reduce(torch.ones(10))
    first = error_of(CollectiveMismatch, lambda: C.all_reduce(x))
    return [first, error_of(CollectiveMismatch, lambda: C.all_reduce(torch.ones(10)))]


def test_check_names_the_ranks_and_their_calls() -> None:
    for first, second in run_ranks(reduce_unequal_sizes, 2, env={"DTCOMM_CHECK": "1"}):
        assert first == second and "1000 float32" in first and "1001 float32" in first and "rank 1" in first


class CheckedRanks:
    """Ranks as threads, each with checked streams; ``leave_out`` is the synchronization that every rank leaves out."""

    def __init__(self, ranks: int, leave_out: str = "", piece_bytes: int = 1024) -> None:
        self.fabric = Rendezvous()
        self.streams = [RecordedStreams(leave_out) for _ in range(ranks)]
        self.runtimes = [
            TorchDistRuntime(
                ThreadTransport(streams, rank, functools.partial(self.post, rank), leave_out),
                streams,
                rank,
                piece_bytes,
            )
            for rank, streams in enumerate(self.streams)
        ]

    def post(self, rank: int, sends: list, receives: list) -> None:
        port = Port(self.fabric, rank)
        handles = [port.receive(into, peer, 0) for into, peer in receives]
        handles += [port.send(tensor, peer, 0) for tensor, peer in sends]
        for handle in handles:
            port.wait(handle, rank, "exchanging")

    def run(self, work: Callable[[int, TorchDistRuntime, RecordedStreams], None]) -> list[str]:
        """Run ``work`` on all ranks; return their faults."""
        failures: list[BaseException] = []

        def run_rank(rank: int) -> None:
            try:
                with recording(self.streams[rank]):
                    work(rank, self.runtimes[rank], self.streams[rank])
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=run_rank, args=(rank,)) for rank in range(len(self.streams))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert not failures, failures[0]
        return [fault for streams in self.streams for fault in streams.faults]


class ThreadsGroup:
    """A stand-in for a torch group: messages between threads, in host memory."""

    def __init__(self, port: Port, ranks: int, streams: RecordedStreams) -> None:
        self.port, self.ranks, self.streams = port, ranks, streams

    def rank(self) -> int:
        return self.port.rank

    def size(self) -> int:
        return self.ranks

    def send(self, tensors, peer: int, tag: int):
        return self.start(self.port.send, tensors[0], False, peer, tag)

    def recv(self, tensors, peer: int, tag: int):
        return self.start(self.port.receive, tensors[0], True, peer, tag)

    def start(self, verb, tensor, write: bool, peer: int, tag: int):
        if not write:
            self.streams.access(tensor, False, HOST)
        with not_recording():
            arrived = verb(tensor, peer, tag)

        def wait(timeout) -> None:
            assert arrived.wait(20)
            if write:
                self.streams.access(tensor, True, HOST)

        return SimpleNamespace(wait=wait)


class CheckedRanksOverGloo(CheckedRanks):
    """Ranks as threads over Gloo's transport, with messages through host memory."""

    def __init__(self, ranks: int, leave_out: str = "") -> None:
        self.fabric = Rendezvous()
        self.streams = [RecordedStreams(leave_out, host_may_wait=True) for _ in range(ranks)]
        self.runtimes = [
            TorchDistRuntime(
                GlooTransport(
                    ThreadsGroup(Port(self.fabric, rank), ranks, streams),
                    [f"rank {peer}" for peer in range(ranks)],
                    20.0,
                    object(),
                    streams,
                ),
                streams,
                rank,
            )
            for rank, streams in enumerate(self.streams)
        ]


def overlapping_calls(name: str, spec: str, residual: bool = True) -> Callable[..., None]:
    """Return work for a rank: two calls at once whose results the caller's stream uses, then calls on that stream."""

    def work(rank: int, runtime: TorchDistRuntime, streams: RecordedStreams) -> None:
        ranks = 3
        with not_recording():
            xs = [floats("normal", 5000, seed=rank + 7 * i) for i in range(3)]
            losses = [torch.zeros(5000) for _ in xs]
            streams.own(*xs, *losses)
        shape = OpSpec("all_reduce", "avg", (TensorSpec(5000, torch.float32, codec(spec)),), name)
        plan = runtime.make_plan(shape, algorithms.build(name, "all_reduce", ranks))
        works = []
        for x, loss in zip(xs[:2], losses):
            x.mul_(2.0)
            works.append(runtime.submit(plan, [Buffers(x, x, loss if residual else None)], [x], 1))
        works[0].get_future().wait()
        for x, handle in zip(xs, works):
            handle.wait()
            x.add_(1.0)
        runtime.run(plan, [Buffers(xs[2], xs[2], losses[2] if residual else None)], 1)
        xs[2].add_(1.0)
        runtime.run(plan, [Buffers(xs[0], xs[0], losses[0] if residual else None)], 1)

    return work


@pytest.mark.parametrize("name", algorithms.available("all_reduce"))
def test_events_order_all_uses_of_memory(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "REGISTERED", {})
    python_codecs.register()
    for spec in ("int8", "none", "python_int8", "scaled"):
        assert CheckedRanks(3).run(overlapping_calls(name, spec)) == []


@pytest.mark.parametrize(
    ("leave_out", "fault"),
    [
        ("wait", "has not waited"),
        ("record_stream", "without record_stream"),
        ("exchange", "has not waited"),
        ("follow", "has not waited"),
    ],
)
def test_missing_synchronization_is_detected(leave_out: str, fault: str) -> None:
    assert any(
        fault in text for text in CheckedRanks(3, leave_out).run(overlapping_calls("two_shot", "int8"))
    )


@pytest.mark.parametrize("name", ["two_shot", "ring"])
def test_events_order_messages_through_the_host(name: str) -> None:
    checked_ranks = CheckedRanksOverGloo(3)
    assert checked_ranks.run(overlapping_calls(name, "int8")) == []
    for leave_out, fault in (
        ("wait", "has not waited"),
        ("record_stream", "without record_stream"),
        ("synchronize", "the host reads"),
    ):
        assert any(
            fault in text for text in CheckedRanksOverGloo(3, leave_out).run(overlapping_calls(name, "int8"))
        )


def test_wait_of_the_host_is_detected() -> None:
    def work(rank: int, runtime: TorchDistRuntime, streams: RecordedStreams) -> None:
        x = torch.ones(3)
        assert x.sum().item() == 3

    assert any("the host waits" in fault for fault in CheckedRanks(1).run(work))
