"""The torch.distributed runtime as on a device, with CPU tensors: the engine's bits, and a checked order of streams."""

import functools
import threading
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import dtcomm.collectives as C
from dtcomm import algorithms
from dtcomm.codecs import codec
from dtcomm.errors import CollectiveMismatch
from dtcomm.launch.ranks import run_ranks
from dtcomm.runtime import communicator_cache
from dtcomm.runtime.bootstrap import cpu, cuda
from dtcomm.runtime.communicator import Communicator
from dtcomm.runtime.process_groups import require_group
from dtcomm.runtime.torchdist.runtime import TorchDistRuntime
from dtcomm.runtime.torchdist.transport import GlooTransport
from dtcomm.runtime.types import Buffers, OpSpec, TensorSpec
from tests.support.op_recorder import not_recording, recording
from tests.support.stream_checker import HOST, RecordedStreams
from tests.support.thread_transport import ThreadTransport
from tests.unit.kernels.inputs import floats
from tests.unit.runtime.every_collective import calls
from tests.unit.runtime.thread_messages import Port, Rendezvous

SHARED = "randk:positions=shared,ratio=0.1"


def as_on_a_device(backend: str) -> Communicator:
    """The default group's communicator for tensors of a device, which is the CPU; ``backend`` is what it is told of."""
    cuda.backend_of = lambda group, device: backend
    cuda.CudaBootstrap._private_backend = _gloo
    group = require_group(None)
    entry = communicator_cache.group_entry(group)
    communicator = Communicator(group, f"as_on_a_device/{backend}", device=torch.device("cpu"))
    entry.communicator = communicator
    assert isinstance(communicator.runtime, TorchDistRuntime)
    communicator.runtime._message_bytes = 16 * 1024
    return communicator


def _gloo(self: cuda.CudaBootstrap, backend: str) -> dist.ProcessGroupGloo:
    return cpu.CpuBootstrap._private_backend(self, "gloo")


def all_runtimes(rank: int, world_size: int) -> dict[str, object]:
    few = {"specs": ("none", "int8:round=stochastic"), "sizes": (1, 20_001)}
    native = calls(rank, world_size, **few)
    summed = [ground("exact", rank), ground("exact:bits=16", rank), ground(SHARED, rank)]
    C.release()
    report: dict[str, object] = {"results": len(native), "exact there": summed}
    for backend in ("nccl", "gloo"):
        communicator = as_on_a_device(backend)
        results = calls(rank, world_size, timed=backend == "gloo", **few)
        if backend == "nccl":
            splits = [[rank + 1] * world_size, [peer + 1 for peer in range(world_size)]]
            out = torch.zeros(sum(splits[1]))
            C.all_to_all(out, torch.full((sum(splits[0]),), float(rank)), splits[1], splits[0])
            report["exchanged"] = out.tolist()
            report["exact"] = [ground("exact", rank), ground("exact:bits=16", rank), ground(SHARED, rank)]
            report["checksum"] = refused(ValueError, lambda: C.all_reduce(torch.ones(9), checksum=True))
        report[backend] = [i for i, (a, b) in enumerate(zip(native, results)) if not torch.equal(a, b)]
        report[backend + " info"] = communicator.info()
        C.release()
    return report


def ground(spec: str, rank: int) -> list[float]:
    """A multi-stage sum, with the residual that it leaves."""
    x, residual = floats("normal", 9000, seed=rank), floats("normal", 9000, seed=9)
    C.all_reduce(x, "avg", codec=spec, seed=3, residual=residual)
    if spec.startswith("exact"):
        C.all_reduce(x, codec=spec, audit=True)
    return [*x.tolist(), *residual.tolist()]


def refused(kind: type[Exception], call: Callable[[], object]) -> str:
    try:
        call()
    except kind as error:
        return str(error)
    return "not refused"


def test_same_bits_as_the_engine() -> None:
    for report in run_ranks(all_runtimes, 3, env={"DTCOMM_PIECE_KIB": "16"}):
        assert report["nccl"] == [] and report["gloo"] == [] and report["results"] > 60
        assert report["exchanged"] == [0.0, 1.0, 1.0, 2.0, 2.0, 2.0]
        assert report["exact"] == report["exact there"]
        assert "expected False" in report["checksum"]
        for backend, transport in (("nccl", "queued on streams"), ("gloo", "through the host's memory")):
            info = report[backend + " info"]
            assert transport in info["transport"] and info["wire_bytes"] > 3e5
            assert (
                info["reason"]
                == f"the group has {backend} for cpu; no fused kernels: rank 0: cpu is no CUDA device"
            )


def disagreeing(rank: int, world_size: int) -> list[str]:
    as_on_a_device("nccl")
    x = torch.ones(1000 + rank)
    C.all_reduce(torch.ones(10))
    first = refused(CollectiveMismatch, lambda: C.all_reduce(x))
    return [first, refused(CollectiveMismatch, lambda: C.all_reduce(torch.ones(10)))]


def test_check_names_who_said_what() -> None:
    for first, second in run_ranks(disagreeing, 2, env={"DTCOMM_CHECK": "1"}):
        assert first == second and "1000 float32" in first and "1001 float32" in first and "rank 1" in first


class Judged:
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
        handles += [port.send(given, peer, 0) for given, peer in sends]
        for handle in handles:
            port.wait(handle, rank, "exchanging")

    def run(self, work: Callable[[int, TorchDistRuntime, RecordedStreams], None]) -> list[str]:
        """The faults of all ranks."""
        failures: list[BaseException] = []

        def rank_of(rank: int) -> None:
            try:
                with recording(self.streams[rank]):
                    work(rank, self.runtimes[rank], self.streams[rank])
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=rank_of, args=(rank,)) for rank in range(len(self.streams))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert not failures, failures[0]
        return [fault for streams in self.streams for fault in streams.faults]


class ThreadsGroup:
    """The messages of a torch group, between threads; they read and write host memory."""

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


class JudgedMessages(Judged):
    """The same over Gloo's transport, with messages through host memory."""

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


def train(name: str, spec: str, residual: bool = True) -> Callable[..., None]:
    """Two calls at once whose results the caller's stream uses, then one on the caller's own stream."""

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
def test_every_use_of_memory_follows_the_one_before_by_an_event(name: str) -> None:
    for spec in ("int8", "none"):
        assert Judged(3).run(train(name, spec)) == []


@pytest.mark.parametrize(
    ("leave_out", "fault"),
    [
        ("wait", "has not waited"),
        ("record_stream", "without record_stream"),
        ("exchange", "has not waited"),
        ("follow", "has not waited"),
    ],
)
def test_what_is_left_out_is_noticed(leave_out: str, fault: str) -> None:
    assert any(fault in text for text in Judged(3, leave_out).run(train("two_shot", "int8")))


@pytest.mark.parametrize("name", ["two_shot", "ring"])
def test_messages_through_the_host_follow_events_too(name: str) -> None:
    judged = JudgedMessages(3)
    assert judged.run(train(name, "int8")) == []
    for leave_out, fault in (
        ("wait", "has not waited"),
        ("record_stream", "without record_stream"),
        ("synchronize", "the host reads"),
    ):
        assert any(fault in text for text in JudgedMessages(3, leave_out).run(train(name, "int8")))


def test_a_host_that_waits_is_noticed() -> None:
    def work(rank: int, runtime: TorchDistRuntime, streams: RecordedStreams) -> None:
        x = torch.ones(3)
        assert x.sum().item() == 3

    assert any("the host waits" in fault for fault in Judged(1).run(work))
