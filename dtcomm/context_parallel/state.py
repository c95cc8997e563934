"""Settings of context-parallel attention (ranks, method, codecs), and counters of what it sends.

`attention` and `context_parallel` make settings from `Options`. Operators take them as text, which `torch.compile` can
pass to them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypedDict

import torch
import torch.distributed as dist

from dtcomm.arguments import complete_options, require_bool, require_int, suggest
from dtcomm.codecs import Codec
from dtcomm.collectives.groups import GroupOrMesh, process_group_of
from dtcomm.compress.reporting import GroupTraffic
from dtcomm.compress.spec import message_codec
from dtcomm.context_parallel.layout import require_layout
from dtcomm.torch_compat import constant_when_compiled, group_by_name
from dtcomm.work import Work

METHODS = ("ring", "all_gather", "ulysses")
#: Default codec of gradients where keys and values are sent in a lossy codec.
BACKWARD_CODEC = "bf16"
#: Argument → what its codec carries.
CARRIED = {"kv_codec": "keys and values", "qo_codec": "queries and outputs", "backward_codec": "gradients"}
KEYS_AND_VALUES, QUERIES_AND_OUTPUTS, GRADIENTS = CARRIED.values()


class Options(TypedDict, total=False):
    """What `attention` and `context_parallel` take.

    Attributes:
        method: ``"ring"`` passes keys and values from rank to rank, while a rank works on those it has (Ring
            Attention, Liu et al. 2023, arXiv:2310.01889). ``"all_gather"`` gathers them all before (Llama 3, Dubey et
            al. 2024, arXiv:2407.21783), which needs the memory of all payloads. ``"ulysses"`` gives each rank the
            whole sequence of a share of the heads (DeepSpeed-Ulysses, Jacobs et al. 2023, arXiv:2309.14509), which
            needs heads and key heads that the ranks divide. Default: ``"ring"``.
        kv_codec: Codec of keys and values, such as ``"int8"``, ``"fp8_e4m3"`` or ``"bf16"``. Default: ``"none"``.
        backward_codec: Codec of all gradients. Default: ``"none"`` if the other codecs are ``"none"``, else ``"bf16"``.
        qo_codec: Codec of queries and outputs, which are sent with ``method="ulysses"`` only. Default: ``"none"``.
        layout: How sequences are sharded, ``"zigzag"`` or ``"contiguous"``, as in `shard`. Default: ``"zigzag"``.
        seed: Seed of stochastic rounding, which codecs with ``round=stochastic`` use; pass another one for each step.
            Default: 0.
        allow_inaccurate: Accept codecs that lose more than 20 % (relative error) of Gaussian numbers, such as topk,
            sign and int2, although nothing sends later what they lose. Default: False.
    """

    method: str
    kv_codec: str | Codec
    backward_codec: str | Codec | None
    qo_codec: str | Codec
    layout: str
    seed: int
    allow_inaccurate: bool


DEFAULTS: Options = {
    "method": "ring",
    "kv_codec": "none",
    "backward_codec": None,
    "qo_codec": "none",
    "layout": "zigzag",
    "seed": 0,
    "allow_inaccurate": False,
}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What all calls of one integration have in common; `Options` explains the options.

    Codecs are specs. ``text`` is what operators take, for `Settings.of`.
    """

    method: str
    layout: str
    kv_codec: str
    qo_codec: str
    backward_codec: str
    seed: int
    group_name: str
    rank: int
    ranks: int
    text: str

    @staticmethod
    def of(text: str) -> Settings:
        """Return the settings of a text, on this rank."""
        values = json.loads(text)
        group = group_by_name(values["group_name"])
        return Settings(**values, rank=group.rank(), ranks=group.size(), text=text)

    def codec_of(self, what: str) -> str:
        """Return the spec of the codec of what `CARRIED` names."""
        return {
            KEYS_AND_VALUES: self.kv_codec,
            QUERIES_AND_OUTPUTS: self.qo_codec,
            GRADIENTS: self.backward_codec,
        }[what]

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group."""
        return group_by_name(self.group_name)


# Compiled code contains its result: arguments of one call site are the same at every call.
@constant_when_compiled
def make_settings(function: str, group: GroupOrMesh, given: Mapping[str, object]) -> Settings:
    """Check the options that users gave to a function, and return the settings."""
    options = complete_options(function, given, DEFAULTS)
    method, allow_inaccurate = options["method"], options["allow_inaccurate"]
    if method not in METHODS:
        raise ValueError(f"method: {method!r} is not one of {', '.join(METHODS)}{suggest(method, METHODS)}")
    require_layout(options["layout"])
    require_int("seed", options["seed"], 0)
    require_bool("allow_inaccurate", allow_inaccurate)
    forward = _parse(options["kv_codec"], "kv_codec", allow_inaccurate)
    queries = _parse(options["qo_codec"], "qo_codec", allow_inaccurate)
    if method != "ulysses" and queries != "none":
        raise ValueError(
            f"qo_codec: {queries} is for method='ulysses'; with method={method!r} queries and outputs stay on "
            "their rank"
        )
    backward = options["backward_codec"]
    if backward is None:
        backward = "none" if forward == queries == "none" else BACKWARD_CODEC
    process_group = process_group_of(group, "cp") or dist.group.WORLD
    if process_group is None:
        raise RuntimeError(
            "group: no process group is initialized; call torch.distributed.init_process_group first"
        )
    return Settings.of(
        json.dumps(
            {
                "method": method,
                "layout": options["layout"],
                "kv_codec": forward,
                "qo_codec": queries,
                "backward_codec": _parse(backward, "backward_codec", allow_inaccurate),
                "seed": options["seed"],
                "group_name": process_group.group_name,
            }
        )
    )


def _parse(spec: str | Codec, argument: str, allow_inaccurate: bool) -> str:
    """Return the spec of a codec that may carry keys, values or gradients."""
    carried = "" if allow_inaccurate else CARRIED[argument]
    return str(message_codec(spec, argument, "blocks of attention", carried))


class ContextParallelState(GroupTraffic):
    """Counts what attention over a process group sends on this rank, from now on; ``str()`` gives one line.

    `dtcomm.context_parallel.context_parallel` makes one; for calls of `attention` make it yourself. Compiled code and
    backward passes are counted too.

    Args:
        group: Process group, or a device mesh with one dimension. Default: all ranks.

    Raises:
        ValueError: The mesh has more than one dimension.
        RuntimeError: No process group is initialized.

    Example::

        state = dtcomm.context_parallel.ContextParallelState()
        train(model)  # calls dtcomm.context_parallel.attention
        state.print_report()
    """

    integration = "context parallel"

    def __init__(self, group: GroupOrMesh = None) -> None:
        super().__init__(process_group_of(group, "cp"))

    def __str__(self) -> str:
        methods = {key[0] for key in self._traffic}
        return f"{', '.join(sorted(methods))}: {super().__str__()}" if methods else super().__str__()


def record(settings: Settings, what: str, codec: str, dtype: torch.dtype, numel: int, work: Work) -> None:
    """Count a completed operation in every state of its group.

    This rank sent ``numel`` elements of ``what``, which would be sent in ``dtype`` uncompressed.
    """
    ContextParallelState.record(settings.group_name, settings.method, what, codec, dtype, numel, work)
