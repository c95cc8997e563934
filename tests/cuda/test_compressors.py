"""Compressors with state, and sums that need agreement between ranks, on a device: they match the CPU, and the host
never waits for the device.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import dtcomm.collectives as C
from dtcomm import ddp
from dtcomm.codecs import Exact, RandK, codec
from dtcomm.compress.error_state import FEEDBACKS
from dtcomm.compress.spec import COMPRESSORS
from dtcomm.kernels import local_tasks, low_rank
from dtcomm.launch.ranks import run_ranks
from tests.cuda.device_cases import NEEDS_GPU, PEER_RUNTIME, FixedGradientModel
from tests.support.host_sync_trace import trace

pytestmark = NEEDS_GPU
MORE = [
    ("powersgd:rank=4,alternate=true", True),
    ("powersgd:rank=2,factors=int8", True),
    ("topk:ratio=0.05", True),
]
HOOKS: list[tuple[str, bool | str]] = [
    *((name, True) for name in COMPRESSORS),
    *MORE,
    *(("topk:ratio=0.05", feedback) for feedback in FEEDBACKS[1:]),
    ("randk:positions=shared,ratio=0.1", True),
]


@contextmanager
def forbid_synchronization() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def to_gpu(x: torch.Tensor | None) -> Any:
    return None if x is None else x.cuda()


def same(on_cpu: torch.Tensor, on_gpu: torch.Tensor) -> bool:
    return torch.allclose(on_cpu, on_gpu.cpu(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("spec", ["exact", "exact:bits=16,block=128"])
def test_exact_sum_steps_match_cpu_bits(spec: str, dtype: torch.dtype) -> None:
    exact = codec(spec)
    assert isinstance(exact, Exact)
    for numel in (1, 4097, 100_000):
        x, lost = torch.randn(numel).to(dtype), torch.randn(numel)
        x[numel // 2] = torch.inf
        grid = torch.zeros(exact.blocks(numel), dtype=torch.uint8)
        codes, out = torch.zeros(numel, dtype=exact.code_type), torch.zeros(numel, dtype=dtype)
        sums = torch.zeros(-(-numel // local_tasks.AUDIT_RUN), dtype=torch.int64)
        cpu = [x, lost, grid, codes, out, sums]
        gpu = [to_gpu(tensor) for tensor in cpu]

        def steps(x: Any, lost: Any, grid: Any, codes: Any, out: Any, sums: Any) -> None:
            assert isinstance(exact, Exact)
            local_tasks.measure_exponents(exact, x, lost, grid)()
            local_tasks.quantize_to_exponents(exact, 3, x, lost, grid, codes)()
            local_tasks.dequantize(exact, 3, codes, grid, 3, out)()
            local_tasks.audit_checksums(exact, codes, sums)()

        steps(*cpu)
        with forbid_synchronization():
            steps(*gpu)
        assert all(map(same, cpu, gpu))


@pytest.mark.parametrize("ratio", [0.01, 0.3])
def test_shared_position_steps_match_cpu_bits(ratio: float) -> None:
    randk = codec(f"randk:positions=shared,ratio={ratio}")
    assert isinstance(randk, RandK)
    for numel in (1, 4097, 100_000):
        kept = randk.kept_in(numel)
        cpu = [
            torch.randn(numel),
            torch.randn(numel),
            torch.zeros(kept),
            torch.zeros(kept),
            torch.zeros(numel),
        ]
        gpu = [to_gpu(tensor) for tensor in cpu]

        def steps(x: Any, lost: Any, values: Any, owed: Any, out: Any) -> None:
            assert isinstance(randk, RandK)
            local_tasks.gather_values(randk, 77, 4096, x, lost, values, owed)()
            local_tasks.scatter_values(randk, 77, 4096, False, values, out)()
            local_tasks.restore_residual(randk, 77, 4096, owed, lost)()

        steps(*cpu)
        with forbid_synchronization():
            steps(*gpu)
        assert all(map(same, cpu, gpu))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rank", [1, 4])
def test_low_rank_passes_match_cpu(rank: int, dtype: torch.dtype) -> None:
    """Projections match to rounding, rows are orthonormal, and products of equal factors match bit for bit."""
    rows, columns = 300, 513
    gradient, lost = torch.randn(rows * columns).to(dtype), torch.randn(rows * columns)
    left, right = torch.zeros(rank, rows), torch.randn(rank, columns)
    on_gpu = [to_gpu(tensor) for tensor in (gradient, lost, left, right)]
    low_rank.project_rows(gradient, lost, right, left)
    with forbid_synchronization():
        low_rank.project_rows(on_gpu[0], on_gpu[1], on_gpu[3], on_gpu[2])
    torch.testing.assert_close(on_gpu[2].cpu(), left, rtol=1e-3, atol=1e-3)
    on_gpu[2][-1] = on_gpu[2][0]  # a linearly dependent row is replaced
    with forbid_synchronization():
        low_rank.orthonormalize(on_gpu[2], 5)
        low_rank.project_columns(on_gpu[0], on_gpu[1], on_gpu[2], on_gpu[3])
    torch.testing.assert_close(on_gpu[2] @ on_gpu[2].t(), torch.eye(rank, device="cuda"), rtol=0, atol=1e-5)
    left, right = on_gpu[2].cpu(), on_gpu[3].cpu()
    low_rank.expand(gradient, lost, left, right)
    with forbid_synchronization():
        low_rank.expand(*on_gpu)
    assert same(gradient, on_gpu[0]) and same(lost, on_gpu[1])


@pytest.mark.parametrize("rank", [1, 2, 4, 8, 32])
def test_low_rank_kernels_match_cpu_bits(rank: int) -> None:
    """A replayed graph gives the CPU's bits, also for rows that are zero, linearly dependent or not finite."""
    cpu = [torch.randn(rank, n) for n in (3, 33, 3840, 3841, 50_257)]
    cpu += [torch.zeros(rank, 100), torch.randn(1, 300).repeat(rank, 1), torch.randn(rank, 1000) * 1e30]
    cpu[-1][rank // 2, 7] = torch.nan
    cpu += [torch.randn(rank, 20 + at) for at in range(60)]  # more than one kernel takes
    gpu, keys = [tensor.cuda() for tensor in cpu], list(range(len(cpu)))
    low_rank.orthonormalize_all(cpu, keys)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        low_rank.orthonormalize_all(gpu, keys)
    with forbid_synchronization():
        graph.replay()
    assert all(map(same, cpu, gpu))
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        gradient, lost = torch.randn(301 * 77).to(dtype), torch.randn(301 * 77)
        factors = torch.randn(rank, 301), torch.randn(rank, 77)
        on_gpu = [tensor.cuda() for tensor in (gradient, lost, *factors)]
        low_rank.expand(gradient, lost, *factors)
        with forbid_synchronization():
            low_rank.expand(*on_gpu)
        assert same(gradient, on_gpu[0]) and same(lost, on_gpu[1])
        if not on_gpu[0].is_cuda:
            continue  # CPU tensors of the fake device: factors are checked on the host
        broken = factors[0].cuda()
        broken[rank - 1, 300] = torch.inf
        with forbid_synchronization():
            finite_flags, broken_flags = low_rank.factors_finite(
                [on_gpu[2], broken], [on_gpu[3], on_gpu[3].clone()]
            )
            low_rank.expand(*on_gpu, broken_flags)
        assert bool(on_gpu[0].isnan().all()) and same(lost, on_gpu[1]) and not broken.any()
        low_rank.expand(gradient, None, *factors)
        low_rank.expand(on_gpu[0], None, *on_gpu[2:], finite_flags)
        assert same(gradient, on_gpu[0])


STEPS = 12  # the first steps connect, rebuild buckets and allocate; in the first ten torch reads DDP's timers


def has_fused_sums(spec: str) -> bool:
    """Whether all that DDP's hook sends is summed by fused kernels: values in a codec that they have."""
    return spec.startswith(("powersgd", "randk:positions=shared"))


def hooked(rank: int, world_size: int, spec: str, feedback: bool | str) -> dict[str, Any]:
    model = torch.nn.parallel.DistributedDataParallel(FixedGradientModel(rank, "cuda"))
    policy = f"ndim<2 -> none; * -> {spec}"
    ddp.compress(model, policy, feedback=feedback, sample_every=2)

    def step() -> None:
        model.zero_grad()
        model().backward()

    for _ in range(STEPS):
        step()
    if has_fused_sums(spec):
        with forbid_synchronization():
            step()
            step()
    recordings = [trace(step) for _ in range(2)]  # norms are measured in one of them
    gradients = [parameter.grad.cpu() for parameter in model.parameters()]
    return {
        "waits": [recording.waits for recording in recordings],
        "kernels": [recording.kernels for recording in recordings],
        "gradients": gradients,
    }


@pytest.mark.parametrize(("spec", "feedback"), HOOKS)
def test_ddp_hook_step_does_not_synchronize(spec: str, feedback: bool | str) -> None:
    """Over Gloo the host waits for its own payloads, on events of their streams, and for nothing else."""
    fused = has_fused_sums(spec)
    env = {**PEER_RUNTIME, "DTCOMM_RUNTIME": "peer" if fused else "process_group"}
    ranks = run_ranks(hooked, 2, spec, feedback, env=env, timeout=100, fresh=True)
    for report in ranks:
        waits = {wait for recording in report["waits"] for wait in recording}
        assert waits <= (set() if fused else {"cudaEventSynchronize"}), waits
        assert all(report["kernels"])
        assert all(map(torch.equal, report["gradients"], ranks[0]["gradients"]))


def compare_sums_with_cpu(rank: int, world_size: int) -> list[bool]:
    matches = []
    for spec in ("exact", "exact:bits=16", "randk:positions=shared,ratio=0.1"):
        for feedback in (False, True):
            on_cpu = torch.randn(50_000, generator=torch.Generator().manual_seed(rank))
            lost = torch.zeros(50_000) if feedback else None
            on_gpu, lost_on_gpu = on_cpu.cuda(), to_gpu(lost)
            C.all_reduce(on_cpu, "avg", codec=spec, seed=4, residual=lost)
            C.all_reduce(on_gpu, "avg", codec=spec, seed=4, residual=lost_on_gpu)
            matches.append(same(on_cpu, on_gpu) and (lost is None or same(lost, lost_on_gpu)))
    return matches


def test_exact_and_shared_randk_sums_match_cpu_bits() -> None:
    for matches in run_ranks(compare_sums_with_cpu, 2, env={"DTCOMM_RUNTIME": "auto"}, timeout=100):
        assert all(matches)
