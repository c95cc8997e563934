"""The emulation on tiny random models of transformers, compared to the dense models."""

from __future__ import annotations

import pytest
import torch

from dtcomm import tp
from dtcomm.extensions.calibrate.emulate import emulate, restore
from tests.ranks.tp.test_ready_plans import TOKENS
from tests.support.rank_tests import on_ranks
from tests.support.tiny_models import tiny_model

pytest.importorskip("transformers", reason="pip install transformers")


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
