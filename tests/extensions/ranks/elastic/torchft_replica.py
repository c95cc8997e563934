"""A replica of `test_torchft`: trains with torchft's manager and writes what it has to a file."""

from __future__ import annotations

import argparse
import json
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torchft
from torchft.local_sgd import DiLoCo, LocalSGD

import dtcomm
from dtcomm.extensions.elastic.torchft import ProcessGroup

WIDTH = 64


def main() -> None:
    """Train, and write the result."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--lighthouse", required=True)
    parser.add_argument("--method", choices=["localsgd", "diloco", "allreduce"], required=True)
    parser.add_argument("--codec", required=True)
    parser.add_argument("--leave-after", type=int, default=0, help="averages, then this replica exits")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, 1))
    inner = torch.optim.SGD(model.parameters(), lr=0.01)
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    manager = torchft.Manager(
        ProcessGroup(options.codec, timedelta(seconds=10)),
        model.load_state_dict,
        model.state_dict,
        min_replica_size=1 if options.leave_after or options.method == "allreduce" else 2,
        use_async_quorum=False,
        timeout=timedelta(seconds=10),
        quorum_timeout=timedelta(seconds=30),
        rank=0,
        world_size=1,
        store_addr="localhost",
        store_port=store.port,
        lighthouse_addr=options.lighthouse,
        replica_id=f"replica{options.rank}",
        hostname="localhost",
        init_sync=False,
    )
    options.out.with_suffix(".ready").touch()
    while not all((options.out.parent / f"{rank}.ready").exists() for rank in range(2)):
        time.sleep(0.01)
    result: dict[str, object] = {}
    torch.manual_seed(1 + options.rank)
    if options.method == "allreduce":
        sums, sizes = [], []
        for _ in range(4 if not options.leave_after else options.leave_after):
            manager.start_quorum()
            tensor = torch.full((1000,), float(10**options.rank))
            manager.allreduce(tensor).wait()
            committed = manager.should_commit()
            sums.append(round(float(tensor.mean()), 3) if committed else None)
            sizes.append(manager.num_participants())
        result = {"sums": sums, "sizes": sizes}
    else:
        outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
        trainer = (
            LocalSGD(manager, model, inner, sync_every=3)
            if options.method == "localsgd"
            else DiLoCo(manager, [model], inner, outer, sync_every=4)
        )
        with trainer:
            for _ in range(12):
                inner.zero_grad()
                x = torch.randn(8, WIDTH)
                torch.nn.functional.mse_loss(model(x), x.sum(1, keepdim=True)).backward()
                inner.step()
        result = {
            "weights": torch.cat([p.detach().view(-1) for p in model.parameters()]).tolist(),
            "steps": manager.current_step(),
            "wire_bytes": dtcomm.info()["wire_bytes"],
        }
    options.out.write_text(json.dumps(result))
    manager.shutdown()


if __name__ == "__main__":
    main()
