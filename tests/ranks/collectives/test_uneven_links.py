"""An all_reduce, DDP and LocalSGD over uneven links: DTCOMM_TOPOLOGY names groups that are no hosts."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import dtcomm
from dtcomm.launch.ranks import run_ranks
from dtcomm.local_sgd import LocalSGD

FAST, SLOW = 100.0, 1.0
SITE = (0, 1, 0, 1)  # of each rank: not that of a host
NUMEL = 4096
CODEC = "none/int8"


def reduce_and_train(rank: int, ranks: int, folder: str) -> None:
    torch.set_num_threads(1)
    rates = [[FAST if a == b else SLOW for b in SITE] for a in SITE]
    path = Path(folder, f"links-{rank}.json")
    path.write_text(json.dumps({"gbit": rates}))
    os.environ["DTCOMM_TOPOLOGY"] = str(path)

    # What int8 cannot represent cancels inside a site, and what crosses sites it represents exactly.
    large = torch.rand(NUMEL, generator=torch.Generator().manual_seed(SITE[rank])).mul(2**20).round()
    expected = 127.0 * (1 - 2 * (torch.arange(NUMEL) % 2))
    small = expected * (SITE[rank] == 0)
    tensor = small - large if rank < 2 else large.clone()
    dtcomm.all_reduce(tensor, codec=CODEC, algorithm="auto")
    assert tensor.allclose(expected, atol=1.0), "an int8 step of the large numbers is 8000"

    tensor = torch.randn(NUMEL, generator=torch.Generator().manual_seed(rank))
    exact = tensor.clone()
    dist.all_reduce(exact)
    dtcomm.all_reduce(tensor, codec=CODEC, algorithm="auto")
    assert 1e-4 < (tensor - exact).norm() / exact.norm() < 0.02, "encoded between sites"
    same = [torch.empty_like(tensor) for _ in range(ranks)]
    dist.all_gather(same, tensor)
    assert all(other.equal(tensor) for other in same)

    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(128, 64))
    state = dtcomm.ddp.compress(model, CODEC, algorithm="auto")
    model(torch.full((4, 128), float(rank))).square().mean().backward()
    # A rank sends half of the tensor uncompressed inside its site; the sum of both sites travels in int8 everywhere.
    report = state.report()
    assert 0.48 < report.wire_bytes / report.plain_bytes < 0.56
    local = LocalSGD(torch.nn.Linear(128, 64), every=1, codec=CODEC, algorithm="auto")
    assert local.step()
    assert 0.48 < local.report().wire_bytes / local.report().plain_bytes < 0.56


def test_the_codec_acts_between_the_groups_alone(tmp_path: Path) -> None:
    run_ranks(reduce_and_train, 4, str(tmp_path))
