"""The hook against plain DDP, in every mode that DDP has."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dtcomm import ddp
from dtcomm.launch.ranks import run_ranks
from tests.unit.ddp.models import SMALL_BUCKETS, WIDTH, Net, backward, batch, gradients, wrapped

MODES: dict[str, dict[str, Any]] = {
    "default": {},
    "small_buckets": SMALL_BUCKETS,
    "static_graph": {"static_graph": True, **SMALL_BUCKETS},
    "bucket_view": {"gradient_as_bucket_view": True, **SMALL_BUCKETS},
    "find_unused": {"find_unused_parameters": True, **SMALL_BUCKETS},
    "lazy_buckets": {"lazy_bucket_allocation": True, **SMALL_BUCKETS},
    "batched_copy": {"batched_grad_copy": True, **SMALL_BUCKETS},
}


def require_argument(mode: str) -> None:
    """Skip a test of an argument that this version of torch does not have."""
    missing = [
        name
        for name in MODES[mode]
        if name not in inspect.signature(DistributedDataParallel.__init__).parameters
    ]
    if missing:
        pytest.skip(f"torch {torch.__version__} has no {missing[0]}")


def require_equal(
    ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], relative: float | None
) -> None:
    assert ours.keys() == theirs.keys()
    for name, gradient in ours.items():
        if relative is None:
            assert torch.equal(gradient, theirs[name]), name
        else:
            torch.testing.assert_close(
                gradient, theirs[name], rtol=0, atol=relative * float(theirs[name].abs().max())
            )


def compare_to_ddp(
    rank: int, world_size: int, spec: str, mode: str, dtype: torch.dtype, relative: float | None
) -> None:
    ours, plain = wrapped(dtype=dtype, **MODES[mode]), wrapped(dtype=dtype, **MODES[mode])
    ddp.compress(ours, spec)
    for step in range(5):
        for model in (ours, plain):
            model.zero_grad()
            backward(model, rank, step, branch=mode != "find_unused" or (step + rank) % 3 == 0)
        require_equal(gradients(ours), gradients(plain), relative)


@pytest.mark.parametrize("mode", MODES)
def test_none_equals_plain_ddp_bit_for_bit_on_two_ranks(mode: str) -> None:
    require_argument(mode)
    run_ranks(compare_to_ddp, 2, "none", mode, torch.float32, None)


@pytest.mark.parametrize(
    ("spec", "dtype", "relative"),
    [
        ("none", torch.float32, 1e-6),
        ("int8", torch.float32, 0.05),
        ("int8", torch.bfloat16, 0.06),
        ("fp16", torch.float32, 2e-3),
    ],
)
@pytest.mark.parametrize("mode", ["small_buckets", "find_unused", "lazy_buckets", "batched_copy"])
def test_three_ranks_agree_with_plain_ddp(mode: str, spec: str, dtype: torch.dtype, relative: float) -> None:
    require_argument(mode)
    run_ranks(compare_to_ddp, 3, spec, mode, dtype, relative)


def finalize_by_hand(rank: int, world_size: int, spec: str, relative: float | None) -> None:
    ours, plain = wrapped(**SMALL_BUCKETS), wrapped(**SMALL_BUCKETS)
    state = ddp.compress(ours, spec)
    for model in (ours, plain):
        model.require_manual_backward_finalization = True  # type: ignore[attr-defined]
    for step in range(4):
        for model in (ours, plain):
            model.zero_grad()
            backward(model, rank, step)
            model.finalize_backward()
        require_equal(gradients(ours), gradients(plain), relative)
    assert state.report().steps == 4


@pytest.mark.skipif(
    not hasattr(DistributedDataParallel, "finalize_backward"),
    reason=f"torch {torch.__version__} has no require_manual_backward_finalization",
)
@pytest.mark.parametrize(("spec", "relative"), [("none", None), ("int8", 0.05), ("powersgd:rank=32", 1.0)])
def test_backward_may_be_finalized_by_hand(spec: str, relative: float | None) -> None:
    run_ranks(finalize_by_hand, 2, spec, relative)


def gradients_by_order(
    rank: int, world_size: int, spec: str, algorithms: Sequence[str]
) -> dict[tuple[str, int], dict[str, torch.Tensor]]:
    """The gradients of the same batches, with every algorithm and every rotation of the ranks that have them."""
    by_order = {}
    for algorithm in algorithms:
        for shift in range(world_size):
            model = wrapped(**SMALL_BUCKETS)
            ddp.compress(model, spec, algorithm=algorithm)
            backward(model, (rank + shift) % world_size, step=0)
            by_order[algorithm, shift] = gradients(model)
    return by_order


@pytest.mark.parametrize("spec", ["* -> none", "* -> exact", "* -> exact:bits=16"])
def test_exact_gives_gradients_that_do_not_depend_on_the_order_of_the_ranks(spec: str) -> None:
    on_rank = run_ranks(gradients_by_order, 3, spec, ["ring", "one_shot", "two_shot"])
    first = on_rank[0]["ring", 0]
    same = [
        torch.equal(gradient, first[name])
        for by_order in on_rank
        for by_name in by_order.values()
        for name, gradient in by_name.items()
    ]
    assert len(same) == 3 * 9 * len(first)
    assert all(same) == (spec != "* -> none")  # the batches tell orders apart


class Mixed(nn.Module):
    """One layer in each dtype that models are trained in, and one that only `none` can carry."""

    def __init__(self) -> None:
        super().__init__()
        dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, dtype=dtype) for dtype in dtypes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x.to(layer.weight.dtype))
        return x


def train_mixed_dtypes(rank: int, world_size: int) -> list[tuple[str, str, str]]:
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(DistributedDataParallel(Mixed()))
    state = ddp.compress(models[0], "int8")
    for step in range(3):
        for model in models:
            model.zero_grad()
            model(batch(rank, step)).square().mean().backward()
        require_equal(gradients(models[0]), gradients(models[1]), 0.06)
    return [(row.dtype, row.codec, row.reason) for row in state.report().rows]


def test_layers_of_unsupported_dtypes_stay_uncompressed() -> None:
    rows = set(run_ranks(train_mixed_dtypes, 2)[0])
    assert {(dtype, "int8", "") for dtype in ("float32", "bfloat16", "float16")} < rows
    assert ("float64", "none", "int8 does not take float64") in rows


def compare_accumulation(rank: int, world_size: int) -> None:
    ours, plain = wrapped(), wrapped()
    ddp.compress(ours, "none")
    for step in range(4):
        for model in (ours, plain):
            model.zero_grad()
            with model.no_sync():
                backward(model, rank, 2 * step)
            backward(model, rank, 2 * step + 1)
        require_equal(gradients(ours), gradients(plain), None)


def test_no_sync_accumulates_as_plain_ddp_does() -> None:
    run_ranks(compare_accumulation, 2)


def compare_bare_state(rank: int, world_size: int) -> tuple[dict[str, Any], bool]:
    """Compare the state and hook that frameworks register with `compress`: equal gradients, other names."""
    bare, compressed = wrapped(**SMALL_BUCKETS), wrapped(**SMALL_BUCKETS)
    state = ddp.DDPState("int8", feedback=True)
    bare.register_comm_hook(state, ddp.hook)
    ddp.compress(compressed, "int8", feedback=True)
    for step in range(4):
        for model in (bare, compressed):
            model.zero_grad()
            backward(model, rank, step)
        require_equal(gradients(bare), gradients(compressed), None)
    return state.state_dict(), state.error is None


def test_a_bare_state_names_parameters_alike_on_all_ranks() -> None:
    (first, fine), (second, _) = run_ranks(compare_bare_state, 2)
    assert fine
    assert len(first["residuals"]) == 3
    assert all(name.startswith("parameter.") for name in first["residuals"])
    assert {n: r.shape for n, r in first["residuals"].items()} == {
        n: r.shape for n, r in second["residuals"].items()
    }


def train_two_models(rank: int, world_size: int) -> None:
    models = [wrapped(seed=seed) for seed in range(2)]
    alone = [wrapped(seed=seed) for seed in range(2)]
    states = [ddp.compress(model, "int8") for model in models]
    for model in alone:
        ddp.compress(model, "int8")
    for step in range(3):  # interleaved here, one after the other below
        for model in models:
            model.zero_grad()
            backward(model, rank, step)
    for model in alone:
        for step in range(3):
            model.zero_grad()
            backward(model, rank, step)
    for interleaved, separate in zip(models, alone, strict=True):
        require_equal(gradients(interleaved), gradients(separate), None)
    assert [state.steps for state in states] == [3, 3]


def test_interleaved_models_do_not_affect_each_other() -> None:
    run_ranks(train_two_models, 2)


def train_on_subgroup(rank: int, world_size: int) -> float:
    group = dist.new_group([0, 2])
    if rank == 1:
        return 0.0
    model = wrapped(process_group=group)
    ddp.compress(model, "none")
    backward(model, rank, 0)
    first = model.module.first.weight.grad
    assert first is not None
    return float(first.sum())


def test_a_model_on_a_subgroup_averages_over_it() -> None:
    first, _, third = run_ranks(train_on_subgroup, 3)
    assert first == third != 0.0


def compress_without_ddp(rank: int, world_size: int) -> None:
    with pytest.raises(TypeError, match="expected a DistributedDataParallel, got Net"):
        ddp.compress(Net(), "int8")


def test_several_ranks_require_a_ddp_model() -> None:
    run_ranks(compress_without_ddp, 2)
    with pytest.raises(TypeError, match="expected a DistributedDataParallel, got str"):
        ddp.compress("model", "int8")  # type: ignore[arg-type]


def compress_twice(rank: int, world_size: int) -> str:
    model = wrapped()
    ddp.compress(model, "int8")
    with pytest.raises(RuntimeError) as error:
        ddp.compress(model, "int8")
    backward(model, rank, 0)
    return str(error.value)


def test_second_hook_is_refused_and_the_first_keeps_working() -> None:
    for message in run_ranks(compress_twice, 2):
        assert "has a communication hook already" in message and "a new DistributedDataParallel" in message


class ComplexNet(nn.Module):
    """Complex and real matrices and a complex vector, which share buckets by dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(0.1 * torch.randn(WIDTH, WIDTH, dtype=torch.complex64))
        self.bias = nn.Parameter(0.1 * torch.randn(WIDTH, dtype=torch.complex64))
        self.second = nn.Parameter(0.1 * torch.randn(WIDTH, WIDTH, dtype=torch.complex128))
        self.real = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = (torch.fft.fft(self.real(x)) @ self.first + self.bias).to(torch.complex128)
        return (x @ self.second).abs().square().mean()


def compare_complex(rank: int, world_size: int, spec: str) -> dict[str, float]:
    """Return the relative difference of each gradient from plain DDP's, after a checkpoint of the state was loaded."""
    torch.manual_seed(0)
    ours, plain = DistributedDataParallel(ComplexNet()), DistributedDataParallel(ComplexNet())
    plain.module.load_state_dict(ours.module.state_dict())
    state = ddp.compress(ours, spec)
    for step in range(2):
        for model in (ours, plain):
            model.zero_grad()
            model(batch(rank, step)).backward()
        state.load_state_dict(state.state_dict())
    expected = gradients(plain)
    return {
        name: float((gradient - expected[name]).norm() / expected[name].norm())
        for name, gradient in gradients(ours).items()
    }


@pytest.mark.parametrize(("spec", "limit"), [("none", 1e-6), ("int8", 0.05), ("powersgd:rank=48", 0.05)])
def test_complex_gradients_are_averaged_whole(spec: str, limit: float) -> None:
    for errors in run_ranks(compare_complex, 2, spec):
        assert errors.keys() == {"first", "bias", "second", "real.weight", "real.bias"}
        assert max(errors.values()) < limit, errors
