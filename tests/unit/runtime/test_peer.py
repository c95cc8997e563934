"""The peer runtime on CPU tensors. Every rank is a thread with its own runtime, and the emulator runs the launches
of all ranks as one; also the information that ranks exchange about their devices.
"""

import threading
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch

from dtcomm import _C, _emulator, algorithms
from dtcomm.codecs import codec
from dtcomm.errors import DtcommError, PeerLost
from dtcomm.runtime.bootstrap import cuda
from dtcomm.runtime.bootstrap.cuda import CudaBootstrap
from dtcomm.runtime.cuda_peer import FallbackPlan, PeerRuntime
from dtcomm.runtime.cuda_peer.launch import (
    FusedPlan,
    FusedRanks,
    PeerBufferLayout,
    layout_for,
)
from dtcomm.runtime.cuda_peer.memory import (
    PeerBuffers,
    describe_gpu,
    missing_nvlink,
    nvlinks_of,
    why_not_peers,
)
from dtcomm.runtime.types import Buffers, OpSpec, SingleRankRuntime, TensorSpec
from tests.ranks.runtime.test_on_streams import CheckedRanks
from tests.support.stream_checker import RecordedStreams
from tests.unit.kernels.inputs import floats
from tests.unit.runtime.test_fused import run_by_engine

LAYOUT = PeerBufferLayout(2, 4096)


class JoinedLauncher:
    """A launcher for every rank; their launches run as one once all ranks have made theirs."""

    def __init__(self, ranks: int, absent: int = -1) -> None:
        self.ranks, self.absent = ranks, absent
        self.barrier = threading.Barrier(ranks, action=self.launch_all)
        self.launches: dict[int, tuple] = {}

    def of(self, rank: int) -> "JoinedLauncher.OneRank":
        return JoinedLauncher.OneRank(self, rank)

    def launch_all(self) -> None:
        launches = [self.launches[rank] for rank in range(self.ranks)]
        specs = [dict(spec, first_rank=0, local_ranks=self.ranks) for spec, *_ in launches]
        assert all(spec == specs[0] for spec in specs), "ranks launch different calls"
        tensors = [own[0] for _, own, _ in launches]
        _emulator.FusedPlan(**specs[0]).launch(tensors, 3, self.absent, launches[0][2])

    class OneRank:
        def __init__(self, joined: "JoinedLauncher", rank: int) -> None:
            self.joined, self.rank = joined, rank

        def plan(self, **spec) -> Callable:
            assert (spec["first_rank"], spec["local_ranks"]) == (self.rank, 1)
            _emulator.FusedPlan(**spec)

            def launch(tensors, features) -> None:
                self.joined.launches[self.rank] = spec, tensors, features
                self.joined.barrier.wait(20)

            return launch


class CheckedPeers(CheckedRanks):
    """Peer runtimes over runtimes on streams; the order of all accesses is checked."""

    def __init__(self, ranks: int, absent: int = -1, forced: bool = False, leave_out: str = "") -> None:
        super().__init__(ranks, leave_out)
        size = _C.fused_bytes(ranks, LAYOUT)
        self.memory = [torch.zeros(size, dtype=torch.uint8) for _ in range(ranks)]
        joined = JoinedLauncher(ranks, absent)
        self.below = self.runtimes
        self.runtimes = [
            PeerRuntime(
                FusedRanks(
                    joined.of(rank),
                    LAYOUT,
                    [tensor.data_ptr() for tensor in self.memory],
                    [self.memory[rank][_C.MISSING_OFFSET :][:4].view(torch.int32)],
                    rank,
                    1,
                ),
                streams,
                self.below[rank],
                [f"rank {peer}" for peer in range(ranks)],
                "memory of a test",
                forced=forced,
            )
            for rank, streams in enumerate(self.streams)
        ]


def shape_of(algorithm: str = "two_shot", spec: str = "int8", numels: tuple[int, ...] = (3000,)) -> OpSpec:
    parts = tuple(TensorSpec(numel, torch.float32, codec(spec)) for numel in numels)
    return OpSpec("all_reduce", "avg", parts, algorithm)


