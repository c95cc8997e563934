"""The ready plans on tiny random models of transformers: logits, gradients and states are those of the dense model."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dtcomm import tp
from dtcomm.launch.ranks import run_ranks
from dtcomm.tp.layer_plan import PLANS
from tests.support.rank_tests import on_ranks
from tests.support.tiny_models import FAMILIES, OTHERS, tiny_model

pytest.importorskip("transformers", reason="pip install transformers")

TOKENS = torch.arange(24).view(2, 12) * 5 % 64
NEW_FAMILIES = tuple(sorted(set(FAMILIES) - {"llama", "qwen2", "gpt_neox", "gpt2"}))


def compare_families(rank: int, ranks: int, families: tuple[str, ...]) -> None:
    for family in families:
        dense = tiny_model(family)
        expected = dense(TOKENS).logits
        expected.square().mean().backward()
        model = tiny_model(family)
        state = tp.compress(model, None, "none")
        logits = model(TOKENS).logits
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5, msg=family)
        logits.square().mean().backward()
        compare_gradients(family, model, dense, state)
        full = tp.full_state_dict(model)
        assert full.keys() == dense.state_dict().keys(), family
        assert all(torch.equal(full[name], tensor) for name, tensor in dense.state_dict().items()), family
        with torch.no_grad():
            compressed = tiny_model(family)
            tp.compress(compressed, None, "int8", latency=False)
            actual = compressed(TOKENS).logits
            assert 0 < (actual - expected).norm() < 0.1 * expected.norm(), family


def compare_gradients(family: str, model: Any, dense: Any, state: tp.TPState) -> None:
    """Compare all gradients: those of shards with the shards of the dense model's, the others whole."""
    for name, parameter in model.named_parameters():
        layer, _, kind = name.rpartition(".")
        gradient = dense.get_parameter(name).grad
        if gradient is None:  # no token was sent to the expert, or the parameter is not used
            assert parameter.grad is None or not parameter.grad.any(), (family, name)
            continue
        if layer in state.layers:
            gradient = model.get_submodule(layer).shard_of(kind, gradient)
        error = (parameter.grad - gradient).norm() / gradient.norm().clamp(min=1e-6)
        assert error < 1e-3, (family, name, float(error))


@pytest.mark.parametrize("half", [0, 1])
@pytest.mark.slow
def test_plans_give_the_dense_models_logits_gradients_and_states(half: int) -> None:
    run_ranks(compare_families, 2, NEW_FAMILIES[half::2], timeout=120)


def compare_own_plan(rank: int, ranks: int, family: str) -> None:
    dense, model = tiny_model(family), tiny_model(family)
    kinds = {"colwise": "column", "rowwise": "row"}
    own = model.config.base_model_tp_plan
    plan = {f"*{name}": kinds[style] for name, style in own.items() if style in kinds}
    state = tp.compress(model, None, "none", plan)
    assert set(state.layers.values()) == {"column", "row"}
    expected, logits = dense(TOKENS).logits, model(TOKENS).logits
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)
    expected.square().mean().backward()
    logits.square().mean().backward()
    compare_gradients(family, model, dense, state)


@pytest.mark.parametrize("family", OTHERS)
def test_transformers_own_plans_give_the_dense_models_logits_and_gradients(family: str) -> None:
    run_ranks(compare_own_plan, 2, family, timeout=120)


def test_all_ready_plans_are_tested() -> None:
    assert FAMILIES.keys() == PLANS.keys()


@on_ranks(2)
def test_modules_of_another_kind_are_refused(rank: int, ranks: int) -> None:
    model = tiny_model("mixtral")
    for plan, message in (
        ({"*.mlp.gate": "experts"}, r"mlp\.gate is a MixtralTopKRouter; the kind experts expects"),
        (
            {"*.mlp": "replicated"},
            "MixtralSparseMoeBlock; the kind replicated expects a module with parameters",
        ),
        ({"*.q_proj": "column_packed3"}, "32 outputs are not 3 of equal size, as column_packed3 expects"),
    ):
        with pytest.raises(ValueError, match=message):
            tp.compress(model, None, plan=plan)


@on_ranks(2, timeout=120)
def test_detach_gives_layers_of_every_kind_back(rank: int, ranks: int) -> None:
    kinds = set()
    for family in ("gpt2", "llama", "mixtral", "phi3", "qwen3"):
        dense, model = tiny_model(family), tiny_model(family)
        state = tp.compress(model, None, "int8")
        kinds |= set(state.layers.values())
        model(TOKENS)
        state.detach()
        for (name, module), (_, whole) in zip(model.named_modules(), dense.named_modules(), strict=True):
            assert type(module) is type(whole), (family, name)
            plain = {key: value for key, value in vars(whole).items() if isinstance(value, int | float | str)}
            assert plain == {key: vars(module)[key] for key in plain}, (family, name)
            config = getattr(whole, "config", None)
            assert config is None or module.config.to_dict() == config.to_dict(), (family, name)
        own = model.state_dict()
        assert all(torch.equal(own.pop(name), tensor) for name, tensor in dense.state_dict().items())
        assert not own and torch.equal(model(TOKENS).logits, dense(TOKENS).logits), family
    assert kinds >= {"column", "column_packed3", "column_qkv", "row", "experts", "replicated"}, kinds
    embedding = torch.nn.Sequential(torch.nn.Embedding(64, 8, padding_idx=3))
    before = embedding[0].weight.detach().clone()
    tp.compress(embedding, None, "int8", {"0": "vocabulary"}).detach()
    assert type(embedding[0]) is torch.nn.Embedding and embedding[0].padding_idx == 3
    assert torch.equal(embedding[0].weight, before)
