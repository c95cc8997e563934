"""Unmodified programs give the same results on the backend as on Gloo."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import dtcomm
import dtcomm.ddp
from dtcomm.launch.ranks import run_ranks
from tests.unit.backend.programs import AGREE, PROGRAMS, train


def run_all(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    results = {}
    for name, program in PROGRAMS.items():
        (Path(folder) / name).mkdir(exist_ok=True)
        results[name] = program(rank, world_size, str(Path(folder) / name)), str(dtcomm.backend.report())
    return results


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """Return the results by backend and rank. Fresh processes, because torch caches meshes with the rank."""
    return {
        backend: run_ranks(run_all, 2, str(tmp_path_factory.mktemp(backend)), backend=backend, fresh=True)
        for backend in ("gloo", "dtcomm")
    }


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_give_the_results_of_gloo(name: str, results: dict[str, list[dict[str, Any]]]) -> None:
    by_backend = {backend: [rank[name] for rank in ranks] for backend, ranks in results.items()}
    for (ours, report), (theirs, _) in zip(by_backend["dtcomm"], by_backend["gloo"]):
        assert "native" in report, report
        assert "fallback to" not in report, report
        for a, b in zip(ours, theirs, strict=True):
            if isinstance(a, torch.Tensor):
                torch.testing.assert_close(a, b)  # Gloo sums in another order
            else:
                assert a == b
    if name in AGREE:
        (first, _), (second, _) = by_backend["dtcomm"]
        for a, b in zip(first, second, strict=True):
            assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b, "ranks differ"


def train_compressed(rank: int, world_size: int) -> Any:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(12, 256), torch.nn.ReLU(), torch.nn.Linear(256, 5))
    model = torch.nn.parallel.DistributedDataParallel(net)
    state = dtcomm.ddp.compress(model, "int8")
    return train(model, rank), str(state.report())


def test_compressed_gradients_equal_those_over_gloo() -> None:
    ours = run_ranks(train_compressed, 2, backend="dtcomm")
    gloo = run_ranks(train_compressed, 2, backend="gloo")
    for (values, report), (gloo_values, _) in zip(ours, gloo):
        assert "int8" in report
        assert all(torch.equal(a, b) for a, b in zip(values, gloo_values))


@pytest.mark.slow
def test_programs_agree_on_four_ranks_of_two_hosts(tmp_path: Path) -> None:
    """Without shared memory: hierarchical schedules over Gloo's messages."""
    ranks = run_ranks(run_on_two_hosts, 4, str(tmp_path), backend=None, fresh=True)
    for results, report in ranks:
        assert "the ranks are on 2 hosts" in report
        for a, b in zip(results, ranks[0][0], strict=True):
            assert torch.equal(a, b)


def run_on_two_hosts(rank: int, world_size: int, folder: str) -> Any:
    os.environ["DTCOMM_HOST_ID"] = f"host{rank // 2}"
    dist.init_process_group("dtcomm", init_method=f"file://{folder}/meet", rank=rank, world_size=world_size)
    results = [result for name in ("dtensor", "fsdp2") for result in PROGRAMS[name](rank, world_size, folder)]
    return results, str(dtcomm.backend.report())