@pytest.mark.parametrize("algorithm", ["two_shot", "one_shot"])
def test_peer_runtimes_match_engine_bytes(algorithm: str) -> None:
    """A message of three tensors, synchronous and asynchronous, whose results the caller's stream uses."""
    numels, ranks = (3000, 0, 1), 3
    shape = shape_of(algorithm, numels=numels)
    inputs = [
        [floats("normal", n, seed=10 * rank + i) for i, n in enumerate(numels)] for rank in range(ranks)
    ]
    expected = [[part.clone() for part in parts] for parts in inputs]
    losses = [[torch.zeros(n) for n in numels] for _ in range(ranks)]

    def work(rank: int, runtime: PeerRuntime, streams: RecordedStreams) -> None:
        streams.own(*inputs[rank], *losses[rank])
        plan = runtime.make_plan(shape, algorithms.build(algorithm, "all_reduce", ranks))
        assert isinstance(plan, FusedPlan) and len(plan.launches) == 2
        buffers = [Buffers(x, x, loss) for x, loss in zip(inputs[rank], losses[rank])]
        runtime.run(plan, buffers, 1)
        second = runtime.submit(plan, buffers, inputs[rank], 2)
        second.wait()
        assert second.get_future().wait() == inputs[rank] and second.wire_bytes == plan.sent_bytes > 0
        assert [entry.stage for entry in runtime.flight_entries()] == ["done", "done"]
        info = runtime.info()
        assert info["runtime"] == "peer" and info["operations"] == 2 and info["elsewhere"] == {}

    peers = CheckedPeers(ranks)
    assert peers.run(work) == []
    for at, numel in enumerate(numels):
        if numel:
            spec_of_part = shape_of(algorithm, numels=(numel,))
            buffers = [Buffers(x[at], x[at], torch.zeros(numel)) for x in expected]
            run_by_engine(spec_of_part, ranks, buffers)
            run_by_engine(spec_of_part, ranks, buffers)
            for rank in range(ranks):
                assert torch.equal(inputs[rank][at], expected[rank][at])
                assert torch.equal(losses[rank][at], buffers[rank].residual)


def run_on_all_ranks(ranks: int, work: Callable[[int, PeerRuntime], None], **options) -> list[str]:
    return CheckedPeers(ranks, **options).run(lambda rank, runtime, _: work(rank, runtime))


def test_call_without_fused_kernel_falls_back_and_is_counted() -> None:
    xs = [torch.full((100,), float(rank)) for rank in range(3)]

    def work(rank: int, runtime: PeerRuntime) -> None:
        shape = shape_of("two_shot", "fp8_e5m2", (100,))
        plan = runtime.make_plan(shape, algorithms.build("two_shot", "all_reduce", 3))
        assert isinstance(plan, FallbackPlan)
        for _ in range(2):
            runtime.run(plan, [Buffers(xs[rank], xs[rank])], 1)
        runtime.submit(plan, [Buffers(xs[rank], xs[rank])], [xs[rank]], 1).wait()
        assert runtime.info()["elsewhere"] == {"codec fp8_e5m2 of float32 has no fused kernel": 3}
        assert runtime.info()["operations"] == 3 == len(runtime.flight_entries())

    run_on_all_ranks(3, work)
    assert all(torch.allclose(x, torch.ones(100), rtol=0.3) for x in xs)


def test_forced_runtime_refuses_call_without_fused_kernel() -> None:
    def work(rank: int, runtime: PeerRuntime) -> None:
        with pytest.raises(ValueError, match="DTCOMM_RUNTIME=peer: codec topk"):
            schedule = algorithms.build("two_shot", "all_reduce", 2)
            runtime.make_plan(shape_of("two_shot", "topk:ratio=0.1"), schedule)

    run_on_all_ranks(2, work, forced=True)


