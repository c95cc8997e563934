"""Conversion of existing models: plain ones, and tiny random ones of the installed transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from dtcomm import tp
from dtcomm.tp import functional
from tests.support.rank_tests import on_ranks

transformers = pytest.importorskip("transformers", reason="pip install transformers")


class SmallModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 16, padding_idx=3)
        self.up = nn.Linear(16, 48)
        self.down = nn.Linear(48, 16)
        self.head = nn.Linear(16, 40, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        out: torch.Tensor = self.head(x + self.down(torch.tanh(self.up(x))))
        return out


class Adapted(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + x.mean(-1, keepdim=True)


PLAN = {"embed": "vocabulary", "up": "column", "down": "row", "head": "column_gather"}


@on_ranks(2)
def test_a_plain_model(rank: int, ranks: int) -> None:
    torch.manual_seed(0)
    dense, model = SmallModel(), SmallModel()
    model.load_state_dict(dense.state_dict())
    report = tp.compress(model, None, "none", PLAN)
    assert (
        str(report)
        == "4 layers (1 vocabulary, 1 column, 1 row, 1 column_gather): forward none, backward none"
    )
    tokens = torch.arange(20).view(2, 10)
    torch.testing.assert_close(model(tokens), dense(tokens), rtol=1e-5, atol=1e-5)
    dense(tokens).square().mean().backward()
    model(tokens).square().mean().backward()
    for name, parameter in model.named_parameters():
        layer, _, kind = name.rpartition(".")
        expected = model.get_submodule(layer).shard_of(kind, dense.get_parameter(name).grad)
        torch.testing.assert_close(parameter.grad, expected, rtol=1e-4, atol=1e-6)
    # Dense checkpoints still load.
    model.load_state_dict(dense.state_dict())
    assert rank or (not model.embed.weight.grad[3].any() and model.embed.weight.grad[4].any())


class OwnBlock(nn.Module):
    """Attention and MLP in one module, with names of its own, without a configuration."""

    def __init__(self, view: tuple[int, ...]) -> None:
        super().__init__()
        self.view, self.norm = view, nn.LayerNorm(16)
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(16, 16) for _ in range(4))
        self.fc1, self.fc2 = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            layer(x).view(*x.shape[:2], *self.view).transpose(1, 2) for layer in (self.wq, self.wk, self.wv)
        )
        y = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + self.wo(y)
        out: torch.Tensor = x + self.fc2(torch.relu(self.fc1(self.norm(x))))
        return out


@on_ranks(2)
def test_an_own_model(rank: int, ranks: int) -> None:
    """A block without a configuration is converted; a forward with a fixed number of heads is explained."""
    torch.manual_seed(0)
    model = nn.Sequential(OwnBlock((-1, 4)), OwnBlock((-1, 4)))
    x = torch.randn(2, 5, 16)
    expected = model(x)
    plan = dict.fromkeys(("*.wq", "*.wk", "*.wv", "*.fc1"), "column") | {"*.wo": "row", "*.fc2": "row"}
    tp.compress(model, None, "none", plan)
    torch.testing.assert_close(model(x), expected)
    fixed = nn.Sequential(OwnBlock((4, 4)))
    tp.compress(fixed, None, "none", plan)
    with pytest.raises(
        RuntimeError, match=r"(?s)shape '\[2, 5, 4, 4\]'.*view\(batch, length, -1, head_dim\)"
    ):
        fixed(x)


def tiny_model(kind: str, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    shared_options: dict[str, Any] = {"vocab_size": 64, "max_position_embeddings": 32}
    if kind == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0
        )
        return transformers.GPT2LMHeadModel(config)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    if kind == "gpt_neox":
        return transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**shared_options, **sizes))
    make = {"llama": transformers.LlamaForCausalLM, "qwen2": transformers.Qwen2ForCausalLM}[kind]
    configure = {"llama": transformers.LlamaConfig, "qwen2": transformers.Qwen2Config}[kind]
    return make(configure(**shared_options, **sizes, num_key_value_heads=2))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "qwen2", "gpt_neox", "gpt2"])
@on_ranks(2)
def test_models_of_transformers(rank: int, ranks: int, kind: str) -> None:
    tokens = torch.arange(24).view(2, 12) * 5 % 64
    dense = tiny_model(kind).eval()
    with torch.no_grad():
        expected = dense(tokens).logits
    for codec, tolerance in (("none", 1e-4), ("int8", 0.05)):
        model = tiny_model(kind).eval()
        report = tp.compress(model, None, codec=codec, backward_codec=codec)
        assert len(report.layers) == 2 * (4 if kind in ("gpt2", "gpt_neox") else 7)
        actual = model(tokens).logits
        error = torch.linalg.vector_norm(actual - expected) / torch.linalg.vector_norm(expected)
        assert error < tolerance, (codec, float(error))
        actual.square().mean().backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
        # States are those of the dense model: each model loads the other's.
        state = tp.full_state_dict(model)
        reloaded = tiny_model(kind, seed=1).eval()
        reloaded.load_state_dict(state)
        with torch.no_grad():
            assert torch.equal(reloaded(tokens).logits, expected)
        state_before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        model.load_state_dict(tiny_model(kind, seed=1).state_dict())
        assert not all(torch.equal(state_before[name], tensor) for name, tensor in model.state_dict().items())
        model.load_state_dict(dense.state_dict())
        assert all(torch.equal(state_before[name], tensor) for name, tensor in model.state_dict().items())


@on_ranks(2)
def test_styles_for_a_tp_plan(rank: int, ranks: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    from dtcomm.tp.hf_transformers import register

    tokens = torch.arange(24).view(2, 12) * 5 % 64
    mesh = init_device_mesh("cpu", (ranks,))
    dense = tiny_model("llama").eval()
    expected = dense(tokens).logits
    expected.square().mean().backward()
    backward_codecs = []
    all_reduce = functional.all_reduce
    functional.all_reduce = lambda x, comm, backward=False: (
        backward_codecs.append(str(comm.backward_codec)) if backward else None,
        all_reduce(x, comm, backward=backward),
    )[1]
    for codec, backward_codec, tolerance in (("none", "none", 1e-4), ("int8", "int6", 0.05)):
        rowwise, colwise = register(codec, backward_codec=backward_codec, latency=False)
        assert (rowwise, colwise) == (f"rowwise_{codec}", f"colwise_{codec}")
        model = tiny_model("llama").eval()
        plan = {}
        for name, _ in model.named_modules():
            if name.endswith(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")):
                plan |= {f"{name}.weight": colwise, name: colwise}
            elif name.endswith(("o_proj", "down_proj")):
                plan |= {f"{name}.weight": rowwise, name: rowwise}
        apply_tensor_parallelism(model, mesh, plan)
        for grad in (False, True):
            with torch.set_grad_enabled(grad):
                actual = model(tokens).logits
            error = torch.linalg.vector_norm(actual - expected) / torch.linalg.vector_norm(expected)
            assert error < tolerance, (codec, grad, float(error))
        actual.square().mean().backward()
        # Each of the two layers sums the gradients of five inputs.
        assert backward_codecs == [backward_codec] * 10
        backward_codecs.clear()
        gradient, dense_gradient = model.model.embed_tokens.weight.grad, dense.model.embed_tokens.weight.grad
        assert (gradient - dense_gradient).norm() < tolerance * dense_gradient.norm()


@on_ranks(2)
def test_invalid_plans_are_refused_and_change_nothing(rank: int, ranks: int) -> None:
    model = SmallModel()
    types_before = {name: type(module) for name, module in model.named_modules()}
    for plan, message in (
        ({"up": "diagonal"}, "'up' is 'diagonal'; valid: column"),
        ({"nowhere.*": "row"}, "'nowhere.\\*' matches no module of SmallModel"),
        ({"up": "vocabulary"}, "up is a Linear; the kind vocabulary expects an Embedding"),
        ({"embed": "row"}, "embed is a Embedding; the kinds column and row"),
        ("t5", "unknown 't5'; valid: llama"),
        (None, "no built-in plan for models of type 'SmallModel'"),
        ({"up": "column"}, r"plan: up \(column\) .* down takes whole, 48"),
        ({"down": "row", "head": "column_gather"}, r"plan: down \(row\) .* up gives whole, 48"),
    ):
        with pytest.raises(ValueError, match=message):
            tp.compress(model, None, plan=plan)
    for part, change in {
        "up": lambda model: model.up.register_forward_hook(lambda module, inputs, output: 2 * output),
        "down": lambda model: model.down.register_full_backward_hook(lambda module, inputs, outputs: None),
        "head": lambda model: setattr(model, "head", Adapted(16, 40)),
        "embed": lambda model: setattr(model.embed, "max_norm", 1.0),
        "embed has sparse": lambda model: setattr(model.embed, "sparse", True),
        "head|embed": lambda model: setattr(model.head, "weight", model.embed.weight),
    }.items():
        changed = SmallModel()
        change(changed)
        with pytest.raises(ValueError, match=f"plan: ({part})"):
            tp.compress(changed, None, "none", PLAN)
    assert {name: type(module) for name, module in model.named_modules()} == types_before
    odd = tiny_model("llama")
    odd.config.num_key_value_heads = 3
    with pytest.raises(ValueError, match="num_key_value_heads, 3, is not divisible by the 2"):
        tp.compress(odd, None)
