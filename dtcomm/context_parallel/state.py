"""Settings of context-parallel attention (ranks, method, codecs), and counters of what it sends.

`attention` and `context_parallel` make settings. Their fields are plain values, so that `torch.compile` can pass them
to the operators.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from dtcomm.arguments import require_int, suggest
from dtcomm.codecs import Codec
from dtcomm.compress.report import GroupTraffic
from dtcomm.compress.spec import message_codec, require_accurate
from dtcomm.context_parallel.layout import GroupOrMesh, process_group_of, require_layout
from dtcomm.work import Work

METHODS = ("ring", "all_gather", "ulysses")
#: Default codec of gradients where keys and values travel in a lossy codec.
BACKWARD_CODEC = "bf16"
#: Argument → what its codec carries.
CARRIED = {"kv_codec": "keys and values", "qo_codec": "queries and outputs", "backward_codec": "gradients"}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What all calls of one integration have in common.

    Attributes:
        method: ``"ring"``, ``"all_gather"`` or ``"ulysses"``.
        layout: ``"zigzag"`` or ``"contiguous"``.
        kv_codec: Spec of the codec of keys and values.
        qo_codec: Spec of the codec of queries and outputs, which only Ulysses sends.
        backward_codec: Spec of the codec of all gradients.
        seed: Seed of stochastic rounding.
        group_name: The name of the process group.
        rank: This rank in the group.
        ranks: Number of ranks of the group.
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

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group."""
        return group_by_name(self.group_name)


# Compiled code contains its result: arguments of one call site are the same at every call.
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def make_settings(
    group: GroupOrMesh,
    method: str,
    kv_codec: str | Codec,
    backward_codec: str | Codec | None,
    qo_codec: str | Codec,
    layout: str,
    seed: int,
    allow_inaccurate: bool,
) -> Settings:
    """Check what users wrote and return the settings; see `dtcomm.context_parallel.attention`."""
    if method not in METHODS:
        raise ValueError(f"method: {method!r} is not one of {', '.join(METHODS)}{suggest(method, METHODS)}")
    require_layout(layout)
    require_int("seed", seed, 0)
    if not isinstance(allow_inaccurate, bool):
        raise TypeError(f"allow_inaccurate: expected a bool, got {type(allow_inaccurate).__name__}")
    forward, queries = (
        _parse(spec, argument, allow_inaccurate)
        for spec, argument in ((kv_codec, "kv_codec"), (qo_codec, "qo_codec"))
    )
    if method != "ulysses" and queries != "none":
        raise ValueError(
            f"qo_codec: {queries} is for method='ulysses'; with method={method!r} queries and outputs stay on "
            "their rank"
        )
    if backward_codec is None:
        backward = "none" if forward == queries == "none" else BACKWARD_CODEC
    else:
        backward = _parse(backward_codec, "backward_codec", allow_inaccurate)
    process_group = process_group_of(group)
    named = dist.group.WORLD if process_group is None else process_group
    if named is None:
        raise RuntimeError(
            "group: no process group is initialized; call torch.distributed.init_process_group first"
        )
    return Settings(
        method=method,
        layout=layout,
        kv_codec=forward,
        qo_codec=queries,
        backward_codec=backward,
        seed=seed,
        group_name=named.group_name,
        rank=dist.get_rank(process_group),
        ranks=dist.get_world_size(process_group),
    )


def group_by_name(name: str) -> dist.ProcessGroup:
    """Return the process group of a name."""
    group: dist.ProcessGroup = vars(c10d)["_resolve_process_group"](name)
    return group


@functools.lru_cache(maxsize=256)
def _parse(spec: str | Codec, argument: str, allow_inaccurate: bool) -> str:
    """Return the spec of a codec that may carry keys, values or gradients."""
    codec = message_codec(spec, argument, "blocks of attention")
    if not allow_inaccurate:
        require_accurate(codec, argument, CARRIED[argument])
    return str(codec)


class State(GroupTraffic):
    """Counts what attention over a process group sends on this rank, from now on; ``str()`` gives one line.

    `dtcomm.context_parallel.context_parallel` makes one; for calls of `attention` make it yourself. Compiled code and
    backward passes are counted too.

    Args:
        group: Process group, or a device mesh with one dimension. Default: all ranks.

    Raises:
        ValueError: The mesh has more than one dimension.
        RuntimeError: No process group is initialized.

    Example::

        state = dtcomm.context_parallel.State()
        train(model)  # calls dtcomm.context_parallel.attention
        state.print_report()
    """

    integration = "context parallel"

    def __init__(self, group: GroupOrMesh = None) -> None:
        super().__init__(process_group_of(group))

    def __str__(self) -> str:
        methods = {key[0] for key in self._traffic}
        return f"{', '.join(sorted(methods))}: {super().__str__()}" if methods else super().__str__()


def record(settings: Settings, what: str, codec: str, dtype: torch.dtype, numel: int, work: Work) -> None:
    """Count a completed operation in every state of its group.

    Args:
        settings: The settings of the call.
        what: What was sent, such as ``"keys and values"``.
        codec: The codec.
        dtype: The dtype in which it would travel uncompressed.
        numel: Elements that this rank sent.
        work: The handle.
    """
    State.record(settings.group_name, settings.method, what, codec, dtype, numel, work)
