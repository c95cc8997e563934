"""Two hosts, made of network namespaces: the process-group runtime over a real link."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from bench.common.pool import Pool
from dtcomm.testing import hosts

WHY = hosts.available()
pytestmark = pytest.mark.skipif(bool(WHY), reason=WHY or "-")


class Rank:
    """One rank in a namespace of its own."""

    def __init__(self, rank: int, ranks: int, rendezvous: str, namespaces: list[str]) -> None:
        hosts.join(rank, ranks, rendezvous, namespaces)
        self.rank = rank

    def info(self) -> dict[str, Any]:
        """How the ranks are served."""
        import dtcomm

        return dtcomm.collectives.info()

    def reduced(self, numel: int, codec: str, algorithm: str) -> torch.Tensor:
        """The sum over ranks of small integers, with a residual where the codec loses something."""
        import dtcomm

        tensor = (torch.arange(numel) % 11 + self.rank).float()
        dtcomm.all_reduce(tensor, codec=codec, algorithm=algorithm)
        return tensor

    def close(self) -> None:
        """Leaves the group."""
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory):  # type: ignore[no-untyped-def]
    meeting = Path(tmp_path_factory.mktemp("hosts")) / "meet"
    with hosts.two_hosts(10) as namespaces:
        with Pool(Rank, 2, timeout=60, rendezvous=str(meeting), namespaces=namespaces) as pool:
            yield pool


def test_ranks_in_two_namespaces_are_two_hosts(pool: Pool) -> None:
    for info in pool.call("info"):
        assert info["runtime"] == "process_group" and info["hosts"] == 2


@pytest.mark.parametrize("algorithm", ["auto", "ring", "tree", "one_shot", "two_shot"])
@pytest.mark.parametrize("codec", ["none", "fp16", "int8"])
def test_results_are_the_same_on_both_and_right(pool: Pool, codec: str, algorithm: str) -> None:
    for numel in (1, 1000, 300_001):
        first, second = pool.call("reduced", numel=numel, codec=codec, algorithm=algorithm)
        assert torch.equal(first, second)
        expected = (torch.arange(numel) % 11 * 2 + 1).float()
        if codec == "int8":
            torch.testing.assert_close(first, expected, rtol=0, atol=0.3)
        else:
            assert torch.equal(first, expected)