@pytest.mark.parametrize("algorithm", ["two_shot", "one_shot"])
def test_absent_rank_is_named_by_the_next_call(algorithm: str) -> None:
    xs = [torch.ones(500) for _ in range(3)]

    def work(rank: int, runtime: PeerRuntime) -> None:
        plan = runtime.make_plan(
            shape_of(algorithm, numels=(500,)), algorithms.build(algorithm, "all_reduce", 3)
        )
        runtime.run(plan, [Buffers(xs[rank], xs[rank])], 1)
        if rank != 1:
            for _ in range(2):
                with pytest.raises(PeerLost, match="rank 1 did not arrive at a fused collective"):
                    runtime.run(plan, [Buffers(xs[rank], xs[rank])], 1)
            assert "rank 1" in runtime.failure
        runtime.close()
        with pytest.raises(DtcommError):
            runtime.run(plan, [Buffers(xs[rank], xs[rank])], 1)

    run_on_all_ranks(3, work, absent=1)


def gpu_info(
    gpu: str = "a", reaches: str = "ab", sees: str = "ab", trouble: str = "", nvlinks: str | None = None
) -> dict:
    return {
        "id": gpu,
        "reaches": list(reaches),
        "sees": list(sees),
        "nvlinks": None if nvlinks is None else list(nvlinks),
        "blocks": 8,
        "trouble": trouble,
    }


@pytest.mark.parametrize(
    ("gpus", "groups", "reason"),
    [
        ([gpu_info("a"), gpu_info("b")], [[0, 1]], ""),
        ([gpu_info("a"), gpu_info("b", sees="b", reaches="b")], [[0, 1]], ""),  # hidden: tried
        ([gpu_info("a"), gpu_info("b")], [[0], [1]], "on 2 hosts"),
        ([gpu_info("a"), gpu_info("a")], [[0, 1]], "share a GPU"),
        (
            [gpu_info("a"), gpu_info("b", reaches="b")],
            [[0, 1]],
            "GPU of rank 1 does not reach that of rank 0",
        ),
        ([gpu_info("a"), gpu_info("b", trouble="no module")], [[0, 1]], "rank 1: no module"),
        ([gpu_info(str(i)) for i in range(9)], [list(range(9))], "9 ranks"),
    ],
)
def test_reason_when_ranks_cannot_be_peers(gpus: list, groups: list, reason: str) -> None:
    refusal = why_not_peers(gpus, groups, forced=False)
    assert refusal == reason == "" or (reason and reason in refusal)
    if "share" in reason:
        assert why_not_peers(gpus, groups, forced=True) == ""


def test_cpu_is_reported_as_no_cuda_device() -> None:
    assert "no CUDA device" in describe_gpu(torch.device("cpu"))["trouble"]


@pytest.mark.parametrize(
    ("gpus", "reason"),
    [
        ([gpu_info("a", nvlinks="b"), gpu_info("b", nvlinks="a")], ""),
        ([gpu_info("a", nvlinks="b"), gpu_info("a", nvlinks="b")], ""),  # ranks that share a GPU
        (
            [gpu_info("a", nvlinks=""), gpu_info("b", nvlinks="")],
            "NVLink does not connect the GPUs of ranks 0 and 1",
        ),
        (
            [gpu_info("a", nvlinks="b"), gpu_info("b")],
            "whether NVLink connects the GPUs of ranks 1 and 0 is unknown",
        ),
        (
            [gpu_info("a", nvlinks="", sees="a"), gpu_info("b")],
            "ranks 0 and 1 is unknown",
        ),  # hidden from rank 0
        (
            [
                gpu_info(gpu, nvlinks=links, sees="abc")
                for gpu, links in (("a", "bc"), ("b", "a"), ("c", "a"))
            ],
            "NVLink does not connect the GPUs of ranks 1 and 2",
        ),
    ],
)
def test_pairs_of_gpus_without_nvlink_are_named(gpus: list, reason: str) -> None:
    assert missing_nvlink(gpus) == reason == "" or (reason and reason in missing_nvlink(gpus))


