"""Settings of context-parallel attention, which `attention` and `context_parallel` make: ranks, method, codecs.

The fields are plain values, so that `torch.compile` can pass them to the operators.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from dtcomm._message_codec import message_codec, require_accurate
from dtcomm.arguments import require_int, suggest
from dtcomm.codecs import Codec
from dtcomm.context_parallel.layout import GroupOrMesh, process_group_of, require_layout

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
