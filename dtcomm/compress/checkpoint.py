"""Checkpoints of compressor state: its format, other numbers of ranks, and torch.distributed.checkpoint.

The state of one rank is a dict of plain values and tensors that ``torch.load(..., weights_only=True)`` reads:
``version``, ``steps`` and ``seed`` are the same on all ranks, ``rank`` and ``world_size`` say which rank saved it, and
``residuals`` maps a parameter's name to a flat fp32 tensor. ``options`` says how the run compresses that saved it.
Residuals differ between ranks, so every rank saves its own state. With torch.distributed.checkpoint::

    saved = {"model": ..., "compression": Checkpointed(state)}
    torch.distributed.checkpoint.save(saved, checkpoint_id=path)
    torch.distributed.checkpoint.load(saved, checkpoint_id=path)          # on the same number of ranks
    restore(state, path, "compression")                                   # on any number of ranks
"""

from __future__ import annotations

import io
import logging
import re
from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load

from dtcomm.compress.residuals import redistribute

VERSION = 2

_log = logging.getLogger("dtcomm")

SavedState = Mapping[str, Any]


class Compressor(Protocol):
    """What can be checkpointed: `dtcomm.ddp.State`, `dtcomm.fsdp.State`, `dtcomm.fsdp.ShardedOptimizer`, `LocalSGD`."""

    def state_dict(self) -> Mapping[str, Any]: ...

    def load_state_dict(self, state: Any, /) -> None: ...


class Checkpointed:
    """Wraps a compressor so that torch.distributed.checkpoint saves the state of every rank.

    torch.distributed.checkpoint keeps one value for each key and takes values that are not sharded for identical on all
    ranks. This wrapper therefore saves each rank's state under a key of its own. Loading needs the number of ranks
    that saved; `restore` accepts any number.

    Args:
        state: The compressor, such as the `State` that `dtcomm.ddp.compress` returned.
    """

    def __init__(self, state: Compressor) -> None:
        self._state = state

    def state_dict(self) -> dict[str, Any]:
        """Return one key, this rank's, whose value is opaque to the checkpoint."""
        packed = io.BytesIO()
        torch.save(self._state.state_dict(), packed)
        return {_rank_key(dist.get_rank(), dist.get_world_size()): packed.getvalue()}

    def load_state_dict(self, saved: Mapping[str, bytes]) -> None:
        """Load what `state_dict` returned on this rank."""
        self._state.load_state_dict(_unpack(saved[_rank_key(dist.get_rank(), dist.get_world_size())]))


def restore(state: Compressor, checkpoint_id: str | PathLike[str], key: str) -> None:
    """Load what `Checkpointed` saved under ``key``, on any number of ranks; the sum of the residuals is kept.

    Every rank reads the states of all ranks that saved.

    Args:
        state: The compressor to restore.
        checkpoint_id: The folder of the checkpoint.
        key: The key of the `Checkpointed` in the dict that was saved.

    Raises:
        ValueError: The checkpoint has no compressor under ``key``.
    """
    metadata = FileSystemReader(checkpoint_id).read_metadata()
    pattern = re.compile(re.escape(key) + r"\.rank (\d+) of (\d+)")
    keys_by_rank = {
        int(match[1]): name for name in metadata.state_dict_metadata if (match := pattern.fullmatch(name))
    }
    if not keys_by_rank:
        keys = sorted({name.partition(".")[0] for name in metadata.state_dict_metadata})
        raise ValueError(f"key: no compressor was saved under {key!r}; the checkpoint has {', '.join(keys)}")
    values: dict[str, Any] = dict.fromkeys(keys_by_rank.values(), b"")
    load(values, checkpoint_id=checkpoint_id)
    states = [_unpack(values[keys_by_rank[rank]]) for rank in sorted(keys_by_rank)]
    same_size = len(states) == dist.get_world_size()
    state.load_state_dict(states[dist.get_rank()] if same_size else states)


def rank_and_size(group: dist.ProcessGroup | None = None) -> tuple[int, int]:
    """Return this rank and the number of ranks; (0, 1) in a process without a process group."""
    if not dist.is_initialized():
        return 0, 1
    return dist.get_rank(group), dist.get_world_size(group)


def select_share(
    saved: SavedState | Sequence[SavedState], rank: int, world_size: int
) -> tuple[SavedState, dict[str, torch.Tensor]]:
    """Return a state with the counters, and the residuals with which ``rank`` of ``world_size`` ranks starts.

    ``saved`` is this rank's own state, or the states of all ranks of the run that saved them, in rank order. From a
    list the residuals may be loaded into another number of ranks; their sum over ranks is kept. ValueError if a state
    has another version, the list is not complete, or a single state comes from another rank or another number of ranks.
    """
    states = [saved] if isinstance(saved, Mapping) else list(saved)
    if not states:
        raise ValueError("states: got none")
    for state in states:
        if state.get("version") != VERSION:
            raise ValueError(f"state of version {state.get('version')!r}: expected {VERSION}")
    first = states[0]
    saved_ranks = first["world_size"]
    if isinstance(saved, Mapping):
        if saved_ranks != world_size:
            raise ValueError(
                f"state: saved by one of {saved_ranks} ranks, the group has {world_size}: pass the list of all ranks' "
                "states"
            )
        if first["rank"] != rank:
            raise ValueError(
                f"state: saved by rank {first['rank']}, this is rank {rank}: every rank saves and loads its own; in "
                "torch.distributed.checkpoint wrap it in dtcomm.compress.checkpoint.Checkpointed"
            )
        return first, dict(first["residuals"])
    if [state["rank"] for state in states] != list(range(saved_ranks)):
        raise ValueError(
            f"states of ranks {[state['rank'] for state in states]}: expected all {saved_ranks}, in rank order"
        )
    if saved_ranks == world_size:
        return first, dict(states[rank]["residuals"])
    return first, redistribute([state["residuals"] for state in states], rank, world_size)


def has_options(saved: SavedState, options: Mapping[str, str], strict: bool) -> bool:
    """Return whether a state was saved with these options; ValueError if one differs, and ``strict`` is True.

    What belongs to an option, such as PowerSGD's factors, is of no use with another one; residuals are. If not
    ``strict``, the log says what differs.
    """
    differences = [
        f"{name}={saved['options'].get(name)!r} (here {value!r})"
        for name, value in options.items()
        if saved["options"].get(name) != value
    ]
    if differences and strict:
        raise ValueError(
            f"state: saved with {', '.join(differences)}; strict=False loads its residuals all the same"
        )
    if differences:
        _log.warning(
            "loading at most the residuals of a state that was saved with %s", ", ".join(differences)
        )
    return not differences


def require_matching_sizes(residuals: Mapping[str, torch.Tensor], sizes: Mapping[str, int]) -> None:
    """Raise ValueError if the model (name -> elements) lacks a parameter of the size of one of the residuals."""
    for name, residual in residuals.items():
        if sizes.get(name) != residual.numel():
            raise ValueError(
                f"the state has {residual.numel()} residuals for {name!r}, the model "
                f"{sizes.get(name, 'no such parameter')}"
            )


def _rank_key(rank: int, world_size: int) -> str:
    return f"rank {rank} of {world_size}"


def _unpack(packed: bytes) -> Any:
    return torch.load(io.BytesIO(packed), weights_only=True)
