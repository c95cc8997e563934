"""Unmodified programs give the same results on the backend as on Gloo."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import dtcomm
import dtcomm.ddp
from dtcomm.testing.ranks import run_ranks
from tests.backend.programs import AGREE, PROGRAMS, train


def run(rank: int, world_size: int, name: str, folder: str) -> Any:
    results = PROGRAMS[name](rank, world_size, folder)
    return results, str(dtcomm.backend.report())


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_same_as_on_gloo(name: str, tmp_path: Path) -> None:
    found = {}
    for backend in ("gloo", "dtcomm"):
        folder = tmp_path / backend
        folder.mkdir()
        found[backend] = run_ranks(run, 2, name, str(folder), backend=backend)
    for (ours, report), (theirs, _) in zip(found["dtcomm"], found["gloo"]):
        assert "native" in report, report
        assert "handed to" not in report, report
        for a, b in zip(ours, theirs, strict=True):
            if isinstance(a, torch.Tensor):
                torch.testing.assert_close(a, b)  # Gloo adds in another order
            else:
                assert a == b
    if name in AGREE:
        (first, _), (other, _) = found["dtcomm"]
        for a, b in zip(first, other, strict=True):
            assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b, "ranks differ"


def compressed(rank: int, world_size: int) -> Any:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(12, 256), torch.nn.ReLU(), torch.nn.Linear(256, 5))
    model = torch.nn.parallel.DistributedDataParallel(net)
    state = dtcomm.ddp.compress(model, "int8")
    return train(model, rank), str(state.report())


def test_compressed_gradients_over_the_backend() -> None:
    ours = run_ranks(compressed, 2, backend="dtcomm")
    gloo = run_ranks(compressed, 2, backend="gloo")
    for (values, report), (others, _) in zip(ours, gloo):
        assert "int8" in report
        assert all(torch.equal(a, b) for a, b in zip(values, others))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dtensor", "fsdp2"])
def test_on_four_ranks_of_two_hosts(name: str, tmp_path: Path) -> None:
    """Where ranks share no memory: hierarchical, over the store and Gloo's messages."""
    results = run_ranks(on_two_hosts, 4, name, str(tmp_path), backend=None)
    for values, report in results:
        assert "the ranks are on 2 hosts" in report
        for a, b in zip(values, results[0][0], strict=True):
            assert torch.equal(a, b)


def on_two_hosts(rank: int, world_size: int, name: str, folder: str) -> Any:
    import os

    import torch.distributed as dist

    os.environ["DTCOMM_HOST_ID"] = f"host{rank // 2}"
    dist.init_process_group("dtcomm", init_method=f"file://{folder}/meet", rank=rank, world_size=world_size)
    return run(rank, world_size, name, folder)
