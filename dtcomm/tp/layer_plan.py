"""Layer plans: which layers of a model are cut over the ranks, how, and with which codec.

A plan maps name patterns to kinds of layers. It can be passed as a mapping, as the name of a built-in plan (`PLANS`),
or as a file that ``dtcomm tp calibrate`` wrote, in which every layer has its own codec. `dtcomm.tp.compress` and
`dtcomm.extensions.calibrate.emulate` resolve plans with `resolve_plan`.
"""

from __future__ import annotations

import fnmatch
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from dtcomm.codecs import codec as parse
from dtcomm.system import write_file

#: The kinds of layers; `docs/guides/tensor-parallel.md` has a table of them.
KINDS = (
    "column",
    "column_gather",
    "column_packed2",
    "column_packed3",
    "column_qkv",
    "row",
    "vocabulary",
    "experts",
    "replicated",
)
#: The kinds whose forward pass communicates activations.
SENDING = ("column_gather", "row", "vocabulary", "experts")
FORMAT = "dtcomm tp plan 1"


class PlanEntry(NamedTuple):
    """The kind of a layer, its codec (None: the one passed to `dtcomm.tp.compress`), and whether it may be absent."""

    kind: str
    codec: str | None = None
    optional: bool = False


#: Name pattern (as of `fnmatch`) → kind, or kind and codec.
Plan = Mapping[str, str | PlanEntry]