def test_nvlinks_come_from_torch_or_are_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    assert nvlinks_of(0, ["a", "b"]) is None  # this torch has no CUDA
    matrix = SimpleNamespace(matrix=[[0, 0, 18], [0, 0, 0], [18, 0, 0]])
    monkeypatch.setattr(torch._C._distributed_c10d, "_detect_dma_connectivity", lambda *_: matrix)
    assert [nvlinks_of(gpu, ["a", "b", "c"]) for gpu in range(3)] == [["c"], [], ["a"]]
    monkeypatch.delattr(torch._C._distributed_c10d, "_detect_dma_connectivity")
    assert nvlinks_of(0, ["a", "b"]) is None


@pytest.mark.parametrize(
    ("nvlinks", "reason"), [("ab", ""), ("", "; NVLink does not connect the GPUs of ranks 0 and 1")]
)
def test_the_reason_names_gpus_without_nvlink(
    monkeypatch: pytest.MonkeyPatch, nvlinks: str, reason: str
) -> None:
    own = torch.zeros(_C.fused_bytes(2, layout_for([gpu_info()])), dtype=torch.uint8)
    mapped = PeerBuffers("memory of a test", (own.data_ptr(), own.data_ptr()), own, None)
    monkeypatch.setattr(CudaBootstrap, "_backend_runtime", lambda *_: SingleRankRuntime())
    monkeypatch.setattr(cuda, "map_peers", lambda *_: (mapped, ""))
    monkeypatch.setenv("DTCOMM_RUNTIME", "peer")
    bootstrap = bootstrap_of_two()
    infos = [{"gpu": gpu_info(gpu, nvlinks=nvlinks)} for gpu in "ab"]
    assert isinstance(bootstrap._choose_runtime(None, infos, "nccl"), PeerRuntime)
    assert bootstrap.reason == "all ranks reach each other's memory" + reason


def bootstrap_of_two() -> CudaBootstrap:
    bootstrap = object.__new__(CudaBootstrap)
    bootstrap._device, bootstrap._is_pair, bootstrap._group = torch.device("cpu"), False, None
    bootstrap._timeout = timedelta(seconds=10)
    bootstrap.rank, bootstrap.size, bootstrap.names = 0, 2, ["rank 0", "rank 1"]
    bootstrap.groups = ((0, 1),)
    return bootstrap


def test_pair_groups_use_the_backend_runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    """send and recv have no fused kernels; the reason names them."""
    backend_runtime = object()
    monkeypatch.setattr(CudaBootstrap, "_backend_runtime", lambda *_: backend_runtime)
    pair = object.__new__(CudaBootstrap)
    pair._device, pair._is_pair = torch.device("cpu"), True
    assert pair._choose_runtime(None, [], "nccl") is backend_runtime
    assert "send and recv have no fused kernels" in pair.reason


def test_auto_uses_no_fused_kernels_before_a_run_between_gpus(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two GPUs that could be peers: only DTCOMM_RUNTIME=peer gets as far as mapping memory."""
    monkeypatch.setattr(cuda, "RAN_BETWEEN_GPUS", False)
    monkeypatch.setattr(CudaBootstrap, "_backend_runtime", lambda *_: fallback)
    monkeypatch.setattr(cuda, "map_peers", lambda *_: (None, "no memory in this test"))
    fallback = SingleRankRuntime()
    bootstrap = bootstrap_of_two()
    infos = [{"gpu": gpu_info("a")}, {"gpu": gpu_info("b")}]
    assert bootstrap._choose_runtime(None, infos, "nccl") is fallback
    assert bootstrap.reason == (
        "the group has nccl for cpu; fused kernels have not run between GPUs yet, so only DTCOMM_RUNTIME=peer uses them"
    )
    monkeypatch.setenv("DTCOMM_RUNTIME", "peer")
    with pytest.raises(DtcommError, match="DTCOMM_RUNTIME=peer, but no memory in this test"):
        bootstrap._choose_runtime(None, infos, "nccl")
    monkeypatch.setattr(cuda, "RAN_BETWEEN_GPUS", True)
    monkeypatch.setenv("DTCOMM_RUNTIME", "auto")
    assert bootstrap._choose_runtime(None, infos, "nccl") is fallback
    assert "no fused kernels: no memory in this test" in bootstrap.reason
