"""What compresses with a memory, and sums on common ground, on a device: the CPU's bits where they are to be, and no
host that waits for the device.
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
from dtcomm.kernels import dispatch, local_tasks, low_rank
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
def no_wait() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def there(x: torch.Tensor | None) -> Any:
    return None if x is None else x.cuda()


def same(here: torch.Tensor, on_device: torch.Tensor) -> bool:
    return torch.allclose(here, on_device.cpu(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("spec", ["exact", "exact:bits=16,block=128"])
def test_steps_of_exact_sums(spec: str, dtype: torch.dtype) -> None:
    which = codec(spec)
    assert isinstance(which, Exact)
    for numel in (1, 4097, 100_000):
        x, lost = torch.randn(numel).to(dtype), torch.randn(numel)
        x[numel // 2] = torch.inf
        grid = torch.zeros(which.blocks(numel), dtype=torch.uint8)
        codes, out = torch.zeros(numel, dtype=which.code_type), torch.zeros(numel, dtype=dtype)
        sums = torch.zeros(-(-numel // local_tasks.AUDIT_RUN), dtype=torch.int64)
        cpu = [x, lost, grid, codes, out, sums]
        device = [there(each) for each in cpu]

        def steps(x: Any, lost: Any, grid: Any, codes: Any, out: Any, sums: Any) -> None:
            assert isinstance(which, Exact)
            local_tasks.measure_exponents(which, x, lost, grid)()
            local_tasks.quantize_to_exponents(which, 3, x, lost, grid, codes)()
            local_tasks.dequantize(which, 3, codes, grid, 3, out)()
            local_tasks.audit_checksums(which, codes, sums)()

        steps(*cpu)
        with no_wait():
            steps(*device)
        assert all(map(same, cpu, device))


@pytest.mark.parametrize("ratio", [0.01, 0.3])
def test_steps_of_shared_positions(ratio: float) -> None:
    which = codec(f"randk:positions=shared,ratio={ratio}")
    assert isinstance(which, RandK)
    for numel in (1, 4097, 100_000):
        kept = which.kept_in(numel)
        cpu = [
            torch.randn(numel),
            torch.randn(numel),
            torch.zeros(kept),
            torch.zeros(kept),
            torch.zeros(numel),
        ]
        device = [there(each) for each in cpu]

        def steps(x: Any, lost: Any, values: Any, owed: Any, out: Any) -> None:
            assert isinstance(which, RandK)
            local_tasks.gather_values(which, 77, 4096, x, lost, values, owed)()
            local_tasks.scatter_values(which, 77, 4096, False, values, out)()
            local_tasks.restore_residual(which, 77, 4096, owed, lost)()

        steps(*cpu)
        with no_wait():
            steps(*device)
        assert all(map(same, cpu, device))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rank", [1, 4])
def test_passes_of_low_rank(rank: int, dtype: torch.dtype) -> None:
    """Projections to rounding, rows orthonormal, and the product of the same factors to the bit."""
    rows, columns = 300, 513
    gradient, lost = torch.randn(rows * columns).to(dtype), torch.randn(rows * columns)
    left, right = torch.zeros(rank, rows), torch.randn(rank, columns)
    on_device = [there(each) for each in (gradient, lost, left, right)]
    low_rank.project_rows(gradient, lost, right, left)
    with no_wait():
        low_rank.project_rows(on_device[0], on_device[1], on_device[3], on_device[2])
    torch.testing.assert_close(on_device[2].cpu(), left, rtol=1e-3, atol=1e-3)
    on_device[2][-1] = on_device[2][0]  # one that depends on the others gives place to another
    with no_wait():
        low_rank.orthonormalise(on_device[2], 5)
        low_rank.project_columns(on_device[0], on_device[1], on_device[2], on_device[3])
    torch.testing.assert_close(
        on_device[2] @ on_device[2].t(), torch.eye(rank, device="cuda"), rtol=0, atol=1e-5
    )
    left, right = on_device[2].cpu(), on_device[3].cpu()
    low_rank.expand(gradient, lost, left, right)
    with no_wait():
        low_rank.expand(*on_device)
    assert same(gradient, on_device[0]) and same(lost, on_device[1])


@pytest.mark.parametrize("rank", [1, 2, 4, 8, 32])
def test_passes_of_low_rank_as_kernels(rank: int) -> None:
    """The CPU's bits, captured and replayed: rows that are zero, depend on others or are no numbers too."""
    if dispatch.low_rank_backend() != dispatch.CUDA:
        pytest.skip("needs dtcomm._cuda: DTCOMM_CUDA=1 make build, with nvcc")
    cpu = [torch.randn(rank, n) for n in (3, 33, 3840, 3841, 50_257)]
    cpu += [torch.zeros(rank, 100), torch.randn(1, 300).repeat(rank, 1), torch.randn(rank, 1000) * 1e30]
    cpu[-1][rank // 2, 7] = torch.nan
    cpu += [torch.randn(rank, 20 + at) for at in range(60)]  # more than one kernel takes
    device, keys = [each.cuda() for each in cpu], list(range(len(cpu)))
    low_rank.orthonormalise_all(cpu, keys)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        low_rank.orthonormalise_all(device, keys)
    with no_wait():
        graph.replay()
    assert all(map(same, cpu, device))
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        gradient, lost = torch.randn(301 * 77).to(dtype), torch.randn(301 * 77)
        factors = torch.randn(rank, 301), torch.randn(rank, 77)
        on_device = [each.cuda() for each in (gradient, lost, *factors)]
        low_rank.expand(gradient, lost, *factors)
        with no_wait():
            low_rank.expand(*on_device)
        assert same(gradient, on_device[0]) and same(lost, on_device[1])
        if not on_device[0].is_cuda:
            continue  # there is nothing to judge where one may look
        broken = factors[0].cuda()
        broken[rank - 1, 300] = torch.inf
        with no_wait():
            right, wrong = low_rank.factors_finite(
                [on_device[2], broken], [on_device[3], on_device[3].clone()]
            )
            low_rank.expand(*on_device, wrong)
        assert bool(on_device[0].isnan().all()) and same(lost, on_device[1]) and not broken.any()
        low_rank.expand(gradient, None, *factors)
        low_rank.expand(on_device[0], None, *on_device[2:], right)
        assert same(gradient, on_device[0])


def hooked(rank: int, world_size: int, spec: str, feedback: bool | str) -> dict[str, Any]:
    model = torch.nn.parallel.DistributedDataParallel(FixedGradientModel(rank, "cuda"))
    policy = f"ndim<2 -> none; * -> {spec}"
    ddp.compress(model, policy, feedback=feedback, sample_every=2)

    def step() -> None:
        model.zero_grad()
        model().backward()

    for _ in range(4):  # connections are made, buckets laid out anew, memory asked for
        step()
    with no_wait():
        step()
        step()
    seen = [trace(step) for _ in range(2)]  # norms are measured in one of them
    gradients = [parameter.grad.cpu() for parameter in model.parameters()]
    return {
        "waits": [each.waits for each in seen],
        "kernels": [each.kernels for each in seen],
        "gradients": gradients,
    }


@pytest.mark.parametrize(("spec", "feedback"), HOOKS)
def test_a_step_of_the_hook_waits_for_nothing(spec: str, feedback: bool | str) -> None:
    ranks = run_ranks(hooked, 2, spec, feedback, env=PEER_RUNTIME, timeout=100, fresh=True)
    for said in ranks:
        assert said["waits"] == [[], []] and all(said["kernels"])
        assert all(map(torch.equal, said["gradients"], ranks[0]["gradients"]))


def sums_by_agreement(rank: int, world_size: int) -> list[bool]:
    found = []
    for spec in ("exact", "exact:bits=16", "randk:positions=shared,ratio=0.1"):
        for feedback in (False, True):
            here = torch.randn(50_000, generator=torch.Generator().manual_seed(rank))
            lost = torch.zeros(50_000) if feedback else None
            device, lost_there = here.cuda(), there(lost)
            C.all_reduce(here, "avg", codec=spec, seed=4, residual=lost)
            C.all_reduce(device, "avg", codec=spec, seed=4, residual=lost_there)
            found.append(same(here, device) and (lost is None or same(lost, lost_there)))
    return found


def test_sums_by_agreement_have_the_cpu_s_bits() -> None:
    for said in run_ranks(sums_by_agreement, 2, env={"DTCOMM_RUNTIME": "auto"}, timeout=100):
        assert all(said)
