"""Swap the layers of an existing model for tensor-parallel ones, by a plan of name patterns."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from dtcomm.codecs import Codec
from dtcomm.tp.comm_config import Group, wire
from dtcomm.tp.embedding import VocabParallelEmbedding
from dtcomm.tp.layer_plan import Plan, dense, packed, resolve, transposed
from dtcomm.tp.linear import ColumnParallelLinear, RowParallelLinear
from dtcomm.tp.sharded_module import Sharded


@dataclass(frozen=True, kw_only=True)
class Swapped:
    """What was done: module name → kind, and the codecs that its activations and gradients travel in."""

    codec: str
    backward_codec: str
    layers: dict[str, str] = field(default_factory=dict)
    #: Of those layers whose codec the plan says: name → codec.
    codecs: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        kinds = _counted(self.layers)
        own = f" ({_counted(self.codecs)} by the plan)" if self.codecs else ""
        return (
            f"{len(self.layers)} layers ({kinds}): forward {self.codec}{own}, backward {self.backward_codec}"
        )


def _counted(named: dict[str, str]) -> str:
    return ", ".join(f"{count} {each}" for each, count in Counter(named.values()).items())


def compress(
    model: nn.Module,
    mesh: Group,
    plan: Plan | str | Path | None = None,
    codec: str | Codec = "int8",
    *,
    backward_codec: str | Codec = "none",
    algorithm: str = "auto",
    chunks: int | str = 1,
    latency: bool = True,
) -> Swapped:
    """Share the model's layers out among the ranks of `mesh`, in place; every rank starts with the whole model.

    plan: name pattern → one of `KINDS`, the name of one of `PLANS`, a file that `dtcomm tp calibrate` wrote (.json),
    whose layers have codecs of their own, or None: the plan of ``model.config.model_type``.
    codec, backward_codec, algorithm, chunks, latency: as of the layers. Attention heads must divide among the ranks.
    ValueError where a pattern matches nothing, a kind is unknown, or something does not divide; the model is
    unchanged then.
    """
    over = wire(codec, backward_codec, algorithm=algorithm, group=mesh)
    found = resolve(model, plan, over.ranks)
    made = {
        name: _shared(
            module, entry.kind, entry.codec or codec, backward_codec, algorithm, chunks, latency, mesh, name
        )
        for name, (module, entry) in found.items()
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
        layers={name: entry.kind for name, (_, entry) in found.items()},
        codecs={name: entry.codec for name, (_, entry) in found.items() if entry.codec is not None},
    )


def _shared(
    module: nn.Module,
    kind: str,
    codec: str | Codec,
    backward_codec: str | Codec,
    algorithm: str,
    chunks: int | str,
    latency: bool,
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
    weight, bias = dense(module, name)
    options: dict[str, Any] = {
        "codec": codec,
        "backward_codec": backward_codec,
        "algorithm": algorithm,
        "latency": latency,
        "transposed": transposed(module),
        "group": group,
        "device": "meta",
    }
    out_features, in_features = weight.shape
    if kind == "row":
        layer = RowParallelLinear(in_features, out_features, bias is not None, chunks=chunks, **options)
    else:
        gather = kind == "column_gather"
        layer = ColumnParallelLinear(
            in_features, out_features, bias is not None, gather_output=gather, packed=packed(kind), **options
        )
    kept = weight.t() if transposed(module) else weight
    layer.take({"weight": kept} if bias is None else {"weight": kept, "bias": bias})
    layer.train(module.training)
    return layer
