"""Error feedback conserves mass, and NaN and Inf never enter a residual."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from dtcomm import ddp
from dtcomm.launch.ranks import run_ranks
from tests.unit.ddp.models import SMALL_BUCKETS, backward, gradients, local_gradients, wrapped

BRANCH = "branch.weight"


def sum_over_ranks(tensor: torch.Tensor) -> torch.Tensor:
    total = tensor.double()
    dist.all_reduce(total)
    return total


def residuals(state: ddp.DDPState, like: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return every parameter's residual in the gradient's shape; zeros if it has none."""
    stored = state.state_dict()["residuals"]
    return {
        name: stored[name].view(tensor.shape) if name in stored else torch.zeros(tensor.shape)
        for name, tensor in like.items()
    }


def largest_mass_error(rank: int, world_size: int, spec: str, options: dict[str, Any]) -> float:
    """Return the largest relative difference between inputs and outputs, over all steps and parameters."""
    model = wrapped(**SMALL_BUCKETS, **options)
    state = ddp.compress(model, spec, feedback=True)
    before: dict[str, torch.Tensor] = {}
    gap = 0.0
    for step in range(5):
        model.zero_grad()
        with local_gradients(model) as local:
            # From the third step on no rank uses the branch, so its residuals must stay.
            backward(model, rank, step, branch=step < 2 or "find_unused_parameters" not in options)
        after, out = residuals(state, local), gradients(model)
        for name, mine in local.items():
            old = before.get(name, torch.zeros_like(mine))
            total_input = sum_over_ranks(mine.double() + old.double())
            total_output = world_size * out[name].double() + sum_over_ranks(after[name])
            gap = max(gap, float((total_input - total_output).abs().max() / total_input.abs().max()))
        if "find_unused_parameters" in options and step >= 2:
            assert BRANCH not in out
            assert torch.equal(
                state.state_dict()["residuals"][BRANCH].view_as(before[BRANCH]), before[BRANCH]
            )
            after[BRANCH] = before[BRANCH]
        before = after
    assert all(before[name].any() for name in ("first.weight", BRANCH, "last.weight"))
    return gap


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("spec", ["int8", "fp16"])
def test_gradients_and_residuals_conserve_mass_across_the_bucket_rebuild(ranks: int, spec: str) -> None:
    assert max(run_ranks(largest_mass_error, ranks, spec, {})) < 1e-6


def test_an_unused_parameter_keeps_its_residual() -> None:
    assert max(run_ranks(largest_mass_error, 2, "int8", {"find_unused_parameters": True})) < 1e-6


