"""Compression specs and presets: what they parse to, and how models train with them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from dtcomm import fsdp
from dtcomm.fsdp.residual_store import FullResidual, LoCoResidual
from dtcomm.fsdp.spec import FEEDBACKS, PARAMETER_PREFIXES, find_preset, parse_spec
from dtcomm.launch.ranks import run_ranks
from tests.ranks.fsdp.models import WIDTH, sharded, train


@pytest.mark.parametrize(
    ("text", "prefixes", "prefix", "codecs"),
    [
        ("int8:block=256", PARAMETER_PREFIXES, "", ["int8:block=256"]),
        ("delta:int4:block=128", PARAMETER_PREFIXES, "delta", ["int4:block=128"]),
        ("loco:int4/int3", FEEDBACKS, "loco", ["int4", "int3"]),
        ("ef:topk:ratio=0.1", FEEDBACKS, "ef", ["topk:ratio=0.1"]),
    ],
)
def test_a_spec_is_a_prefix_and_codecs(
    text: str, prefixes: tuple[str, ...], prefix: str, codecs: list[str]
) -> None:
    parsed = parse_spec(text, prefixes, "gradients")
    assert (parsed.prefix, [str(codec) for codec in parsed.codecs()]) == (prefix, codecs)
    assert parse_spec(str(parsed), prefixes, "gradients") == parsed


def test_invalid_prefixes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"parameters: 'loco:' is not valid here.*'delta:'"):
        parse_spec("loco:int4", PARAMETER_PREFIXES, "parameters")
    with pytest.raises(ValueError, match=r"preset: 'zero' is not one of zero\+\+, loco, sdp4bit"):
        find_preset("zero")
    with pytest.raises(TypeError, match="gradients: expected a spec or a Codec, got int"):
        parse_spec(8, FEEDBACKS, "gradients")  # type: ignore[arg-type]
    for gradients, argument in (("int8", "int8"), ("loco:int8", "bf16"), ("ef:int8", "int4")):
        with pytest.raises(ValueError, match=r"^residual: "):
            run_ranks(refused, 1, gradients, argument)


def refused(rank: int, ranks: int, gradients: str, residual: str) -> None:
    fsdp.compress(sharded(init_device_mesh("cpu", (ranks,))), gradients, residual=residual)


def near(rank: int, ranks: int, options: dict[str, Any], tolerance: float) -> None:
    """Train with the specs and compare to uncompressed training."""
    mesh = init_device_mesh("cpu", (ranks,))
    expected = train(sharded(mesh), rank, steps=6)
    model = sharded(mesh)
    state = fsdp.compress(model, **options)
    got = train(model, rank, steps=6)
    names = [name for name in expected if not name.startswith("gradient")]
    want, have = (torch.cat([values[name].flatten() for name in names]) for values in (expected, got))
    assert torch.linalg.vector_norm(have - want) < tolerance * torch.linalg.vector_norm(want)
    # Every rank computes with the same parameters, and every module's collectives are dtcomm's.
    report = state.report()
    assert set(report.modules) == {"", "blocks.0", "blocks.1"} and not report.notes
    for kinds in report.modules.values():
        assert kinds["gradients"].calls == 6
        assert all(not traffic.uncompressed_reason for traffic in kinds.values())
    with torch.no_grad():
        out = model(torch.ones(2, WIDTH))
    outs = [torch.empty_like(out) for _ in range(ranks)]
    dist.all_gather(outs, out)
    assert all(torch.equal(each, out) for each in outs)


@pytest.mark.parametrize("preset", fsdp.PRESETS)
def test_presets_train(preset: str) -> None:
    run_ranks(near, 2, {"preset": preset}, 0.05)


def test_explicit_specs_override_a_preset() -> None:
    run_ranks(near, 3, {"preset": "sdp4bit", "gradients": "ef:int4:rotate=hadamard"}, 0.05)


def differences(rank: int, ranks: int) -> None:
    mesh = init_device_mesh("cpu", (ranks,))
    model = sharded(mesh)
    state = fsdp.compress(model, parameters="delta:int4:block=128")
    train(model, rank, steps=4)
    traffic = state.report().modules["blocks.0"]["parameters"]
    # One gather of values, three of differences; backward needs none.
    assert (traffic.calls, traffic.saved_calls) == (4, 4)
    plain = traffic.plain_bytes // 8
    assert traffic.wire_bytes < plain * (1 + 3 * 0.16)
    assert state.report().reference_bytes > 0

    def decoded() -> torch.Tensor:
        """Return the first matrix as the forward pass sees it."""
        seen: list[torch.Tensor] = []
        hook = model.blocks[0].up.register_forward_pre_hook(
            lambda module, _: seen.append(module.weight.detach().clone())
        )
        model(torch.zeros(1, WIDTH))
        hook.remove()
        return seen[0]

    exact = model.blocks[0].up.weight.full_tensor().detach()
    errors = [float(torch.linalg.vector_norm(decoded() - exact)) for _ in range(4)]
    # The error of one difference is part of the next: unchanged parameters converge to their exact values.
    assert errors[3] < 1e-2 * errors[0] or errors[3] < 1e-6
    saved = copy.deepcopy(model.state_dict())
    for value in saved.values():
        value.mul_(3.0)
    model.load_state_dict(saved)
    assert torch.equal(decoded(), model.blocks[0].up.weight.full_tensor().detach())


def test_delta_sends_differences() -> None:
    run_ranks(differences, 2)


def test_loco_keeps_the_papers_moving_average() -> None:
    torch.manual_seed(0)
    errors = LoCoResidual(beta=0.8, reset_calls=4)
    like = torch.randn(1000)
    assert not errors.take("m", like).any()
    expected = torch.zeros(1000)
    for _ in range(3):
        lost = torch.randn(1000)
        errors.put("m", lost)
        expected = 0.8 * expected + 0.2 * lost
        gap = torch.linalg.vector_norm(errors.take("m", like) - expected)
        assert gap < 0.02 * torch.linalg.vector_norm(expected)
        expected = errors.take("m", like)
    assert errors.nbytes() < 1.1 * 1000
    errors.scale(0.5)
    assert torch.equal(errors.take("m", like), 0.5 * expected)
    errors.put("m", torch.randn(1000))
    assert not errors.take("m", like).any()


RESUMED: list[dict[str, Any]] = [
    {"gradients": "ef:int8:round=stochastic"},
    {"gradients": "loco:int4:block=128", "parameters": "delta:int4"},
    {"gradients": "ef:int4", "residual": "int8"},
]


def resumed(rank: int, ranks: int, options: dict[str, Any]) -> None:
    mesh = init_device_mesh("cpu", (ranks,))

    def step(model: nn.Module, optimiser: torch.optim.Optimizer, number: int) -> None:
        optimiser.zero_grad()
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * number + rank))
        model(x).square().mean().backward()
        optimiser.step()

    def made() -> tuple[nn.Module, fsdp.State, torch.optim.Optimizer]:
        model = sharded(mesh)
        return model, fsdp.compress(model, **options), torch.optim.SGD(model.parameters(), lr=0.1)

    whole, _, optimiser = made()
    for number in range(6):
        step(whole, optimiser, number)
    first, state, optimiser = made()
    for number in range(3):
        step(first, optimiser, number)
    second, again, optimiser = made()
    second.load_state_dict(first.state_dict())
    again.load_state_dict(state.state_dict())
    for number in range(3, 6):
        step(second, optimiser, number)
    for (name, a), b in zip(whole.named_parameters(), second.parameters(), strict=True):
        assert torch.equal(a.full_tensor(), b.full_tensor()), name


@pytest.mark.parametrize("options", RESUMED, ids=str)
def test_a_resumed_run_continues_bit_for_bit(options: dict[str, Any]) -> None:
    run_ranks(resumed, 2, options)


def test_stored_forms_of_residuals() -> None:
    like, sizes = torch.randn(4096), {}
    for form in ("fp32", "bf16", "int8"):
        errors = FullResidual(form)
        residual = errors.take("m", like)
        residual.copy_(like)
        errors.put("m", residual, key=1)
        sizes[form] = errors.nbytes() / like.numel()
        gap = torch.linalg.vector_norm(errors.take("m", like) - like) / torch.linalg.vector_norm(like)
        assert gap <= {"fp32": 0, "bf16": 4e-3, "int8": 1e-2}[form]
    assert (sizes["fp32"], sizes["bf16"]) == (4, 2) and sizes["int8"] < 1.07


def states(rank: int, ranks: int) -> dict[str, Any]:
    model = sharded(init_device_mesh("cpu", (ranks,)))
    state = fsdp.compress(model, "ef:int8")
    train(model, rank, steps=2)
    return state.state_dict()


def continued(rank: int, ranks: int, saved: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    model = sharded(init_device_mesh("cpu", (ranks,)))
    state = fsdp.compress(model, "ef:int8")
    state.load_state_dict(saved)
    residuals: dict[str, torch.Tensor] = state.state_dict()["residuals"]
    train(model, rank, steps=1)
    return residuals


@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 2)])
def test_residuals_keep_their_sum_when_the_world_size_changes(before: int, after: int) -> None:
    saved = run_ranks(states, before)
    got = run_ranks(continued, after, saved)
    for name in saved[0]["residuals"]:
        total = sum(state["residuals"][name].double() for state in saved)
        # A new rank starts without residuals.
        kept = sum(each[name].double() for each in got if name in each)
        assert torch.allclose(kept, total, atol=1e-7), name  # type: ignore[arg-type]
