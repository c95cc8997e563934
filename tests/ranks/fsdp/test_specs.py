"""Compression specs and presets: what they parse to, and how models train with them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import dtcomm
from dtcomm import fsdp
from dtcomm.fsdp.options import FEEDBACKS, PARAMETER_PREFIXES, PRESETS, parse_spec
from dtcomm.fsdp.storage import FullResidual, LoCoResidual
from dtcomm.launch.ranks import run_ranks
from tests.ranks.fsdp.models import WIDTH, sharded, train
from tests.support.rank_tests import on_ranks


@pytest.mark.parametrize(
    ("spec", "prefixes", "prefix", "codecs"),
    [
        ("int8:block=256", PARAMETER_PREFIXES, "", ["int8:block=256"]),
        ("delta:int4:block=128", PARAMETER_PREFIXES, "delta", ["int4:block=128"]),
        ("loco:int4/int3", FEEDBACKS, "loco", ["int4", "int3"]),
        ("ef:topk:ratio=0.1", FEEDBACKS, "ef", ["topk:ratio=0.1"]),
    ],
)
def test_specs_consist_of_a_prefix_and_codecs(
    spec: str, prefixes: tuple[str, ...], prefix: str, codecs: list[str]
) -> None:
    parsed = parse_spec(spec, prefixes, "gradients")
    assert (parsed.prefix, [str(codec) for codec in parsed.codecs()]) == (prefix, codecs)
    assert parse_spec(str(parsed), prefixes, "gradients") == parsed


def compare_to_uncompressed(rank: int, ranks: int, options: dict[str, Any], tolerance: float) -> None:
    """Train with the specs and compare to uncompressed training."""
    mesh = init_device_mesh("cpu", (ranks,))
    expected = train(sharded(mesh), rank, steps=6)
    model = sharded(mesh)
    state = fsdp.compress(model, **options)
    actual = train(model, rank, steps=6)
    names = [name for name in expected if not name.startswith("gradient")]
    x, y = (torch.cat([values[name].flatten() for name in names]) for values in (expected, actual))
    assert torch.linalg.vector_norm(y - x) < tolerance * torch.linalg.vector_norm(x)
    # Every rank computes with the same parameters, and every module's collectives are dtcomm's.
    report = state.report()
    assert set(report.modules) == {"", "blocks.0", "blocks.1"} and not report.notes
    for by_kind in report.modules.values():
        assert by_kind["gradients"].calls == 6
        assert all(not traffic.reason for traffic in by_kind.values())
    with torch.no_grad():
        output = model(torch.ones(2, WIDTH))
    outputs = [torch.empty_like(output) for _ in range(ranks)]
    dist.all_gather(outputs, output)
    assert all(torch.equal(other, output) for other in outputs)


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_train(preset: str) -> None:
    run_ranks(compare_to_uncompressed, 2, {"preset": preset}, 0.05)


def test_explicit_specs_override_a_preset() -> None:
    run_ranks(compare_to_uncompressed, 3, {"preset": "sdp4bit", "gradients": "ef:int4:rotate=hadamard"}, 0.05)


@on_ranks(2)
def test_delta_sends_differences(rank: int, ranks: int) -> None:
    mesh = init_device_mesh("cpu", (ranks,))
    model = sharded(mesh)
    state = fsdp.compress(model, parameters="delta:int4:block=128")
    train(model, rank, steps=4)
    traffic = state.report().modules["blocks.0"]["parameters"]
    # One gather of values, three of differences; backward needs none.
    assert (traffic.calls, traffic.saved_calls) == (4, 4)
    plain = traffic.plain_bytes // 8
    assert traffic.wire_bytes < plain * (1 + 3 * 0.16)
    assert state.report().memory["references"] > 0

    def decoded_matrix() -> torch.Tensor:
        """Return the first matrix as the forward pass sees it."""
        weights: list[torch.Tensor] = []
        hook = model.blocks[0].up.register_forward_pre_hook(
            lambda module, _: weights.append(module.weight.detach().clone())
        )
        model(torch.zeros(1, WIDTH))
        hook.remove()
        return weights[0]

    exact = model.blocks[0].up.weight.full_tensor().detach()
    errors = [float(torch.linalg.vector_norm(decoded_matrix() - exact)) for _ in range(4)]
    # The error of one difference is part of the next: unchanged parameters converge to their exact values.
    assert errors[3] < 1e-2 * errors[0] or errors[3] < 1e-6
    saved = copy.deepcopy(model.state_dict())
    for value in saved.values():
        value.mul_(3.0)
    model.load_state_dict(saved)
    assert torch.equal(decoded_matrix(), model.blocks[0].up.weight.full_tensor().detach())


def test_loco_keeps_the_papers_moving_average() -> None:
    torch.manual_seed(0)
    residuals = LoCoResidual(beta=0.8, reset_calls=4)
    like = torch.randn(1000)
    assert not residuals.take("m", like).any()
    expected = torch.zeros(1000)
    for _ in range(3):
        lost = torch.randn(1000)
        residuals.give_back("m", residuals.take("m", like).copy_(lost))
        assert residuals.nbytes() < 1.1 * 1000
        expected = 0.8 * expected + 0.2 * lost
        kept = residuals.take("m", like).clone()
        assert torch.linalg.vector_norm(kept - expected) < 0.02 * torch.linalg.vector_norm(expected)
        expected = kept
    residuals.scale(0.5)
    assert torch.equal(residuals.take("m", like), 0.5 * expected)
    residuals.give_back("m", residuals.take("m", like))
    assert not residuals.take("m", like).any()


def test_small_gradients_arrive_although_loco_keeps_errors_in_8_bits() -> None:
    """A constant gradient of a fraction of the 8 bits' step, beside errors a hundred times as large."""
    residuals, total = LoCoResidual(), torch.zeros(256)
    gradient = torch.full((256,), 0.001)
    noise = torch.Generator().manual_seed(0)
    for step in range(1000):
        gradient[:16] = torch.randn(16, generator=noise)
        residual = residuals.take("m", gradient)
        payload = dtcomm.encode("int4:block=256", gradient, residual=residual)
        residuals.give_back("m", residual, key=step)
        total += dtcomm.decode("int4:block=256", payload, 256)
    arrived = float(total[16:].mean()) / (1000 * 0.001)
    assert 0.4 < arrived < 1.1  # the rest waits: LoCo's average holds a fifth of what was lost


