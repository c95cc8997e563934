"""The compressors against the papers' equations: the updates and the state after each step."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from dtcomm.codecs import codec
from dtcomm.compress.powersgd import _key
from dtcomm.kernels import counter_rng
from tests.support.simulated_ranks import SimulatedRanks
from tests.unit.compress import reference_algorithms
from tests.unit.compress.reference_algorithms import Array

RANKS, ROWS, COLUMNS, STEPS = 3, 48, 40, 12
NUMEL = ROWS * COLUMNS  # within one granule, so that its largest elements are those of the tensor
LAYER = [("layer", torch.zeros(ROWS, COLUMNS))]


def gradients(step: int) -> list[torch.Tensor]:
    """Return the gradient of every rank: a common part, larger in some rows, and noise of its own."""
    generator = torch.Generator().manual_seed(step)
    common = torch.randn(ROWS, COLUMNS, generator=generator) * torch.linspace(0.1, 2, ROWS)[:, None]
    return [common + torch.randn(ROWS, COLUMNS, generator=generator) for _ in range(RANKS)]


def to_numpy(tensors: list[torch.Tensor]) -> list[Array]:
    return [tensor.double().numpy().reshape(-1) for tensor in tensors]


def assert_close(tensor: torch.Tensor, array: Array, tolerance: float = 1e-5) -> None:
    expected = torch.from_numpy(array).reshape(tensor.shape)
    scale = float(expected.abs().max())
    torch.testing.assert_close(tensor.double() / scale, expected / scale, rtol=0, atol=tolerance)


def average_gradient(run: SimulatedRanks, step: int) -> torch.Tensor:
    return run.average([[gradient] for gradient in gradients(step)])[0]


@pytest.mark.parametrize("clip", [0.0, 20.0])
def test_dgc_equals_the_paper_s_algorithm(clip: float) -> None:
    run = SimulatedRanks(f"dgc:ratio=0.05,momentum=0.9,clip={clip},values=fp32", RANKS, LAYER)
    paper = reference_algorithms.DeepGradientCompression(RANKS, NUMEL, 0.9, clip)
    count = codec("topk:ratio=0.05").layout().kept_of(NUMEL)
    for step in range(STEPS):
        assert_close(average_gradient(run, step), paper.step(to_numpy(gradients(step)), count))
        for rank, error_state in enumerate(run.error_states):
            assert_close(error_state.state_dict()["residuals"]["layer"], paper.v[rank])
            assert_close(error_state.state_dict()["velocities"]["layer"], paper.u[rank])


def test_dgc_with_all_elements_equals_momentum_of_the_optimiser() -> None:
    """The bias, which travels uncompressed, gets the momentum of an optimiser."""
    parameters = [*LAYER, ("bias", torch.zeros(ROWS))]
    run = SimulatedRanks("numel<100 -> none; * -> dgc:ratio=0.99,momentum=0.5,values=fp32", RANKS, parameters)
    # The smallest elements are sent later, so the sums over all steps are compared.
    velocity, total, arrived = torch.zeros(ROWS), torch.zeros(ROWS), torch.zeros(ROWS)
    for step in range(STEPS):
        by_rank = gradients(step)
        _, bias = run.average([[gradient, gradient[:, 0]] for gradient in by_rank])
        velocity = 0.5 * velocity + torch.stack(by_rank)[:, :, 0].mean(0)
        total, arrived = total + velocity, arrived + bias
    torch.testing.assert_close(arrived, total)


def test_ef_signsgd_equals_the_paper_s_algorithm() -> None:
    run = SimulatedRanks("sign:block=2048,scale=fp32", RANKS, LAYER)
    paper = reference_algorithms.SignSGD(RANKS, NUMEL)
    for step in range(STEPS):
        assert_close(average_gradient(run, step), paper.step(to_numpy(gradients(step))))


@pytest.mark.parametrize(("feedback", "rate"), [("ef21", 1.0), ("diana", 0.5)])
def test_ef21_and_diana_equal_the_papers_algorithms(feedback: str, rate: float) -> None:
    run = SimulatedRanks("topk:ratio=0.1,values=fp32", RANKS, LAYER, feedback=feedback)
    paper = reference_algorithms.Differences(RANKS, NUMEL, rate)
    count = codec("topk:ratio=0.1").layout().kept_of(NUMEL)
    for step in range(STEPS):
        assert_close(average_gradient(run, step), paper.step(to_numpy(gradients(step)), count))
        for rank, error_state in enumerate(run.error_states):
            references = error_state.state_dict()["references"]
            assert_close(references["local"]["layer"], paper.h[rank])
            assert_close(references["shared"]["layer"], paper.shared)


def first_factor(rank: int) -> Array:
    """Return the first factor, which depends on the parameter's name."""
    flat = counter_rng.uniform(_key("layer"), COLUMNS, rank * COLUMNS) - np.float32(0.5)
    return flat.astype(np.float64).reshape(rank, COLUMNS).T


@pytest.mark.parametrize("rank", [1, 4])
@pytest.mark.parametrize(
    ("options", "algorithm"),
    [("", reference_algorithms.TorchPowerSGD), (",alternate=true", reference_algorithms.EpfmlPowerSGD)],
)
def test_powersgd_equals_torch_s_and_the_alternating_one_epfml_s(
    rank: int, options: str, algorithm: Any
) -> None:
    run = SimulatedRanks(f"powersgd:rank={rank}{options}", RANKS, LAYER)
    reference = algorithm(first_factor(rank), RANKS, ROWS)
    for step in range(STEPS):
        expected = reference.step([gradient.double().numpy() for gradient in gradients(step)])
        assert_close(average_gradient(run, step), expected)
