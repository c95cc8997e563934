"""`propose_plan`: finds a plan for a model that has none, and says why each layer is cut or stays whole.

It reads names and shapes, and no weights, so the model may be on the meta device. It recognizes

- attention with separate projections of queries, keys and values, and the projection of its output,
- joined projections of the classes in `JOINED`, whose order of outputs is known,
- feed-forward blocks inside the repeated layers: a linear layer or two (gated) that widen, and one that narrows,
- mixtures of experts that keep the weights of all experts in one tensor, as transformers' do.

A block is proposed as a whole or not at all: a column-parallel layer without its row-parallel partner would be wrong.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import nn

from dtcomm.arguments import require_int
from dtcomm.profiling.summary import format_table
from dtcomm.tp import layer_plan
from dtcomm.tp.layer_plan import PLANS, PlanEntry, dense_weight_and_bias, match_layers, packed_sizes
from dtcomm.tp.layers import experts_features

#: Kind of a module that every rank keeps whole and computes as before.
WHOLE = "whole"
#: Class of an attention module → name of its joined projection and the kind of its layer.
JOINED = {
    "CausalSelfAttention": ("c_attn", "column_packed3"),  # of nanoGPT
    "GPT2Attention": ("c_attn", "column_packed3"),
    "GPTNeoXAttention": ("query_key_value", "column"),
    "Phi3Attention": ("qkv_proj", "column_qkv"),
}
#: Class of a feed-forward block → name of its joined gate and its kind.
JOINED_GATES = {"Phi3MLP": ("gate_up_proj", "column_packed2")}
_QUERY = ("q_proj", "query", "q_lin", "q", "wq")
_KEY = ("k_proj", "key", "k_lin", "k", "wk")
_VALUE = ("v_proj", "value", "v_lin", "v", "wv")
_ATTENTION = re.compile(r"attn|attention", re.IGNORECASE)
_DOWN = ("down_proj", "fc2", "c_proj", "dense_4h_to_h", "lin2", "w2", "down", "wo", "fc_out")


@dataclass(frozen=True, kw_only=True)
class ProposedLayer:
    """Modules of one kind in equal layers of a model.

    Attributes:
        pattern: Their name, with * for the number of the layer.
        count: How many there are.
        kind: One of `KINDS`, or ``"whole"``.
        shape: The shape of the weight, as [out, in] for linear layers; [experts, hidden, width] for experts.
        reason: Why.
    """

    pattern: str
    count: int
    kind: str
    shape: tuple[int, ...]
    reason: str


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """What `propose_plan` found; ``str()`` gives a table.

    Attributes:
        model: The model's class.
        model_type: transformers' ``config.model_type``, or empty.
        ranks: Number of ranks.
        rows: The layers, in the model's order.
        plan: The plan, as `dtcomm.tp.compress` takes it; empty if nothing can be cut.
        ready: The built-in plan of the model's type that names the same layers and kinds, or empty.
        parameters: Number of the model's parameters.
        rank_parameters: Number of those of one rank.
        sums: Sums of activations in a forward pass, each of as many elements for a token as the model is wide.
    """

    model: str
    model_type: str
    ranks: int
    rows: tuple[ProposedLayer, ...]
    plan: dict[str, str]
    ready: str
    parameters: int
    rank_parameters: int
    sums: int

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self) | {"rows": [asdict(row) | {"shape": list(row.shape)} for row in self.rows]}

    def write(self, path: str | Path) -> None:
        """Write a plan file for `dtcomm.tp.compress`.

        Args:
            path: The file; its name must end in ``.json``.

        Raises:
            ValueError: The name has another ending, or there is nothing to cut.
        """
        if Path(path).suffix != ".json":
            raise ValueError(f"path: {path}: the name of a plan file ends in .json")
        if not self.plan:
            raise ValueError(f"path: there is no plan to write: no layer of {self.model} can be cut")
        layers = {pattern: PlanEntry(kind) for pattern, kind in self.plan.items()}
        layer_plan.write_plan(path, layers, model=self.model, ranks=self.ranks)

    def __str__(self) -> str:
        head = ("layer", "number", "kind", "weight", "why")
        cells = [
            (row.pattern, str(row.count), row.kind, "×".join(map(str, row.shape)), row.reason)
            for row in self.rows
        ]
        lines = list(format_table(head, cells, left={0, 2, 4}))
        lines.append(
            f"{self.model} on {self.ranks} ranks: {self.parameters:,} parameters, {self.rank_parameters:,} on each; "
            f"{self.sums} sums in a forward pass"
        )
        if self.ready:
            lines.append(
                f"the same as the built-in plan {self.ready!r}, which dtcomm.tp.compress uses by itself"
            )
        elif not self.plan:
            lines.append("no layer can be cut")
        return "\n".join(lines)


def propose_plan(
    model: nn.Module, ranks: int, *, heads: int | tuple[int, int] | None = None, vocabulary: bool = False
) -> Proposal:
    """Propose a plan for a model: which layers `dtcomm.tp.compress` can cut over the ranks, and how.

    Names and shapes show which layers belong together, not what happens between them. Compare the logits of the first
    step with the dense model's before you rely on a plan for a model that has no built-in one.

    Args:
        model: The model; it may be on the meta device.
        ranks: Number of ranks that share each layer.
        heads: Number of attention heads, or of those of queries and of those of keys and values. Default: that of the
            model's configuration or of its attention modules.
        vocabulary: Cut the embedding and the output layer too, where they are not tied. Default: False.

    Returns:
        The proposal: rows with reasons, and ``plan``.

    Raises:
        TypeError: ``model`` is not a module, or ``ranks`` or ``heads`` not an integer.
        ValueError: ``ranks`` or ``heads`` is below 1.

    Example::

        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        proposal = dtcomm.extensions.calibrate.propose_plan(model, 4)
        print(proposal)
        dtcomm.tp.compress(real_model, mesh, "int8", plan=proposal.plan)
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
    require_int("ranks", ranks, 1)
    counts = heads if isinstance(heads, tuple) else () if heads is None else (heads, heads)
    for count in counts:
        require_int("heads", count, 1)
    search = _Search(model, ranks, counts)
    search.run(vocabulary)
    kinds = {name: kind for name, (kind, _) in search.found.items() if kind != WHOLE}
    model_type = getattr(search.config, "model_type", "") or ""
    ready = ""
    if kinds and model_type in PLANS and _kinds_of_plan(model, model_type) == kinds:
        ready = model_type
    shards = {
        id(parameter): parameter.numel() - parameter.numel() // ranks
        for name, kind in kinds.items()
        if kind != "replicated"
        for key, parameter in search.modules[name].named_parameters()
        if not (kind == "row" and key == "bias")
    }
    total = sum(parameter.numel() for parameter in model.parameters())
    return Proposal(
        model=type(model).__name__, model_type=model_type, ranks=ranks, rows=tuple(_rows(search)),
        plan=_patterns(model, kinds), ready=ready, parameters=total, rank_parameters=total - sum(shards.values()),
        sums=sum(kind in ("row", "experts", "vocabulary") for kind in kinds.values()),
    )  # fmt: skip