_SEPARATE_HEADS = {"*.self_attn.[qkv]_proj": "column", "*.self_attn.o_proj": "row"}
_GATED_MLP = {"*.mlp.gate_proj": "column", "*.mlp.up_proj": "column", "*.mlp.down_proj": "row"}
_GATED = {**_SEPARATE_HEADS, **_GATED_MLP}
# A rank's gradient of the weight that all heads have in common is that of its own heads.
_HEAD_NORMS = {"*.self_attn.[qk]_norm": "replicated"}
# Models mix layers with and without experts; the former may have an expert that all tokens take.
_MAY_BE_GATED = {
    "*.mlp*.gate_proj": PlanEntry("column", optional=True),
    "*.mlp*.up_proj": PlanEntry("column", optional=True),
    "*.mlp*.down_proj": PlanEntry("row", optional=True),
}
_BERT = {
    "*.attention.self.query": "column",
    "*.attention.self.key": "column",
    "*.attention.self.value": "column",
    "*.intermediate.dense": "column",
    "*.output.dense": "row",  # of attention and of the feed-forward block
}
#: Built-in plans, by transformers' ``config.model_type``.
PLANS: dict[str, Plan] = {
    "llama": _GATED,
    "mistral": _GATED,
    "qwen2": _GATED,
    "qwen3": {**_GATED, **_HEAD_NORMS},
    "gemma": _GATED,
    "gemma2": _GATED,
    "gemma3_text": {**_GATED, **_HEAD_NORMS},
    "olmo": _GATED,
    "phi": {
        "*.self_attn.[qkv]_proj": "column",
        "*.self_attn.dense": "row",
        "*.self_attn.[qk]_layernorm": PlanEntry("replicated", optional=True),
        "*.mlp.fc1": "column",
        "*.mlp.fc2": "row",
    },
    "phi3": {
        "*.self_attn.qkv_proj": "column_qkv",
        "*.self_attn.o_proj": "row",
        "*.mlp.gate_up_proj": "column_packed2",
        "*.mlp.down_proj": "row",
    },
    "mixtral": {**_SEPARATE_HEADS, "*.mlp.experts": "experts"},
    "qwen2_moe": {**_SEPARATE_HEADS, **_MAY_BE_GATED, "*.mlp.experts": "experts"},
    "qwen3_moe": {**_SEPARATE_HEADS, **_HEAD_NORMS, **_MAY_BE_GATED, "*.mlp.experts": "experts"},
    "opt": {
        "*.self_attn.[qkv]_proj": "column",
        "*.self_attn.out_proj": "row",
        "*.fc1": "column",
        "*.fc2": "row",
    },
    "bert": _BERT,
    "roberta": _BERT,
    "gpt_neox": {
        # Queries, keys and values of one head are adjacent, so cutting the layer's rows gives each rank whole heads.
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


def resolve_plan(
    model: nn.Module, plan: Plan | str | Path | None, world_size: int
) -> dict[str, tuple[nn.Module, PlanEntry]]:
    """Return the model's layers that a plan names: module name → module and plan entry.

    ValueError if the plan does not fit the model, or the attention heads are not divisible by the number of ranks.
    """
    config = getattr(model, "config", None)
    model_type = getattr(config, "model_type", None) or type(model).__name__
    layers = match_layers(model, read_plan(plan, model_type))
    for name in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config, name, None)
        if isinstance(heads, int) and heads % world_size:
            raise ValueError(f"mesh: the model's {name}, {heads}, is not divisible by the {world_size} ranks")
    _require_pairs(model, layers, config)
    return layers


def _require_pairs(model: nn.Module, layers: Mapping[str, tuple[nn.Module, PlanEntry]], config: Any) -> None:
    """Raise ValueError for a column layer whose outputs a whole layer takes, and a row layer that a whole one feeds.

    The partner is looked for in the module that has the layer, then in the modules around it, up to two.
    """
    linear = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    sizes: dict[str, dict[str, int]] = {
        "column": {},
        "row": {},
    }  # of what a column gives, and of what a row takes
    for name, (module, entry) in layers.items():
        if entry.kind in ("column", "column_packed2", "column_packed3", "column_qkv", "row"):
            out_features, in_features = dense_weight_and_bias(module, name)[0].shape
            row = entry.kind == "row"
            size = in_features if row else packed_sizes(entry.kind, out_features, config, name)[0]
            sizes["row" if row else "column"][name] = size
    for kind, partner in (("column", "row"), ("row", "column")):
        for name, size in sizes[kind].items():
            scope = name
            for _ in range(min(3, name.count(".") + 1)):
                scope = scope.rpartition(".")[0]
                inside = f"{scope}." if scope else ""
                partners = [other for path, other in sizes[partner].items() if path.startswith(inside)]
                if size in partners:
                    break
                for path, module in linear.items():
                    fits = size == (module.in_features if kind == "column" else module.out_features)
                    if fits and path not in layers and path.startswith(inside):
                        does = (
                            "gives each rank a part of what" if kind == "column" else "takes a part of what"
                        )
                        raise ValueError(
                            f"plan: {name} ({kind}) {does} {path} {'takes' if kind == 'column' else 'gives'} whole, "
                            f"{size} features; give {path} the kind {partner}, or leave both out"
                        )
                if partners:
                    break


def read_plan(plan: Plan | str | Path | None, model_type: str = "") -> Plan:
    """Return a plan as a mapping.

    ``plan`` is a mapping, the name of one of `PLANS`, a file (its name ends in .json), or None: the plan of
    ``model_type``, which is transformers' ``config.model_type``, or the class of a model that has none.
    """
    if plan is None:
        if model_type not in PLANS:
            raise ValueError(
                f"plan: no built-in plan for models of type {model_type!r}; pass a name: {', '.join(PLANS)}, or a "
                "mapping from name patterns to kinds, such as {'*.up': 'column', '*.down': 'row'}"
            )
        return PLANS[model_type]
    if isinstance(plan, os.PathLike) or (isinstance(plan, str) and plan.endswith(".json")):
        return _load(Path(plan))
    if isinstance(plan, str):
        if plan not in PLANS:
            raise ValueError(
                f"plan: unknown {plan!r}; valid: {', '.join(PLANS)}, patterns, or a plan or .json file of "
                "dtcomm.extensions.calibrate"
            )
        return PLANS[plan]
    return plan


def write_plan(path: str | Path, layers: Mapping[str, PlanEntry], **metadata: Any) -> None:
    """Write a plan file for `dtcomm.tp.compress`: the layers, and metadata about how the plan was chosen."""
    entries = {name: {"kind": entry.kind, "codec": entry.codec} for name, entry in layers.items()}
    content = {"format": FORMAT, **metadata, "layers": entries}
    write_file(path, json.dumps(content, indent=1) + "\n")


def _load(path: Path) -> Plan:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"plan: cannot read {path}: {error}") from None
    if (
        not isinstance(content, dict)
        or content.get("format") != FORMAT
        or not isinstance(content.get("layers"), dict)
    ):
        raise ValueError(f"plan: {path} is not a plan: expected format {FORMAT!r} and layers")
    layers = {}
    for name, entry in content["layers"].items():
        if not isinstance(entry, dict) or not isinstance(entry.get("kind"), str):
            raise ValueError(f"plan: {path}: {name} is {entry!r}; expected a kind and a codec")
        layers[name] = PlanEntry(entry["kind"], entry.get("codec"))
    return layers