RESUMED_OPTIONS: list[dict[str, Any]] = [
    {"gradients": "ef:int8:round=stochastic"},
    {"gradients": "loco:int4:block=128", "parameters": "delta:int4"},
    {"gradients": "ef:int4", "residual": "int8"},
]


@pytest.mark.parametrize("options", RESUMED_OPTIONS, ids=str)
@on_ranks(2)
def test_a_resumed_run_continues_bit_for_bit(rank: int, ranks: int, options: dict[str, Any]) -> None:
    mesh = init_device_mesh("cpu", (ranks,))

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
        optimizer.zero_grad()
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * number + rank))
        model(x).square().mean().backward()
        optimizer.step()

    def make_model() -> tuple[nn.Module, fsdp.FSDPState, torch.optim.Optimizer]:
        model = sharded(mesh)
        return model, fsdp.compress(model, **options), torch.optim.SGD(model.parameters(), lr=0.1)

    uninterrupted, _, optimizer = make_model()
    for number in range(6):
        step(uninterrupted, optimizer, number)
    first, state, optimizer = make_model()
    for number in range(3):
        step(first, optimizer, number)
    second, second_state, optimizer = make_model()
    second.load_state_dict(first.state_dict())
    second_state.load_state_dict(state.state_dict())
    for number in range(3, 6):
        step(second, optimizer, number)
    for (name, a), b in zip(uninterrupted.named_parameters(), second.parameters(), strict=True):
        assert torch.equal(a.full_tensor(), b.full_tensor()), name


def test_stored_forms_of_residuals() -> None:
    like, sizes = torch.randn(4096), {}
    for form in ("fp32", "bf16", "int8"):
        residuals = FullResidual(form)
        residual = residuals.take("m", like)
        residual.copy_(like)
        residuals.give_back("m", residual, key=1)
        sizes[form] = residuals.nbytes() / like.numel()
        difference = torch.linalg.vector_norm(residuals.take("m", like) - like) / torch.linalg.vector_norm(
            like
        )
        assert difference <= {"fp32": 0, "bf16": 4e-3, "int8": 1e-2}[form]
    assert (sizes["fp32"], sizes["bf16"]) == (4, 2) and sizes["int8"] < 1.07


def load_into_other_options(rank: int, ranks: int) -> list[tuple[str, bool]]:
    """Return the refusals, and whether strict=False loaded the residuals."""
    mesh = init_device_mesh("cpu", (ranks,))
    model = sharded(mesh)
    first = fsdp.compress(model, "ef:int8", "delta:int8")
    train(model, rank, steps=2)
    saved, found = first.state_dict(), []
    for gradients, parameters in (
        ("ef:int4", "delta:int8"),
        ("loco:int8", "delta:int8"),
        ("ef:int8", "int8"),
    ):
        model = sharded(mesh)
        state = fsdp.compress(model, gradients, parameters)
        with pytest.raises(ValueError) as error:
            state.load_state_dict(saved)
        assert not state.state_dict()["residuals"]
        state.load_state_dict(saved, strict=False)
        loaded = state.state_dict()["residuals"]
        equal = loaded.keys() == saved["residuals"].keys() and all(
            torch.equal(loaded[name], saved["residuals"][name]) for name in loaded
        )
        train(model, rank, steps=1)
        found.append((str(error.value), equal))
    return found


def test_a_state_of_other_options_is_refused() -> None:
    for (codec, kept), (feedback, kept_other), (parameters, kept_all) in run_ranks(
        load_into_other_options, 2
    ):
        assert codec.startswith("state: saved with gradients='int8' (here 'int4'); strict=False"), codec
        assert "feedback='ef' (here 'loco')" in feedback and not kept_other
        assert "parameters='delta:int8' (here 'int8')" in parameters
        assert kept and kept_all