class _Search:
    """The modules of a model for which a kind, or a reason why there is none, was found: name → (kind, reason)."""

    def __init__(self, model: nn.Module, ranks: int, heads: tuple[int, ...]) -> None:
        self.model, self.ranks, self.heads = model, ranks, heads
        config = getattr(model, "config", None)
        get_text_config = getattr(config, "get_text_config", None)
        self.config = config if get_text_config is None else get_text_config()
        self.modules = dict(model.named_modules())
        self.linear = {
            name: tuple(dense_weight_and_bias(module, name)[0].shape)
            for name, module in self.modules.items()
            if isinstance(module, nn.Linear) or layer_plan.is_transposed(module)
        }
        self.found: dict[str, tuple[str, str]] = {}

    def run(self, vocabulary: bool) -> None:
        for name in self.modules:
            self._attention(name)
        for name in self.modules:
            self._experts(name)
        # From the inside out, so that a block inside a layer is found before the layer that contains it.
        for name in sorted(self.modules, key=lambda name: -name.count(".")):
            if re.search(r"(^|\.)\d+(\.|$)", name):
                self._feed_forward(name)
        self._vocabulary(vocabulary)
        for name in self.linear:
            self.found.setdefault(name, (WHOLE, "not one of a pair of layers that can be cut"))

    def _set(self, kinds: dict[str, str], reason: str) -> None:
        """Propose layers that belong together, unless a size does not divide: then all of them stay whole."""
        for name, kind in kinds.items():
            if name not in self.linear:
                continue
            out_features, *sizes = self.linear[name]
            side = "input"
            try:
                if kind != "row":
                    side, sizes = "output", [*packed_sizes(kind, out_features, self.config, name)]
            except ValueError as error:
                return self._keep(kinds, str(error).removeprefix("plan: "))
            if odd := [size for size in sizes if size % self.ranks]:
                text = f"{odd[0]} {side} features of {_leaf(name)} are not divisible by {self.ranks} ranks"
                return self._keep(kinds, text)
        for name, kind in kinds.items():
            text = "norm of each head: gradients are summed" if kind == "replicated" else reason
            self.found[name] = kind, text
        return None

    def _keep(self, names: dict[str, str], reason: str) -> None:
        for name in names:
            self.found[name] = WHOLE, reason

    def _attention(self, name: str) -> None:
        module = self.modules[name]
        children = {child: _join(name, child) for child, _ in module.named_children()}
        linear = {child: path for child, path in children.items() if path in self.linear}
        joined, kind = JOINED.get(type(module).__name__, ("", ""))
        parts = [next((linear[n] for n in names if n in linear), "") for names in (_QUERY, _KEY, _VALUE)]
        if joined in linear:
            inside, reason = {linear[joined]: kind}, "joined queries, keys and values"
            total, width = self.linear[linear[joined]]
            attended = packed_sizes(kind, total, self.config, name)[0] if kind != "column" else total // 3
        elif all(parts):
            inside, reason = dict.fromkeys(parts, "column"), "heads"
            attended = self.linear[parts[0]][0]
            width = self.linear[parts[0]][1]
        else:
            if _ATTENTION.search(type(module).__name__) and linear and name not in self.found:
                text = "attention whose projections are none of those that are known"
                self._keep({path: "" for path in linear.values() if path not in self.found}, text)
            return
        shape = (width, attended)
        outputs = [path for path in linear.values() if path not in inside and self.linear[path] == shape]
        if not outputs:  # BERT has it in a module beside the heads
            beside = name.rpartition(".")[0]
            outputs = [
                path
                for path in self.linear
                if path.startswith(f"{beside}." if beside else "")
                and not path.startswith(f"{name}.")
                and path.count(".") <= name.count(".") + 1
                and self.linear[path] == shape
            ]
        if len(outputs) != 1:
            text = f"{len(outputs)} layers could be the projection of attention's output"
            return self._keep(inside | dict.fromkeys(outputs, "row"), text)
        kinds = inside | {outputs[0]: "row"}
        heads, kv_heads = self._heads(module)
        if not heads:
            return self._keep(kinds, "the number of heads is not known: heads=N or --heads N says it")
        for count, label in ((heads, "heads"), (kv_heads, "heads of keys and values")):
            if count % self.ranks:
                return self._keep(kinds, f"{count} {label} are not divisible by {self.ranks} ranks")
        if attended % heads:
            return self._keep(kinds, f"{attended} features are not {heads} heads")
        head_dim = attended // heads
        # In a block with other linear layers, these and norms of the stream's width do not see single heads.
        block = any(path not in kinds for path in linear.values())
        for child, submodule in module.named_children():
            path = children[child]
            if path in kinds or not [*submodule.parameters()] or (block and path in self.linear):
                continue
            sizes = {parameter.numel() for parameter in submodule.parameters()}
            if block and sizes == {width} and not re.match("q|k|v_|value", child):
                continue
            if sizes == {head_dim} and not [*submodule.children()]:
                kinds[path] = "replicated"
            elif path not in self.linear and "norm" in child:
                return self._keep(kinds, f"{child} normalizes the features of all heads together")
            else:
                return self._keep(kinds, f"{child} has parameters whose use is not known")
        if own := [key for key, _ in module.named_parameters(recurse=False)]:
            return self._keep(kinds, f"the parameter {own[0]} of attention cannot be cut")
        return self._set(kinds, reason)

    def _heads(self, attention: nn.Module) -> tuple[int, int]:
        """Return the numbers of heads of queries, and of keys and values; 0 if they are not known."""
        if self.heads:
            return self.heads[0], self.heads[-1]
        for owner in (self.config, attention):
            for key in ("num_attention_heads", "num_heads", "n_heads", "n_head", "heads"):
                heads = getattr(owner, key, None)
                if isinstance(heads, int) and heads > 0:
                    names = ("num_key_value_heads", "num_kv_heads", "kv_heads")
                    values = (getattr(owner, name, None) for name in names)
                    return heads, next((value for value in values if isinstance(value, int)), heads)
        return 0, 0

    def _experts(self, name: str) -> None:
        try:
            hidden = experts_features(self.modules[name], name)
        except ValueError:
            return
        if hidden % self.ranks:
            self._keep({name: ""}, f"{hidden} hidden features are not divisible by {self.ranks} ranks")
        else:
            self.found[name] = "experts", "hidden features of every expert"

    def _feed_forward(self, name: str) -> None:
        """Find a linear layer or two that widen and one that narrows, below ``name`` or below its children."""
        module = self.modules[name]
        free = {
            path: shape
            for path, shape in self.linear.items()
            if path.startswith(f"{name}.")
            and path.count(".") <= name.count(".") + 2
            and path not in self.found
            and not any(_ATTENTION.search(part) for part in path[len(name) :].split("."))
        }
        joined, kind = JOINED_GATES.get(type(module).__name__, ("", ""))
        gate = _join(name, joined)
        for down, (out_features, in_features) in free.items():
            if gate in free and free[gate] == (2 * in_features, out_features):
                return self._set({gate: kind, down: "row"}, "feed-forward, joined gate")
            wide = (in_features, out_features)
            ups = [path for path, shape in free.items() if path != down and shape == wide]
            if in_features == out_features:
                # Shapes do not tell which is which.
                ups = ups if _leaf(down) in _DOWN else []
            elif in_features < out_features:
                continue  # an adapter, or the pair in the other order
            if ups:
                kinds = dict.fromkeys(ups, "column") | {down: "row"}
                between = [
                    child
                    for child, submodule in module.named_modules()
                    if child
                    and _join(name, child) not in kinds
                    and any(p.numel() == in_features for p in submodule.parameters(recurse=False))
                    and in_features != out_features
                ]
                if len(ups) > 2 or between:
                    what = between[0] if between else f"{len(ups)} layers that widen"
                    return self._keep(kinds, f"feed-forward with {what}: what it computes is not known")
                return self._set(kinds, "feed-forward, gated" if len(ups) == 2 else "feed-forward")
        for path, (out_features, in_features) in free.items():
            others = (shape for other, shape in free.items() if other != path)
            if (in_features, out_features // 2) in others:
                self._keep({path: ""}, "joined gate whose order of outputs is not known")
        return None

    def _vocabulary(self, cut: bool) -> None:
        weights = [parameter for _, parameter in self.model.named_parameters(remove_duplicate=False)]
        words = getattr(self.config, "vocab_size", None)
        tied = getattr(self.config, "tie_word_embeddings", False)
        for name, module in self.modules.items():
            rows = len(module.weight) if isinstance(module, nn.Embedding) else self.linear.get(name, (0,))[0]
            if not rows or rows != words or name in self.found:
                continue
            embeds = isinstance(module, nn.Embedding)
            weight = module.get_parameter("weight")
            reason = ""
            if not cut:
                reason = "vocabulary: vocabulary=True cuts it"
            elif sum(other is weight for other in weights) > 1 or tied:
                reason = "the embedding and the output layer are tied"
            elif embeds and type(module).forward is not nn.Embedding.forward:
                reason = f"{type(module).__name__} computes more than a look-up"
            elif rows % self.ranks:
                reason = f"{rows} words are not divisible by {self.ranks} ranks"
            if reason:
                self._keep({name: ""}, reason)
            else:
                self.found[name] = ("vocabulary", "words") if embeds else ("column_gather", "words")


def _rows(search: _Search) -> Iterator[ProposedLayer]:
    groups: dict[tuple[str, str, tuple[int, ...], str], int] = {}
    for name in search.modules:
        if name in search.found:
            kind, reason = search.found[name]
            shape = search.linear.get(name)
            if shape is None:
                shape = tuple(next(search.modules[name].parameters()).shape)
            if kind == "experts":
                shape = tuple(search.modules[name].get_parameter("gate_up_proj").shape)
            key = (_pattern(name), kind, shape, reason)
            groups[key] = groups.get(key, 0) + 1
    for (pattern, kind, shape, reason), count in groups.items():
        yield ProposedLayer(pattern=pattern, count=count, kind=kind, shape=shape, reason=reason)


def _patterns(model: nn.Module, kinds: dict[str, str]) -> dict[str, str]:
    """Return a plan with one pattern for equal layers, or with their names where a pattern would match others too."""
    plan = {_pattern(name): kind for name, kind in kinds.items()}
    if plan and {name: entry.kind for name, (_, entry) in match_layers(model, plan).items()} == kinds:
        return plan
    return kinds


def _kinds_of_plan(model: nn.Module, plan: str) -> dict[str, str] | None:
    try:
        return {name: entry.kind for name, (_, entry) in match_layers(model, PLANS[plan]).items()}
    except ValueError:
        return None


def _pattern(name: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def _join(name: str, child: str) -> str:
    return f"{name}.{child}" if name else child


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]