def match_layers(model: nn.Module, plan: Plan) -> dict[str, tuple[nn.Module, PlanEntry]]:
    modules = dict(model.named_modules())
    layers: dict[str, tuple[nn.Module, PlanEntry]] = {}
    for pattern, value in plan.items():
        entry = PlanEntry(value) if isinstance(value, str) else PlanEntry(*value)
        if entry.kind not in KINDS:
            raise ValueError(f"plan: {pattern!r} is {entry.kind!r}; valid: {', '.join(KINDS)}")
        if entry.codec is not None:
            parse(entry.codec)
        names = [name for name in modules if fnmatch.fnmatchcase(name, pattern)]
        if not names and not entry.optional:
            raise ValueError(f"plan: {pattern!r} matches no module of {type(model).__name__}")
        layers |= {name: (modules[name], entry) for name in names}
    return layers


def replace_module(model: nn.Module, name: str, module: nn.Module) -> None:
    """Put ``module`` in the place of the submodule ``name``."""
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, module)


def packed_sizes(kind: str, out_features: int, config: Any, name: str) -> tuple[int, ...]:
    """Return the sizes of the outputs that lie side by side in the layer ``name`` of this kind.

    ``config`` is that of the model, from which ``column_qkv`` reads the numbers of heads. ValueError if the outputs do
    not consist of such parts.
    """
    if kind == "column_qkv":
        heads = getattr(config, "num_attention_heads", None)
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        if not isinstance(heads, int) or not isinstance(kv_heads, int):
            raise ValueError(f"plan: {name}: column_qkv expects a model with config.num_attention_heads")
        head_dim, rest = divmod(out_features, heads + 2 * kv_heads)
        if rest:
            raise ValueError(
                f"plan: {name}: {out_features} outputs are not {heads} heads of queries and {kv_heads} each of keys "
                "and values"
            )
        return heads * head_dim, kv_heads * head_dim, kv_heads * head_dim
    parts = {"column_packed2": 2, "column_packed3": 3}.get(kind, 1)
    if out_features % parts:
        raise ValueError(
            f"plan: {name}: {out_features} outputs are not {parts} of equal size, as {kind} expects"
        )
    return (out_features // parts,) * parts


def is_transposed(module: nn.Module) -> bool:
    """Return whether a linear module stores its weight as [in_features, out_features], as GPT-2's Conv1D does."""
    return type(module).__name__ == "Conv1D"


def dense_weight_and_bias(module: nn.Module, name: str) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the weight, as [out_features, in_features], and the bias of a linear module; else ValueError."""
    weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
    if isinstance(weight, nn.Parameter) and weight.ndim == 2 and (bias is None or bias.ndim == 1):
        if isinstance(module, nn.Linear):
            return weight, bias
        if is_transposed(module):
            return weight.t(), bias
    raise ValueError(
        f"plan: {name} is a {type(module).__name__}; the kinds column and row expect a Linear or a Conv1D"
    )
