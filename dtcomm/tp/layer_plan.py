"""Plans: which layers of a model are shared out, in which way, and what their activations travel in.

A plan maps name patterns to kinds, is the name of a ready one, or a file that `dtcomm tp calibrate` wrote, in which
each layer has a codec of its own.
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

#: What a plan may say of a module. packed3: three outputs side by side, each shared out (queries, keys and values).
KINDS = ("column", "column_gather", "column_packed3", "row", "vocabulary")
#: The kinds whose forward pass sends activations that are compressed.
SENDING = ("column_gather", "row", "vocabulary")
FORMAT = "dtcomm tp plan 1"

_GATED = {
    "*.self_attn.[qkv]_proj": "column",
    "*.self_attn.o_proj": "row",
    "*.mlp.gate_proj": "column",
    "*.mlp.up_proj": "column",
    "*.mlp.down_proj": "row",
}
#: Plans for models of these shapes, by transformers' ``config.model_type``.
PLANS: dict[str, Mapping[str, str]] = {
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


class Entry(NamedTuple):
    """What is done to a layer; ``codec`` None: the one that `compress` was given."""

    kind: str
    codec: str | None = None


#: Pattern → kind, or kind and codec.
Plan = Mapping[str, str | Entry]


def resolve(
    model: nn.Module, plan: Plan | str | Path | None, ranks: int
) -> dict[str, tuple[nn.Module, Entry]]:
    """Module name → module and what is done to it. ValueError says what does not fit the model."""
    found = _matches(model, read(plan, str(getattr(getattr(model, "config", None), "model_type", None))))
    config = getattr(model, "config", None)
    for what in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config, what, None)
        if isinstance(heads, int) and heads % ranks:
            raise ValueError(f"mesh: the model's {what}, {heads}, do not divide among {ranks} ranks")
    return found


def read(plan: Plan | str | Path | None, model_type: str = "None") -> Plan:
    """The plan that is meant: of the model's type, of a name, of a file (its name ends in .json), or itself."""
    if plan is None:
        if model_type not in PLANS:
            raise ValueError(
                f"plan: none for models of type {model_type}; give one, or a name: {', '.join(PLANS)}"
            )
        return PLANS[model_type]
    if isinstance(plan, os.PathLike) or (isinstance(plan, str) and plan.endswith(".json")):
        return _load(Path(plan))
    if isinstance(plan, str):
        if plan not in PLANS:
            raise ValueError(f"plan: unknown {plan!r}; valid: {', '.join(PLANS)}, a .json file, or patterns")
        return PLANS[plan]
    return plan


def write(path: str | Path, layers: Mapping[str, Entry], **told: Any) -> None:
    """A file for `compress`: the layers, and what else is to be kept of how they were chosen."""
    kept = {"format": FORMAT, **told, "layers": {name: entry._asdict() for name, entry in layers.items()}}
    Path(path).write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


def _load(path: Path) -> Plan:
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"plan: cannot read {path}: {error}") from None
    if not isinstance(kept, dict) or kept.get("format") != FORMAT or not isinstance(kept.get("layers"), dict):
        raise ValueError(f"plan: {path} is no plan: expected format {FORMAT!r} and layers")
    layers = {}
    for name, entry in kept["layers"].items():
        if not isinstance(entry, dict) or not isinstance(entry.get("kind"), str):
            raise ValueError(f"plan: {path}: {name} is {entry!r}; expected a kind and a codec")
        layers[name] = Entry(entry["kind"], entry.get("codec"))
    return layers


def _matches(model: nn.Module, plan: Plan) -> dict[str, tuple[nn.Module, Entry]]:
    modules = dict(model.named_modules())
    found: dict[str, tuple[nn.Module, Entry]] = {}
    for pattern, given in plan.items():
        entry = Entry(given) if isinstance(given, str) else given
        if entry.kind not in KINDS:
            raise ValueError(f"plan: {pattern!r} is {entry.kind!r}; valid: {', '.join(KINDS)}")
        if entry.codec is not None:
            parse(entry.codec)
        names = [name for name in modules if fnmatch.fnmatchcase(name, pattern)]
        if not names:
            raise ValueError(f"plan: {pattern!r} matches no module of {type(model).__name__}")
        found |= {name: (modules[name], entry) for name in names}
    return found


def packed(kind: str) -> int:
    """How many outputs lie side by side."""
    return 3 if kind == "column_packed3" else 1


def transposed(module: nn.Module) -> bool:
    """Does it keep its weight as [in, out]? GPT-2's Conv1D does."""
    return type(module).__name__ == "Conv1D"


def dense(module: nn.Module, name: str) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Weight [out, in] and bias of a linear layer."""
    weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
    if isinstance(weight, nn.Parameter) and weight.ndim == 2 and (bias is None or bias.ndim == 1):
        if isinstance(module, nn.Linear):
            return weight, bias
        if transposed(module):
            return weight.t(), bias
    raise ValueError(
        f"plan: {name} is a {type(module).__name__}; columns and rows are a Linear's or Conv1D's"
    )
