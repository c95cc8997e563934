"""Swap the layers of an existing model for tensor-parallel ones, by a plan of name patterns."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from dtcomm.codecs import Codec
from dtcomm.tp.embedding import VocabParallelEmbedding
from dtcomm.tp.linear import ColumnParallelLinear, RowParallelLinear
from dtcomm.tp.sharded import Sharded
from dtcomm.tp.wire import Group, wire

Plan = Mapping[str, str]
#: What a plan may say of a module. packed3: three outputs side by side, each shared out (queries, keys, values).
KINDS = ("column", "column_gather", "column_packed3", "row", "vocabulary")

_GATED = {
    "*.self_attn.[qkv]_proj": "column",
    "*.self_attn.o_proj": "row",
    "*.mlp.gate_proj": "column",
    "*.mlp.up_proj": "column",
    "*.mlp.down_proj": "row",
}
#: Plans for models of these shapes, by transformers' ``config.model_type``.
PLANS: dict[str, Plan] = {
    "llama": _GATED,
    "mistral": _GATED,
    "qwen2": _GATED,
    "qwen3": _GATED,
    "gpt_neox": {
        # Queries, keys and values of a head lie together, so whole heads are shared out.
        "*.attention.query_key_value": "column",
        "*.attention.dense": "row",
        "*.mlp.dense_h_to_4h": "column",
        "*.mlp.dense_4h_to_h": "row",
    },
    "gpt2": {
        "*.attn.c_attn": "column_packed3",
        "*.attn.c_proj": "row",
        "*.mlp.c_fc": "column",
        "*.mlp.c_proj": "row",
    },
}


@dataclass(frozen=True, kw_only=True)
class Swapped:
    """What was done: module name → kind, and the codecs that its activations and gradients travel in."""

    codec: str
    backward_codec: str
    layers: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        counts = {
            kind: list(self.layers.values()).count(kind) for kind in dict.fromkeys(self.layers.values())
        }
        kinds = ", ".join(f"{count} {kind}" for kind, count in counts.items())
        return f"{len(self.layers)} layers ({kinds}): forward {self.codec}, backward {self.backward_codec}"


def compress(
    model: nn.Module,
    mesh: Group,
    plan: Plan | str | None = None,
    codec: str | Codec = "int8",
    *,
    backward_codec: str | Codec = "none",
    algorithm: str = "direct",
    chunks: int = 1,
) -> Swapped:
    """Share the model's layers out among the ranks of `mesh`, in place; every rank starts with the whole model.

    plan: name pattern → one of `KINDS`, the name of one of `PLANS`, or None: the plan of ``model.config.model_type``.
    codec, backward_codec, algorithm, chunks: as of the layers. Attention heads must divide among the ranks.
    ValueError where a pattern matches nothing, a kind is unknown, or something does not divide; the model is
    unchanged then.
    """
    over = wire(codec, backward_codec, algorithm=algorithm, group=mesh)
    found = _matches(model, _plan(model, plan))
    _require_heads(model, over.ranks)
    made = {
        name: _shared(module, kind, codec, backward_codec, algorithm, chunks, mesh, name)
        for name, (module, kind) in found.items()
    }
    for name, layer in made.items():
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, layer)
    for module in model.modules():
        # GPT-2 cuts the joined queries, keys and values at this width.
        width = module.__dict__.get("split_size")
        if isinstance(width, int) and isinstance(getattr(module, "c_attn", None), Sharded):
            module.__dict__["split_size"] = width // over.ranks
    return Swapped(
        codec=str(over.codec),
        backward_codec=str(over.backward_codec),
        layers={name: kind for name, (_, kind) in found.items()},
    )


def _plan(model: nn.Module, plan: Plan | str | None) -> Plan:
    if plan is None:
        plan = str(getattr(getattr(model, "config", None), "model_type", None))
        if plan not in PLANS:
            raise ValueError(f"plan: none for models of type {plan}; give one, or a name: {', '.join(PLANS)}")
    if isinstance(plan, str):
        if plan not in PLANS:
            raise ValueError(f"plan: unknown {plan!r}; valid: {', '.join(PLANS)}, or patterns")
        return PLANS[plan]
    return plan


def _matches(model: nn.Module, plan: Plan) -> dict[str, tuple[nn.Module, str]]:
    modules = dict(model.named_modules())
    found: dict[str, tuple[nn.Module, str]] = {}
    for pattern, kind in plan.items():
        if kind not in KINDS:
            raise ValueError(f"plan: {pattern!r} is {kind!r}; valid: {', '.join(KINDS)}")
        names = [name for name in modules if fnmatch.fnmatchcase(name, pattern)]
        if not names:
            raise ValueError(f"plan: {pattern!r} matches no module of {type(model).__name__}")
        found |= {name: (modules[name], kind) for name in names}
    return found


def _require_heads(model: nn.Module, ranks: int) -> None:
    config = getattr(model, "config", None)
    for what in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config, what, None)
        if isinstance(heads, int) and heads % ranks:
            raise ValueError(f"mesh: the model's {what}, {heads}, do not divide among {ranks} ranks")


def _shared(
    module: nn.Module,
    kind: str,
    codec: str | Codec,
    backward_codec: str | Codec,
    algorithm: str,
    chunks: int,
    group: Group,
    name: str,
) -> Sharded:
    if kind == "vocabulary":
        if not isinstance(module, nn.Embedding):
            raise ValueError(f"plan: {name} is a {type(module).__name__}; a vocabulary is an Embedding's")
        rows, width = module.weight.shape
        layer: Sharded = VocabParallelEmbedding(
            rows, width, codec=codec, algorithm=algorithm, group=group, device="meta"
        )
        layer.take({"weight": module.weight})
        return layer
    weight, bias = _dense(module, name)
    options: dict[str, Any] = {
        "codec": codec,
        "backward_codec": backward_codec,
        "algorithm": algorithm,
        "group": group,
        "device": "meta",
    }
    out_features, in_features = weight.shape
    if kind == "row":
        layer = RowParallelLinear(in_features, out_features, bias is not None, chunks=chunks, **options)
    else:
        packed = 3 if kind == "column_packed3" else 1
        gather = kind == "column_gather"
        layer = ColumnParallelLinear(
            in_features, out_features, bias is not None, gather_output=gather, packed=packed, **options
        )
    layer.take({"weight": weight} if bias is None else {"weight": weight, "bias": bias})
    layer.train(module.training)
    return layer


def _dense(module: nn.Module, name: str) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Weight [out, in] and bias of a linear layer; GPT-2's Conv1D keeps its weight the other way round."""
    weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
    if isinstance(weight, nn.Parameter) and weight.ndim == 2 and (bias is None or bias.ndim == 1):
        if isinstance(module, nn.Linear):
            return weight, bias
        if type(module).__name__ == "Conv1D":
            turned = weight.detach().t()
            turned.requires_grad_(weight.requires_grad)
            return turned, bias
    raise ValueError(
        f"plan: {name} is a {type(module).__name__}; columns and rows are a Linear's or Conv1D's"
    )
