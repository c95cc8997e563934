"""`dtcomm.tp.compress`: replaces the layers of an existing model by tensor-parallel ones, as a plan says."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from dtcomm.codecs import Codec
from dtcomm.collectives import Algorithm
from dtcomm.tp.comm_config import GroupOrMesh, make_comm_config
from dtcomm.tp.layer_plan import (
    Plan,
    dense_weight_and_bias,
    is_transposed,
    packed_outputs,
    replace_module,
    resolve_plan,
)
from dtcomm.tp.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from dtcomm.tp.sharded_module import ShardedModule


@dataclass(frozen=True, kw_only=True)
class ConversionReport:
    """What `compress` did to a model; ``str()`` gives one line.

    Attributes:
        codec: Codec of the activations of layers that have none of their own.
        backward_codec: Codec of gradients.
        layers: Module name → kind (`KINDS`).
        codecs: Module name → codec, for layers whose codec the plan specifies.
    """

    codec: str
    backward_codec: str
    layers: dict[str, str] = field(default_factory=dict)
    codecs: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        kinds = _count_values(self.layers)
        from_plan = f" ({_count_values(self.codecs)} by the plan)" if self.codecs else ""
        return (
            f"{len(self.layers)} layers ({kinds}): forward {self.codec}{from_plan}, "
            f"backward {self.backward_codec}"
        )


def _count_values(mapping: dict[str, str]) -> str:
    return ", ".join(f"{count} {value}" for value, count in Counter(mapping.values()).items())


def compress(
    model: nn.Module,
    mesh: GroupOrMesh,
    plan: Plan | str | Path | None = None,
    codec: str | Codec = "int8",
    *,
    backward_codec: str | Codec = "none",
    algorithm: Algorithm = "auto",
    chunks: int | str = 1,
    latency: bool = True,
) -> ConversionReport:
    """Replace the model's layers, in place, by tensor-parallel layers with compressed communication.

    Every rank starts with the whole model and keeps its shards.

    Args:
        model: The model; the same on all ranks.
        mesh: One-dimensional device mesh, process group, or None for all ranks.
        plan: Which layers to replace: a mapping from name patterns to one of `KINDS`, the name of one of `PLANS`, a
            file that ``dtcomm tp calibrate`` wrote (its name ends in .json), which gives every layer its own codec, or
            None for the built-in plan of ``model.config.model_type``. Default: None.
        codec: Codec of the activations, a spec or a `Codec`. Default: ``"int8"``.
        backward_codec: Codec of the activations' gradients. Default: ``"none"``.
        algorithm: Algorithm of the sums, see `CommConfig`. Default: ``"auto"``.
        chunks: Chunks of tokens of the row-parallel layers, see `RowParallelLinear`. Default: 1.
        latency: Send small messages uncompressed where that is predicted to be faster. Default: True.

    Returns:
        The layers that were replaced and their codecs.

    Raises:
        ValueError: A pattern matches no module, a kind is unknown, or a size or the number of attention heads is not
            divisible by the number of ranks. The model is unchanged then.

    Example::

        report = dtcomm.tp.compress(model, mesh, codec="int8")           # Llama, Mistral, Qwen2/3, GPT-NeoX, GPT-2
        dtcomm.tp.compress(model, mesh, {"*.up": "column", "*.down": "row"}, "int4")
    """
    comm = make_comm_config(codec, backward_codec, algorithm=algorithm, group=mesh)
    modules = resolve_plan(model, plan, comm.world_size)
    options: dict[str, Any] = {"algorithm": algorithm, "group": mesh, "device": "meta"}
    linear_options = {"backward_codec": backward_codec, "latency": latency}
    layers: dict[str, ShardedModule] = {}
    for name, (module, entry) in modules.items():
        options["codec"] = entry.codec or codec
        if entry.kind == "vocabulary":
            layers[name] = _sharded_embedding(module, name, options)
        else:
            layers[name] = _sharded_linear(module, entry.kind, name, chunks, {**options, **linear_options})
    for name, layer in layers.items():
        replace_module(model, name, layer)
    for module in model.modules():
        # GPT-2 splits the joined queries, keys and values at this width.
        width = module.__dict__.get("split_size")
        if isinstance(width, int) and isinstance(getattr(module, "c_attn", None), ShardedModule):
            module.__dict__["split_size"] = width // comm.world_size
    return ConversionReport(
        codec=str(comm.codec),
        backward_codec=str(comm.backward_codec),
        layers={name: entry.kind for name, (_, entry) in modules.items()},
        codecs={name: entry.codec for name, (_, entry) in modules.items() if entry.codec is not None},
    )


def _sharded_embedding(module: nn.Module, name: str, options: dict[str, Any]) -> ShardedModule:
    if not isinstance(module, nn.Embedding):
        raise ValueError(
            f"plan: {name} is a {type(module).__name__}; the kind vocabulary expects an Embedding"
        )
    rows, width = module.weight.shape
    layer = VocabParallelEmbedding(rows, width, **options)
    layer.load_dense({"weight": module.weight})
    return layer


def _sharded_linear(
    module: nn.Module, kind: str, name: str, chunks: int | str, options: dict[str, Any]
) -> ShardedModule:
    weight, bias = dense_weight_and_bias(module, name)
    out_features, in_features = weight.shape
    transposed = is_transposed(module)
    layer: ShardedModule
    if kind == "row":
        layer = RowParallelLinear(
            in_features, out_features, bias is not None, chunks=chunks, transposed=transposed, **options
        )
    else:
        layer = ColumnParallelLinear(
            in_features,
            out_features,
            bias is not None,
            gather_output=kind == "column_gather",
            packed=packed_outputs(kind),
            transposed=transposed,
            **options,
        )
    stored = weight.t() if transposed else weight
    layer.load_dense({"weight": stored} if bias is None else {"weight": stored, "bias": bias})
    layer.train(module.training)
    return layer
