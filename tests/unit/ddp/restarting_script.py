"""A training script for torchrun. Rank 1 is killed in a backward pass of its first start."""

from __future__ import annotations

import json
import os
import signal
from copy import deepcopy
from pathlib import Path

import torch
import torch.distributed as dist

from dtcomm import ddp
from dtcomm.errors import PeerLost
from tests.unit.ddp.models import SMALL_BUCKETS, batch, wrapped

STEPS = 8


def train(folder: Path, killed_at: int) -> tuple[int, float]:
    """Train; return the first step and the sum of all weights after the last one."""
    rank = dist.get_rank()
    own_path = folder / f"rank{rank}.pt"
    model = wrapped(**SMALL_BUCKETS)
    state = ddp.compress(model, "int4", feedback=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    begin = 0
    # Ranks may end between two saves, so the run continues from the last step that all of them have.
    saved = [torch.load(path) for path in sorted(folder.glob("rank*.pt"))]
    if len(saved) == dist.get_world_size():
        begin = min(max(steps) for steps in saved)
        model.module.load_state_dict(saved[rank][begin]["model"])
        state.load_state_dict(saved[rank][begin]["compression"])
    recent = dict(saved[rank]) if begin else {}
    first_start = os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0"

    def die(gradient: torch.Tensor) -> None:
        if rank == 1 and first_start and state.steps == killed_at:
            os.kill(os.getpid(), signal.SIGKILL)

    # Gradients come from the last layer to the first: by now a bucket is under way.
    model.module.first.weight.register_hook(die)
    for step in range(begin, STEPS):
        optimizer.zero_grad()
        loss = (model(batch(rank, step)) - 1).square().mean()
        try:
            loss.backward()
        except PeerLost as error:
            (folder / f"survivor{rank}.txt").write_text(str(error))
            raise
        optimizer.step()
        recent = {
            step + 1: {"model": deepcopy(model.module.state_dict()), "compression": state.state_dict()},
            **recent,
        }
        torch.save(dict(list(recent.items())[:2]), own_path.with_suffix(".new"))
        own_path.with_suffix(".new").rename(own_path)
    return begin, sum(float(parameter.detach().double().sum()) for parameter in model.parameters())


def main(folder: str, killed_at: int) -> None:
    """Train, and write checkpoints, the sum of the weights and the error of a surviving rank to ``folder``."""
    # The agent ends the survivor as soon as it sees that rank 1 has ended; the survivor has to write its error first.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # The agent's store outlives the ranks: the keys of the first start must not be read after the restart.
    agent = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    store = dist.PrefixStore(f"start {os.environ['TORCHELASTIC_RESTART_COUNT']}", agent)
    own, all_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", store=store, rank=own, world_size=all_ranks)
    began, total = train(Path(folder), killed_at)
    (Path(folder) / f"end{own}.json").write_text(json.dumps([began, total]))
    dist.destroy_process_group()