def train_partly_used(rank: int, world_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Only rank 0 uses the branch after the first step; return the totals of inputs and of outputs."""
    model = wrapped(find_unused_parameters=True)
    state = ddp.compress(model, "int8", feedback=True)
    total_input = torch.zeros(48, 48, dtype=torch.float64)
    total_output = torch.zeros(48, 48, dtype=torch.float64)
    for step in range(4):
        model.zero_grad()
        with local_gradients(model) as local:
            backward(model, rank, step, branch=rank == 0 or step == 0)
        total_input += sum_over_ranks(local.get(BRANCH, torch.zeros(48, 48)))
        total_output += world_size * gradients(model)[BRANCH].double()
    return total_input, total_output + sum_over_ranks(state.state_dict()["residuals"][BRANCH].view(48, 48))


def test_a_parameter_that_some_ranks_leave_unused_conserves_mass() -> None:
    total_input, total_output = run_ranks(train_partly_used, 2)[0]
    torch.testing.assert_close(total_input, total_output, rtol=0, atol=1e-6 * float(total_input.abs().max()))


def train_without_feedback(rank: int, world_size: int) -> tuple[int, float | None]:
    model = wrapped()
    state = ddp.compress(model, "int8", feedback=False)
    for step in range(3):
        backward(model, rank, step)
    row = next(row for row in state.report().rows if row.codec == "int8")
    return len(state.state_dict()["residuals"]), row.relative_error


def test_error_is_measured_without_feedback_and_no_residual_is_kept() -> None:
    for count, error in run_ranks(train_without_feedback, 2):
        assert count == 0
        assert error is not None
        assert 1e-4 < error < 0.05


def train_with_bad_loss(rank: int, world_size: int, bad: float, spec: str) -> tuple[list[bool], bool]:
    """Return whether each step's gradients were finite, and all residuals; rank 1's own are ``bad`` in step 1."""
    model = wrapped()
    state = ddp.compress(model, spec, feedback=True)
    finite = []
    for step in range(4):
        model.zero_grad()
        backward(model, rank, step, scale=bad if (rank, step) == (1, 1) else 1.0)
        finite.append(all(bool(gradient.isfinite().all()) for gradient in gradients(model).values()))
    return finite, all(
        bool(residual.isfinite().all()) for residual in state.state_dict()["residuals"].values()
    )


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("spec", ["none", "fp16", "int8", "powersgd:rank=2"])
def test_nan_and_inf_reach_every_rank_and_are_gone_at_the_next_step(bad: float, spec: str) -> None:
    for finite, residuals_finite in run_ranks(train_with_bad_loss, 2, bad, spec):
        assert finite == [True, False, True, True]
        assert residuals_finite


def train_with_grad_scaler(rank: int, world_size: int) -> tuple[list[float], list[bool], float]:
    """Return the scale after each step, whether the step was taken, and the difference to an uncompressed run."""
    model, plain = wrapped(), wrapped()
    ddp.compress(model, "int8", feedback=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    theirs = torch.optim.SGD(plain.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=1000)
    scales, stepped = [], []
    for step in range(6):
        overflows = (rank, step) == (1, 2)
        before = model.module.first.weight.detach().clone()
        optimizer.zero_grad()
        out = model(torch.randn(4, 48, generator=torch.Generator().manual_seed(10 * step + rank)))
        scaler.scale(out.square().mean() * (float("inf") if overflows else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        stepped.append(not torch.equal(before, model.module.first.weight))
        if stepped[-1]:
            theirs.zero_grad()
            out = plain(torch.randn(4, 48, generator=torch.Generator().manual_seed(10 * step + rank)))
            out.square().mean().backward()
            theirs.step()
    moved = (model.module.first.weight - plain.module.first.weight).norm() / plain.module.first.weight.norm()
    return scales, stepped, float(moved.detach())


def test_grad_scaler_skips_an_overflow_on_every_rank_and_goes_on() -> None:
    for scales, stepped, gap in run_ranks(train_with_grad_scaler, 2):
        assert stepped == [True, True, False, True, True, True]
        assert scales == [256.0, 256.0, 128.0, 128.0, 128.0, 128.0]
        assert gap < 1e-2


def compare_scaled(rank: int, world_size: int, form: str) -> tuple[list[float], bool]:
    """Train with a loss scale that grows and once overflows; return the scales, and whether it changes any bit.

    The other run has no loss scale, and leaves out the step in which one parameter of one rank overflows.
    """
    scaled, plain = wrapped(**SMALL_BUCKETS), wrapped(**SMALL_BUCKETS)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
    state = ddp.compress(scaled, "topk:ratio=0.05", residual=form, grad_scaler=scaler)
    ddp.compress(plain, "topk:ratio=0.05", residual=form)
    optimizer = torch.optim.SGD(scaled.parameters(), lr=0.05)
    theirs = torch.optim.SGD(plain.parameters(), lr=0.05)
    overflows = False
    scaled.module.last.weight.register_hook(lambda gradient: gradient * (float("inf") if overflows else 1.0))
    scales = []
    for step in range(8):
        overflows = (rank, step) == (1, 4)
        x = torch.randn(4, 48, generator=torch.Generator().manual_seed(10 * step + rank))
        optimizer.zero_grad()
        scaler.scale(scaled(x).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        if step != 4:
            theirs.zero_grad()
            plain(x).square().mean().backward()
            theirs.step()
        assert state.state_dict()["loss_scale"] == ([256.0, *scales])[step]
    pairs = zip(scaled.parameters(), plain.parameters(), strict=True)
    return scales, all(torch.equal(own, other) for own, other in pairs)


@pytest.mark.parametrize("form", ["fp32", "bf16"])
def test_residuals_follow_a_grad_scaler_and_survive_a_step_that_it_skips(form: str) -> None:
    for scales, equal in run_ranks(compare_scaled, 2, form):
        assert scales == [256.0, 512.0, 512.0, 1024.0, 512.0, 512.0, 1024.0, 1024.0]
        assert equal


def rescale_by_hand(rank: int, world_size: int) -> bool:
    """Return whether scaling the loss by 4 after three steps multiplies the gradients by exactly 4."""
    scaled, plain = wrapped(**SMALL_BUCKETS), wrapped(**SMALL_BUCKETS)
    state = ddp.compress(scaled, "topk:ratio=0.05")
    ddp.compress(plain, "topk:ratio=0.05")
    for step in range(6):
        if step == 3:
            for wrong in (-1.0, 0.0, float("nan"), float("inf")):
                with pytest.raises(ValueError, match="factor"):
                    state.rescale(wrong)
            state.rescale(4.0)
        factor = 1.0 if step < 3 else 4.0
        for model, scale in ((scaled, factor), (plain, 1.0)):
            model.zero_grad()
            backward(model, rank, step, scale=scale)
        ours, theirs = gradients(scaled), gradients(plain)
        if not all(torch.equal(ours[name], factor * theirs[name]) for name in ours):
            return False
    return True


def test_rescale_multiplies_what_is_sent_later() -> None:
    assert run_ranks(rescale_by_hand, 2) == [True, True]


def masked_shares(rank: int, world_size: int, values: str) -> list[float]:
    """Return the share of the momentum that dgc set to zero in the last step, by the rank that encodes the sum."""
    model = DistributedDataParallel(torch.nn.Linear(1024, 64, bias=False))  # four granules a rank
    state = ddp.compress(model, f"dgc:ratio=0.01,values={values}")
    for step in range(8):
        model.zero_grad()
        generator = torch.Generator().manual_seed(100 * step + rank)
        x, weight = torch.randn(64, 1024, generator=generator), torch.randn(64, 64, generator=generator)
        (model(x) * weight).sum().backward()
    (velocity,) = state.state_dict()["velocities"].values()
    return [float((chunk == 0).float().mean()) for chunk in velocity.chunk(world_size)]


@pytest.mark.parametrize("values", ["fp32", "bf16", "int4"])
def test_dgc_masks_the_momentum_of_what_was_sent_alone(values: str) -> None:
    """Also where a rank encodes the sum, whose residual has what the other ranks sent."""
    for shares in run_ranks(masked_shares, 4, values):
        assert all(0.0085 < share < 0.0125 for share in shares), shares
