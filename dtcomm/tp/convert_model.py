"""`dtcomm.tp.compress`: replaces the layers of an existing model by tensor-parallel ones, as a plan says.

The `TPState` that it returns reports what these layers communicate.
"""

from __future__ import annotations

import copy
import functools
import logging
import re
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

import torch
import torch.distributed as dist
from torch import nn
from typing_extensions import Unpack

from dtcomm import env
from dtcomm.arguments import complete_options, require_bool, require_int, shares_options
from dtcomm.codecs import Codec, names
from dtcomm.collectives import Algorithm
from dtcomm.collectives.groups import Announcement, GroupOrMesh, sent_bytes
from dtcomm.compress.models import kind_of, refuse_join, wrong_type
from dtcomm.compress.payoff import VERIFY, ForwardPairs, unmeasured
from dtcomm.compress.policy import excluded_names
from dtcomm.compress.report import Report, describe_uncompressed
from dtcomm.compress.reporting import Reporting, why_unused
from dtcomm.compress.spec import require_accurate, require_kernels
from dtcomm.compress.traffic import SMALL, Traffic, group_traffic
from dtcomm.torch_compat import ModuleHook
from dtcomm.tp.comm_config import NONE, CallKind, CommConfig, parse_codec
from dtcomm.tp.functional import compiled_traffic
from dtcomm.tp.layer_plan import (
    PLANS,
    Plan,
    PlanEntry,
    dense_weight_and_bias,
    is_transposed,
    packed_sizes,
    replace_module,
    resolve_plan,
)
from dtcomm.tp.layers import (
    ColumnParallelLinear,
    ParallelExperts,
    ReplicatedModule,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from dtcomm.tp.sharded_module import ShardedModule

#: Attributes of an attention module that count what its projections compute; each rank computes a part.
_HEAD_COUNTS = ("num_heads", "num_attention_heads", "num_key_value_heads", "num_kv_heads", "n_heads", "n_head",
                "all_head_size", "split_size")  # fmt: skip
_COMPILED = "(compiled code)"  # stands for the layers of compiled code in reports
# Added to errors of torch about shapes.
_SHAPES = (
    "dtcomm.tp: a column layer gives 1 of {ranks} parts of its outputs. The forward of attention must not fix the "
    "number of heads: view(batch, length, -1, head_dim), with head_dim of the whole model. Each column layer needs the "
    "row layer that takes its outputs"
)

_log = logging.getLogger("dtcomm")


class Options(TypedDict, total=False):
    """What `compress` takes.

    Attributes:
        backward_codec: Codec of the activations' gradients. Default: ``"none"``.
        exclude: Shell patterns of layers, or of modules with all that they contain, that are cut over the ranks but
            communicate uncompressed, such as ``"lm_head"`` or ``["*.0.*", "*.down_proj"]``. Default: none.
        allow_inaccurate: Accept codecs in ``codec`` and ``backward_codec`` that lose more than 20 % (relative error) of
            Gaussian numbers. A plan's codecs are not checked: calibration measured them. Default: False.
        algorithm: Algorithm of the sums, see `CommConfig`. Default: ``"auto"``.
        chunks: Chunks of tokens of the row-parallel layers, see `RowParallelLinear`. Default: 1.
        latency: Send small messages uncompressed where that is predicted to be faster. Default: True.
        verify: How many pairs of steps, with compression and with codec none, are measured at the start of the run. The
            report can then say whether compression paid. Not for compiled models, whose codecs are fixed. 0: none.
            Default: 0.
    """

    backward_codec: str | Codec
    exclude: str | Sequence[str]
    allow_inaccurate: bool
    algorithm: Algorithm
    chunks: int | str
    latency: bool
    verify: int


DEFAULTS: Options = {
    "backward_codec": "none",
    "exclude": (),
    "allow_inaccurate": False,
    "algorithm": "auto",
    "chunks": 1,
    "latency": True,
    "verify": 0,
}


@shares_options(DEFAULTS, Options)
def compress(
    model: nn.Module,
    group: GroupOrMesh,
    codec: str | Codec = "int8",
    plan: Plan | str | Path | None = None,
    **options: Unpack[Options],
) -> TPState:
    """Replace the model's layers, in place, by tensor-parallel layers with compressed communication.

    Every rank starts with the whole model and keeps its shards.

    Args:
        model: The model; the same on all ranks.
        group: One-dimensional device mesh, process group, or None for all ranks.
        codec: Codec of the activations, a spec or a `Codec`. Default: ``"int8"``.
        plan: Which layers to replace: a mapping from name patterns to one of `dtcomm.tp.layer_plan.KINDS`, or the name
            of a built-in plan. A file that ``dtcomm tp calibrate`` wrote (its name ends in .json) gives every layer its
            own codec. None: the built-in plan of ``model.config.model_type``. Default: None.

    Returns:
        The state: which layers were replaced, ``report()`` and ``print_report()``.

    Raises:
        TypeError: An argument has a wrong type, or an option is unknown.
        ValueError: A codec is wrong or too inaccurate, a pattern matches no module, a kind is unknown, or a column or
            row layer lacks its partner. Or a size or the number of attention heads is not divisible by the number of
            ranks. The model is unchanged then.

    Example::

        state = dtcomm.tp.compress(model, mesh, "int8")           # the built-in plan, by the model's type
        dtcomm.tp.compress(model, mesh, "int4", {"*.up": "column", "*.down": "row"}, exclude="layers.0")
    """
    if (
        not isinstance(model, nn.Module) or kind_of(model) != "module"
    ):  # its layers are replaced before DDP or FSDP
        raise wrong_type("model", "a module that is not wrapped", model)
    given = complete_options("dtcomm.tp.compress", options, DEFAULTS)
    _require_options(codec, plan, given)
    algorithm, latency = given["algorithm"], given["latency"]
    forward = parse_codec(codec)
    backward = parse_codec(given["backward_codec"], "backward_codec")
    if not given["allow_inaccurate"]:
        remedy = "a plan of dtcomm.extensions.calibrate with the layers that tolerate it"
        require_accurate(forward, "codec", "activations", remedy)
        require_accurate(backward, "backward_codec", "gradients", remedy)
    comm = CommConfig.of(forward, backward, algorithm=algorithm, group=group)
    if comm.world_size > 1:
        require_kernels([forward], model.parameters(), "codec")
        require_kernels([backward], model.parameters(), "backward_codec")
    modules = resolve_plan(model, plan, comm.world_size)
    entries = {name: entry for name, (_, entry) in modules.items()}
    by_weight = excluded_names(given["exclude"], [f"{name}.weight" for name in entries])
    excluded = {name.removesuffix(".weight"): pattern for name, pattern in by_weight.items()}
    shared: dict[str, Any] = {"algorithm": algorithm, "group": group, "device": "meta"}
    config = getattr(model, "config", None)
    sharing = _modules_of_weights(model)
    layers: dict[str, ShardedModule] = {}
    for name, (module, entry) in modules.items():
        if entry.kind not in ("experts", "replicated"):  # those run the module's own forward
            _require_plain(module, name, sharing.get(id(getattr(module, "weight", None)), ()))
        shared["codec"] = NONE if name in excluded else parse_codec(entry.codec or forward)
        if entry.kind == "vocabulary":
            layers[name] = _sharded_embedding(module, name, shared)
            continue
        gradients = NONE if name in excluded else backward
        linear_options = {**shared, "backward_codec": gradients, "latency": latency}
        if entry.kind == "experts":
            settings = CommConfig.of(
                shared["codec"], gradients, algorithm=algorithm, group=group, latency=latency
            )
            layers[name] = ParallelExperts(module, settings, name)
        elif entry.kind == "replicated":
            layers[name] = ReplicatedModule(module, CommConfig.of(group=group), name)
        else:
            layers[name] = _sharded_linear(module, entry.kind, name, given["chunks"], config, linear_options)
    for name, layer in layers.items():
        replace_module(model, name, layer)
    undo = _divide_head_counts(model, entries, comm.world_size)
    refuse_join(model, "tensor parallelism")
    undo.append(lambda: model.__dict__.pop("join_hook", None))
    if comm.world_size > 1:
        codecs = {"codec": forward, "backward_codec": backward}
        kinds = {f"plan: {name}": f"{entry.kind} {entry.codec or ''}" for name, entry in entries.items()}
        announcement = Announcement(comm.group, "dtcomm.tp.compress", {**given, **codecs, **kinds})
        undo.append(announcement.require_all_at_forward(model).remove)
    state = TPState(model, comm, entries, layers, excluded, given["verify"], undo)
    state.arguments = {"codec": forward, "plan": plan, **given, "backward_codec": backward}
    return state


def _require_options(codec: object, plan: object, options: Options) -> None:
    """Check plan, codec and options."""
    if isinstance(codec, str) and codec in PLANS:
        raise ValueError(f"codec: {codec!r} is a plan; pass plan={codec!r}")
    if isinstance(plan, str) and plan.partition(":")[0] in names():
        raise ValueError(f"plan: {plan!r} is a codec; pass codec={plan!r}, and the plan as plan=")
    require_bool("allow_inaccurate", options["allow_inaccurate"])
    require_int("verify", options["verify"], 0)


# Subclasses of Linear whose own forward computes what Linear's does.
_EQUAL_TO_LINEAR = ("transformers.models.falcon.modeling_falcon.FalconLinear",)
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def _modules_of_weights(model: nn.Module) -> dict[int, list[str]]:
    """Return the names of the modules that have a weight, by the weight's id."""
    names: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if weight is not None:
            names.setdefault(id(weight), []).append(name)
    return names


def _require_plain(module: nn.Module, name: str, sharing: Sequence[str]) -> None:
    """Check that a module consists of weight and bias alone: a layer that is made of them drops everything else.

    ``sharing`` are the names of the modules that have its weight.
    """
    problem = ""
    if any(getattr(module, hooks) for hooks in _HOOKS):
        problem = "has hooks, which the new layer would not call; register them after compress"
    elif "forward" in vars(module) or (
        isinstance(module, nn.Linear)
        and type(module).forward is not nn.Linear.forward
        and f"{type(module).__module__}.{type(module).__qualname__}" not in _EQUAL_TO_LINEAR
    ):
        problem = f"({type(module).__name__}) has a forward of its own, which the new layer would not run"
    elif getattr(module, "max_norm", None) is not None:
        problem = "has a max_norm, which the new layer would not apply"
    elif len(sharing) > 1:
        others = ", ".join(other for other in sharing if other != name)
        problem = f"shares its weight with {others}; the new layers would not"
    if problem:
        raise ValueError(f"plan: {name} {problem}. Leave it out of the plan, or give it a layer of its own")


def _sharded_embedding(module: nn.Module, name: str, options: dict[str, Any]) -> ShardedModule:
    if not isinstance(module, nn.Embedding) or type(module).forward is not nn.Embedding.forward:
        raise ValueError(
            f"plan: {name} is a {type(module).__name__}; the kind vocabulary expects an Embedding"
        )
    for option in ("scale_grad_by_freq", "sparse"):
        if getattr(module, option):
            raise ValueError(f"plan: {name} has {option}=True, which the new layer would not have")
    rows, width = module.weight.shape
    layer = VocabParallelEmbedding(rows, width, padding_idx=module.padding_idx, **options)
    layer.load_dense({"weight": module.weight})
    layer.keep_dense(module)
    return layer


def _sharded_linear(
    module: nn.Module, kind: str, name: str, chunks: int | str, config: Any, options: dict[str, Any]
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
            packed=packed_sizes(kind, out_features, config, name),
            transposed=transposed,
            **options,
        )
    stored = weight.t() if transposed else weight
    layer.load_dense({"weight": stored} if bias is None else {"weight": stored, "bias": bias})
    layer.keep_dense(module)
    layer.train(module.training)
    return layer


def _divide_head_counts(
    model: nn.Module, plan: Mapping[str, PlanEntry], world_size: int
) -> list[Callable[[], object]]:
    """Let the modules whose columns were cut count this rank's heads, where their forward pass uses such a number.

    The returned functions undo it.
    """
    undo: list[Callable[[], object]] = []
    columns = ("column", "column_packed2", "column_packed3", "column_qkv")
    parents = {name.rpartition(".")[0] for name, entry in plan.items() if entry.kind in columns}
    for parent in parents:
        attributes = model.get_submodule(parent).__dict__
        before = {count: attributes[count] for count in _HEAD_COUNTS if count in attributes}
        undo.append(functools.partial(attributes.update, before))
        for count in _HEAD_COUNTS:
            if isinstance(attributes.get(count), int):
                attributes[count] //= world_size
    joined = {name.rpartition(".")[0] for name, entry in plan.items() if entry.kind == "column_qkv"}
    for parent in joined:  # Phi-3 splits its joined projection at the numbers of its configuration
        attributes = model.get_submodule(parent).__dict__
        undo.append(functools.partial(attributes.update, {"config": attributes.get("config")}))
        config = attributes["config"] = copy.copy(attributes.get("config"))
        for count in ("num_attention_heads", "num_key_value_heads"):
            if isinstance(getattr(config, count, None), int):
                setattr(config, count, getattr(config, count) // world_size)
    return undo


# --- what the converted model communicates ---------------------------------------------------------------------------


@dataclass
class _Counted:
    """Calls of one layer that have the same codec, dtype and reason."""

    name: str
    traffic: Traffic

    def add(self, kind: CallKind, calls: int, group: dist.ProcessGroup | None) -> None:
        sent, plain = (
            sent_bytes(kind.collective, kind.numel, kind.dtype, codec, kind.algorithm, group)
            for codec in (kind.codec, NONE)
        )
        self.traffic.calls += calls
        self.traffic.numel += calls * kind.numel
        if sent is None or plain is None:
            return
        self.traffic.wire_bytes += round(calls * sent)
        self.traffic.plain_bytes += round(calls * plain)


class TPState(Reporting):
    """What `compress` did to a model, and what the model has communicated since; ``str()`` gives one line.

    Args:
        model: The converted model.
        comm: The settings that its layers have in common.
        plan: Module name → entry of the plan.
        layers: Module name → the tensor-parallel layer.
        excluded: Module name → the pattern that leaves it uncompressed.
        verify: The number of pairs of steps to measure.
        undo: What `detach` calls.

    Attributes:
        codec: Codec of the activations of layers that have none of their own.
        backward_codec: Codec of gradients.
        layers: Module name → kind (`dtcomm.tp.layer_plan.KINDS`).
        codecs: Module name → codec, for layers whose codec the plan specifies.
        excluded: Module name → the pattern of ``exclude=`` that leaves it uncompressed.
    """

    integration = "TP"

    def __init__(
        self,
        model: nn.Module,
        comm: CommConfig,
        plan: Mapping[str, PlanEntry],
        layers: Mapping[str, ShardedModule],
        excluded: Mapping[str, str],
        verify: int = 0,
        undo: Sequence[Callable[[], object]] = (),
    ) -> None:
        self.arguments = {}
        self._undo, self._model = list(undo), weakref.ref(model)
        self.codec, self.backward_codec = str(comm.codec), str(comm.backward_codec)
        self.layers = {name: entry.kind for name, entry in plan.items()}
        self.codecs = {
            name: entry.codec
            for name, entry in plan.items()
            if entry.codec is not None and name not in excluded
        }
        self.excluded = dict(excluded)
        self._comm = comm
        idle = env.disabled() or (comm.world_size == 1 and (comm.codec, comm.backward_codec) != (NONE, NONE))
        self._unused = why_unused("dtcomm.tp") if idle else ""
        self._modules = dict(layers)
        # Counters of compiled code are those of its group: what other models have counted is left out.
        self._compiled_before = Counter(compiled_traffic(comm.group_name).counts)
        self._logged, self._model_is_cut = False, True
        self._handles = [
            model.register_forward_pre_hook(ModuleHook(self._begin_forward)),
            model.register_forward_hook(ModuleHook(self._end_forward)),
            model.register_forward_hook(ModuleHook(self._explain_shapes), always_call=True),
        ]
        self._pairs: ForwardPairs | None = None
        if verify and comm.world_size > 1:
            self._pairs = ForwardPairs(verify, "a step from forward to forward", lambda: (comm.group,))
            self._undo.append(model.register_forward_pre_hook(ModuleHook(self._begin_step)).remove)

    def detach(self) -> None:
        """Give the model its own, whole layers back, with their weights as they are now; call it on every rank.

        The ranks' shards are gathered, so each rank needs the memory of the whole model, as `compress` did. The
        parameters are new ones: make the optimizer after this. Do not call it inside DDP or FSDP. The report keeps what
        there was.

        Raises:
            RuntimeError: FSDP was applied to the model.

        Example::

            state.detach()
            torch.save(model.state_dict(), "whole.pt")
        """
        model = self._model()
        if model is None or not self._model_is_cut:
            return
        if kind_of(model) != "module":
            raise RuntimeError("detach: FSDP was applied to the model, and has its parameters")
        self._model_is_cut = False
        for name, layer in self._modules.items():
            replace_module(model, name, layer.dense_module())
        for handle in self._handles:
            handle.remove()
        while self._undo:
            self._undo.pop()()

    def report(self) -> Report:
        """Return what the layers have sent on this rank, by codec and by layer.

        Bytes are those of the algorithms, for the calls that were counted. Nothing is communicated. Compiled
        code is counted by process group, not by layer.

        Example::

            state = dtcomm.tp.compress(model, mesh, "int8")
            model(tokens)
            state.print_report()
        """
        counted = [(part.name, part.traffic) for part in self._count()]
        report = Report.of_traffic(
            counted,
            uncompressed=self._unused or describe_uncompressed(group_traffic(counted), "layers"),
            integration=self.integration,
            rank=self._comm.rank,
            world_size=self._comm.world_size,
            policy=str(self),
            feedback=False,
            steps=None,
            seconds=None,
            residual_bytes=0,
            notes=tuple(f"exclude: {name} ({pattern!r})" for name, pattern in self.excluded.items()),
            payoff=None if self._pairs is None else self._pairs.payoff,
            unmeasured=unmeasured(self._pairs, VERIFY),
        )
        self._log_uncompressed(report)
        return report

    def _count(self) -> list[_Counted]:
        """Return what the layers have sent, by layer, codec, dtype and reason."""
        # Compiled code may belong to another model that is trained meanwhile, but its sums are of this group too.
        compiled = Counter(compiled_traffic(self._comm.group_name).counts) - self._compiled_before
        sources = [(name, module.comm.traffic.counts) for name, module in self._modules.items()]
        counted: dict[tuple[str, str, str, str, str], _Counted] = {}
        for name, counts in [*sources, (_COMPILED, compiled)]:
            for kind, calls in counts.items():
                what = "gradients" if kind.backward else "activations"
                if name == _COMPILED:
                    what = "activations, gradients"
                traffic = Traffic(
                    codec=str(kind.codec),
                    what=what,
                    dtype=str(kind.dtype).removeprefix("torch."),
                    reason=kind.reason,
                    fallback=bool(kind.reason) and kind.reason != SMALL,
                    seconds=None,
                )
                key = (name, what, traffic.codec, traffic.dtype, traffic.reason)
                counted.setdefault(key, _Counted(name, traffic)).add(kind, calls, self._comm.group)
        return list(counted.values())

    def _begin_step(self, module: nn.Module, inputs: Any) -> None:
        """Let this step of a pair compress or not."""
        if self._pairs is not None and self._pairs.running and not torch.compiler.is_compiling():
            self._pairs.begin()
            for layer in self._modules.values():
                layer.comm.traffic.compresses = self._pairs.compresses

    def _begin_forward(self, module: nn.Module, inputs: Any) -> None:
        """Log before the second pass what the first one sent uncompressed, gradients included."""
        if not torch.compiler.is_compiling() and any(
            layer.comm.traffic.counts for layer in self._modules.values()
        ):
            self.report()

    def _end_forward(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if not torch.compiler.is_compiling() and not torch.is_grad_enabled():  # no backward pass follows
            self.report()

    def _explain_shapes(self, module: nn.Module, inputs: Any, output: Any) -> None:
        """Add to an error of torch about shapes what it has to do with layers that are cut."""
        if torch.compiler.is_compiling():
            return
        error = sys.exc_info()[1]
        if type(error) is RuntimeError and re.search("shape|size", str(error)):
            error.args = (f"{error}\n{_SHAPES.format(ranks=self._comm.world_size)}",)

    def _log_uncompressed(self, report: Report) -> None:
        if not report.messages:
            return
        for handle in self._handles:
            handle.remove()
        self._handles = []
        if report.uncompressed and not (self._logged or self._unused):
            self._logged = True
            if report.rank == 0:
                _log.warning("dtcomm.tp: %s", report.uncompressed)

    def __str__(self) -> str:
        kinds = _count_values(self.layers)
        from_plan = f" ({_count_values(self.codecs)} by the plan)" if self.codecs else ""
        excluded = f", {len(self.excluded)} excluded" if self.excluded else ""
        return (
            f"{len(self.layers)} layers ({kinds}): forward {self.codec}{from_plan}, "
            f"backward {self.backward_codec}{excluded}"
        )


def _count_values(mapping: dict[str, str]) -> str:
    return ", ".join(f"{count} {value}" for value, count in Counter(mapping.values()).items())
