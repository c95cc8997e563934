"""What a compressor's state is on disk: plain values and tensors, one dict a rank, loadable by torch.load.

``version``, ``steps`` and ``seed`` are the same on all ranks, ``rank`` and ``world_size`` say whose it is, and
``residuals`` maps a parameter's name to a flat fp32 tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from dtcomm.compress.residuals import redistribute

VERSION = 1

State = Mapping[str, Any]


def share_of(
    saved: State | Sequence[State], rank: int, world_size: int
) -> tuple[State, dict[str, torch.Tensor]]:
    """A state with the counters, and the residuals that ``rank`` of ``world_size`` ranks starts with.

    ``saved`` is this rank's own state, or those of all ranks of the run that saved them, in rank order: then
    the number of ranks may have changed, and the sum of the residuals over ranks is kept. ValueError where
    the states are of another version, not complete, or one alone comes from another number of ranks.
    """
    states = [saved] if isinstance(saved, Mapping) else list(saved)
    if not states:
        raise ValueError("states: got none")
    for state in states:
        if state.get("version") != VERSION:
            raise ValueError(f"state of version {state.get('version')!r}: want {VERSION}")
    first = states[0]
    before = first["world_size"]
    if isinstance(saved, Mapping):
        if before != world_size:
            raise ValueError(
                f"this state is one of {before} ranks', the group has {world_size}: pass the list of all ranks' states"
            )
        if first["rank"] != rank:
            raise ValueError(
                f"this state is rank {first['rank']}'s, this is rank {rank}: every rank saves and loads its own; in "
                "torch.distributed.checkpoint wrap it in dtcomm.compress.distributed_checkpoint.Checkpointed"
            )
        return first, dict(first["residuals"])
    if [state["rank"] for state in states] != list(range(before)):
        raise ValueError(
            f"states of ranks {[state['rank'] for state in states]}: want all {before}, in rank order"
        )
    if before == world_size:
        return first, dict(states[rank]["residuals"])
    return first, redistribute([state["residuals"] for state in states], rank, world_size)


def require_fit(residuals: Mapping[str, torch.Tensor], sizes: Mapping[str, int]) -> None:
    """ValueError that names a residual for which the model (name -> elements) has no parameter of its size."""
    for name, residual in residuals.items():
        if sizes.get(name) != residual.numel():
            raise ValueError(
                f"the state has {residual.numel()} residuals for {name!r}, the model "
                f"{sizes.get(name, 'no such parameter')}"
            )
