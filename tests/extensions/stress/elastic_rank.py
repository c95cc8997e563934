"""One rank of the kill-and-join campaign: trains until it is ended, and logs every average as a line of JSON."""

from __future__ import annotations

import json
import signal
import sys
import time
import zlib
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

from dtcomm.extensions.elastic import ElasticLocalSGD
from tests.stress.soak_rank import resource_usage

WIDTH = 64
OPTIONS: dict[str, dict[str, Any]] = {
    "diloco": {"every": 4},
    "streaming": {"every": 8, "fragments": 2, "delay": 3, "mixing": 0.5},
}


def nesterov(weights: list[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(weights, lr=0.5, momentum=0.8, nesterov=True)


def main(address: str, path: str, method: str, timeout_s: str) -> None:
    """Train; SIGTERM makes the rank leave after its step."""
    torch.set_num_threads(1)
    leaves = False

    def leave(number: int, frame: FrameType | None) -> None:
        nonlocal leaves
        leaves = True

    signal.signal(signal.SIGTERM, leave)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.002)
    local = ElasticLocalSGD(
        model,
        address,
        codec="int4",
        outer=nesterov,
        timeout_s=float(timeout_s),
        name=Path(path).stem,
        **OPTIONS[method],
    )
    generator = torch.Generator().manual_seed(zlib.crc32(path.encode()))
    with open(path, "w", buffering=1) as log:
        while not leaves:
            x = torch.randn(32, WIDTH, generator=generator)
            loss = (model(x) - x.flip(1)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if local.step():
                common = b"".join(tensor.numpy().tobytes() for tensor in local._common)
                line = {
                    "at": round(time.time(), 3),
                    "step": local.steps,
                    "view": local.view.number,
                    "ranks": len(local.view.names),
                    "loss": float(loss.detach()),
                    "digest": zlib.crc32(common),
                    **resource_usage(),
                }
                log.write(json.dumps(line) + "\n")
            time.sleep(0.01)
    local.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
