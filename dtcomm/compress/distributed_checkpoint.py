"""Compressor state in torch.distributed.checkpoint.

    saved = {"model": ..., "compression": Checkpointed(state)}
    torch.distributed.checkpoint.save(saved, checkpoint_id=path)
    torch.distributed.checkpoint.load(saved, checkpoint_id=path)          # on as many ranks
    restore(state, path, "compression")                                   # on any number of ranks

A checkpoint keeps one value under each key, and takes what is not sharded for the same on all ranks. Residuals are
every rank's own, so each rank's state goes under a key of its own.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from os import PathLike
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load


class Compressor(Protocol):
    """`dtcomm.ddp.State`, `dtcomm.fsdp.State`, `dtcomm.fsdp.ShardedOptimizer`."""

    def state_dict(self) -> Mapping[str, Any]: ...

    def load_state_dict(self, state: Any, /) -> None: ...


class Checkpointed:
    """A compressor as a checkpoint takes it, for as many ranks as have saved it; `restore` is for another number."""

    def __init__(self, state: Compressor) -> None:
        self._state = state

    def state_dict(self) -> dict[str, Any]:
        """One key, this rank's; its value is opaque to the checkpoint."""
        packed = io.BytesIO()
        torch.save(self._state.state_dict(), packed)
        return {_key(dist.get_rank(), dist.get_world_size()): packed.getvalue()}

    def load_state_dict(self, saved: Mapping[str, bytes]) -> None:
        """What `state_dict` gave on this rank."""
        self._state.load_state_dict(_unpacked(saved[_key(dist.get_rank(), dist.get_world_size())]))


def restore(state: Compressor, checkpoint_id: str | PathLike[str], key: str) -> None:
    """Load what ``Checkpointed`` saved under ``key``, whatever the number of ranks was: residuals keep their sum.

    Every rank reads the states of all ranks that saved. ValueError where the checkpoint has none under ``key``.
    """
    metadata = FileSystemReader(checkpoint_id).read_metadata()
    pattern = re.compile(re.escape(key) + r"\.rank (\d+) of (\d+)")
    found = {
        int(match[1]): name for name in metadata.state_dict_metadata if (match := pattern.fullmatch(name))
    }
    if not found:
        keys = sorted({name.partition(".")[0] for name in metadata.state_dict_metadata})
        raise ValueError(f"key: no compressor was saved under {key!r}; the checkpoint has {', '.join(keys)}")
    wanted: dict[str, Any] = dict.fromkeys(found.values(), b"")
    load(wanted, checkpoint_id=checkpoint_id)
    states = [_unpacked(wanted[found[rank]]) for rank in sorted(found)]
    same = len(states) == dist.get_world_size()
    state.load_state_dict(states[dist.get_rank()] if same else states)


def _key(rank: int, ranks: int) -> str:
    return f"rank {rank} of {ranks}"


def _unpacked(packed: bytes) -> Any:
    return torch.load(io.BytesIO(packed), weights_only=True)
