"""Rank processes that have imported the frameworks: an import takes longer than any of these tests."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest

from dtcomm.launch import fork_server, process_pool, ranks
from dtcomm.launch.process_pool import ProcessPool

MODULES = ("accelerate", "transformers.trainer", "lightning.pytorch")


@pytest.fixture(scope="package", autouse=True)
def rank_processes_with_frameworks() -> Iterator[None]:
    installed = [name for name in MODULES if importlib.util.find_spec(name.partition(".")[0])]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fork_server, "MODULES", [*fork_server.MODULES, *installed])
        for module in (fork_server, process_pool):
            patch.setattr(module, "STARTUP_SECONDS", 270.0)  # minutes where all cores are busy
        patch.setattr(ranks, "_pool", ProcessPool())
        ranks.run_ranks(start, 2)
        yield
        ranks._pool.close()


def start(rank: int, world_size: int) -> None:
    """Do nothing, in a process that is then kept."""
