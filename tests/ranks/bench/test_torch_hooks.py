"""The simulated 16-bit hooks of bench.workloads have the bits of torch's own hooks on two ranks."""

from __future__ import annotations

import pytest
import torch

from bench.training.torch_hooks import HOOKS, SimulatedHook, ddp_hook
from dtcomm.launch.ranks import run_ranks
from tests.unit.ddp.models import backward, gradients, wrapped


def averaged_and_own(rank: int, world_size: int, name: str) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the gradients that DDP averaged with the hook, and this rank's own ones."""
    model = wrapped()
    model.register_comm_hook(None, ddp_hook(name))
    backward(model, rank, 0)
    averaged = [gradient.clone() for gradient in gradients(model).values()]
    model.zero_grad()
    with model.no_sync():
        backward(model, rank, 0)
    return averaged, [gradient.clone() for gradient in gradients(model).values()]


@pytest.mark.slow
@pytest.mark.parametrize("name", HOOKS)
def test_simulated_hooks_have_the_bits_of_torchs(name: str) -> None:
    results = run_ranks(averaged_and_own, 2, name)
    hook = SimulatedHook(name, 2)
    means = hook.average([own for _, own in results])
    for averaged, _ in results:
        assert all(torch.equal(mean, value) for mean, value in zip(means, averaged, strict=True))
    assert hook.payload_bytes == 2 * sum(mean.numel() for mean in means)
