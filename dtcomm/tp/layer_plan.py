"""Layer plans: which layers of a model are cut over the ranks, how, and with which codec.

A plan maps name patterns to kinds of layers. It can be passed as a mapping, as the name of a built-in plan (`PLANS`),
or as a file that ``dtcomm tp calibrate`` wrote, in which every layer has its own codec. `dtcomm.tp.compress` and
`dtcomm.tp.emulate` resolve plans with `resolve_plan`.
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

#: The kinds of layers. column_packed3 is a column-parallel layer with three outputs side by side (queries, keys and
#: values), each of which is cut over the ranks by itself.
KINDS = ("column", "column_gather", "column_packed3", "row", "vocabulary")
#: The kinds whose forward pass communicates activations.
SENDING = ("column_gather", "row", "vocabulary")
FORMAT = "dtcomm tp plan 1"

_GATED = {
    "*.self_attn.[qkv]_proj": "column",
    "*.self_attn.o_proj": "row",
    "*.mlp.gate_proj": "column",
    "*.mlp.up_proj": "column",
    "*.mlp.down_proj": "row",
}
#: Built-in plans, by transformers' ``config.model_type``.
PLANS: dict[str, Mapping[str, str]] = {
    "llama": _GATED,
    "mistral": _GATED,
    "qwen2": _GATED,
    "qwen3": _GATED,
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


class PlanEntry(NamedTuple):
    """The kind of a layer and its codec; a codec of None is the one passed to `dtcomm.tp.compress`."""

    kind: str
    codec: str | None = None


#: Name pattern (as of `fnmatch`) → kind, or kind and codec.
Plan = Mapping[str, str | PlanEntry]


def resolve_plan(
    model: nn.Module, plan: Plan | str | Path | None, world_size: int
) -> dict[str, tuple[nn.Module, PlanEntry]]:
    """Return the model's layers that a plan names: module name → module and plan entry.

    Raises:
        ValueError: The plan does not fit the model, or the attention heads are not divisible by the number of ranks.
    """
    config = getattr(model, "config", None)
    model_type = getattr(config, "model_type", None) or type(model).__name__
    layers = _match_layers(model, read_plan(plan, model_type))
    for name in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config, name, None)
        if isinstance(heads, int) and heads % world_size:
            raise ValueError(f"mesh: the model's {name}, {heads}, is not divisible by the {world_size} ranks")
    return layers


def read_plan(plan: Plan | str | Path | None, model_type: str = "") -> Plan:
    """Return a plan as a mapping.

    Args:
        plan: A mapping, the name of one of `PLANS`, a file (its name ends in .json), or None: the plan of
            ``model_type``.
        model_type: transformers' ``config.model_type``, or the class of a model that has none.

    Raises:
        ValueError: There is no such plan, or the file is not a plan.
    """
    if plan is None:
        if model_type not in PLANS:
            raise ValueError(
                f"plan: no built-in plan for models of type {model_type!r}; pass a plan, or a name: {', '.join(PLANS)}"
            )
        return PLANS[model_type]
    if isinstance(plan, os.PathLike) or (isinstance(plan, str) and plan.endswith(".json")):
        return _load(Path(plan))
    if isinstance(plan, str):
        if plan not in PLANS:
            raise ValueError(f"plan: unknown {plan!r}; valid: {', '.join(PLANS)}, a .json file, or patterns")
        return PLANS[plan]
    return plan


def write_plan(path: str | Path, layers: Mapping[str, PlanEntry], **metadata: Any) -> None:
    """Write a plan file for `dtcomm.tp.compress`: the layers, and metadata about how the plan was chosen."""
    entries = {name: entry._asdict() for name, entry in layers.items()}
    content = {"format": FORMAT, **metadata, "layers": entries}
    Path(path).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


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


def _match_layers(model: nn.Module, plan: Plan) -> dict[str, tuple[nn.Module, PlanEntry]]:
    modules = dict(model.named_modules())
    layers: dict[str, tuple[nn.Module, PlanEntry]] = {}
    for pattern, value in plan.items():
        entry = PlanEntry(value) if isinstance(value, str) else value
        if entry.kind not in KINDS:
            raise ValueError(f"plan: {pattern!r} is {entry.kind!r}; valid: {', '.join(KINDS)}")
        if entry.codec is not None:
            parse(entry.codec)
        names = [name for name in modules if fnmatch.fnmatchcase(name, pattern)]
        if not names:
            raise ValueError(f"plan: {pattern!r} matches no module of {type(model).__name__}")
        layers |= {name: (modules[name], entry) for name in names}
    return layers


def replace_module(model: nn.Module, name: str, module: nn.Module) -> None:
    """Put ``module`` in the place of the submodule ``name``."""
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, module)


def packed_outputs(kind: str) -> int:
    """Return the number of outputs that lie side by side in a layer of this kind."""
    return 3 if kind == "column_packed3" else 1


def is_transposed(module: nn.Module) -> bool:
    """Return whether a linear module stores its weight as [in_features, out_features], as GPT-2's Conv1D does."""
    return type(module).__name__ == "Conv1D"


def dense_weight_and_bias(module: nn.Module, name: str) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the weight, as [out_features, in_features], and the bias of a linear module.

    Raises:
        ValueError: It is not a linear module; the message contains ``name``.
    """
    weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
    if isinstance(weight, nn.Parameter) and weight.ndim == 2 and (bias is None or bias.ndim == 1):
        if isinstance(module, nn.Linear):
            return weight, bias
        if is_transposed(module):
            return weight.t(), bias
    raise ValueError(
        f"plan: {name} is a {type(module).__name__}; the kinds column and row expect a Linear or a Conv1D"
    )
