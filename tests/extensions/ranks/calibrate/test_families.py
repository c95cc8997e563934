"""Proposed plans and the emulation on tiny random models of transformers, compared to the dense models."""

from __future__ import annotations

import pytest
import torch

from dtcomm import tp
from dtcomm.extensions.calibrate import propose_plan
from dtcomm.extensions.calibrate.emulate import emulate, restore
from dtcomm.launch.ranks import run_ranks
from tests.ranks.tp.test_ready_plans import TOKENS, compare_gradients
from tests.support.rank_tests import on_ranks
from tests.support.tiny_models import tiny_model

pytest.importorskip("transformers", reason="pip install transformers")


def compare_proposals(rank: int, ranks: int, families: tuple[str, ...]) -> None:
    """Plans that `propose_plan` found for families without a ready one."""
    for family in families:
        dense, model = tiny_model(family), tiny_model(family)
        state = tp.compress(model, None, "none", propose_plan(model, ranks).plan)
        expected, logits = dense(TOKENS).logits, model(TOKENS).logits
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5, msg=family)
        expected.square().mean().backward()
        logits.square().mean().backward()
        compare_gradients(family, model, dense, state)


@pytest.mark.slow
def test_proposed_plans_give_the_dense_models_logits_and_gradients() -> None:
    run_ranks(compare_proposals, 2, ("granite", "olmo2", "distilbert", "gptj", "falcon"), timeout=120)


@pytest.mark.parametrize("family", [pytest.param("mixtral", marks=pytest.mark.slow), "phi3"])
def test_emulated_ranks_give_the_dense_models_logits(family: str) -> None:
    model = tiny_model(family)
    with torch.no_grad():
        expected = model(TOKENS).logits
        layers = emulate(model, 2, None, "none")
        emulated = model(TOKENS).logits
        restore(model, layers)
    assert {layer.kind for layer in layers.values()} >= {
        "row",
        "experts" if family == "mixtral" else "column_qkv",
    }
    torch.testing.assert_close(emulated, expected, rtol=1e-4, atol=1e-5)


@on_ranks(2)
def test_emulated_experts_have_the_bits_of_the_ranks(rank: int, ranks: int) -> None:
    """The emulation of compressed experts has the bits of the ranks."""
    experts = tiny_model("mixtral").model.layers[0].mlp
    torch.manual_seed(1)
    x = torch.randn(2, 12, 32)
    holder = torch.nn.ModuleDict({"mlp": experts})
    with torch.no_grad():
        layers = emulate(holder, ranks, {"mlp.experts": "experts"}, "int8")
        emulated = holder["mlp"](x)
        restore(holder, layers)
        tp.compress(holder, None, "int8", {"mlp.experts": "experts"}, latency=False)
        assert torch.equal(holder["mlp"](x), emulated)
