"""What a failed average of `ElasticLocalSGD` held is given back: groups, descriptors and threads."""

from __future__ import annotations

import gc
import weakref
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from dtcomm.errors import DtcommError
from dtcomm.extensions.elastic import Coordinator, ElasticLocalSGD
from dtcomm.launch.ranks import spawn_ranks
from dtcomm.local_sgd import LocalSGD
from tests.extensions.ranks.elastic.test_elastic_local_sgd import EVERY, SECRET, make_model, train_step
from tests.stress.soak_rank import resource_usage

AVERAGES = 8


def fail_often(process: int, world_size: int, address: str, options: dict[str, Any]) -> dict[str, Any]:
    """Make averages, each of which fails once on rank 1; count what exists after each of them.

    Nothing depends on the garbage collector, which may not run for a long time.
    """
    torch.set_num_threads(1)
    model = make_model(seed=0)
    local = ElasticLocalSGD(model, address, EVERY, "int4", timeout_s=20, name=f"process {process}", **options)
    rank, complete, connect = local.view.rank, LocalSGD._complete, local._connect
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    groups = [weakref.ref(dist.group.WORLD)]
    attempts = 0

    def fail_or_complete(self: LocalSGD, average: Any) -> None:
        nonlocal attempts
        attempts += 1
        if attempts % 2 and rank == 1:
            raise DtcommError("a fault of this test")
        complete(self, average)

    def connect_and_note(view: Any) -> None:
        connect(view)
        groups.append(weakref.ref(dist.group.WORLD))

    local._connect = connect_and_note  # type: ignore[method-assign]
    usage, alive = [], []
    with patch.object(LocalSGD, "_complete", fail_or_complete):
        while len(usage) < AVERAGES:
            train_step(model, optimizer, local.steps)
            if local.step():
                usage.append(resource_usage())
                alive.append(sum(group() is not None for group in groups))
            if len(usage) == 2:
                gc.collect()
                gc.disable()
    gc.enable()
    local.close()
    return {"usage": usage, "alive": alive, "groups": len(groups)}


@pytest.mark.parametrize(
    "options", [{}, {"fragments": 2, "delay": 3, "mixing": 0.5}], ids=["diloco", "streaming"]
)
def test_failed_averages_leave_nothing_behind(monkeypatch: Any, options: dict[str, Any]) -> None:
    monkeypatch.setenv("DTCOMM_SECRET", SECRET["DTCOMM_SECRET"])
    with (
        Coordinator("127.0.0.1", ranks=2) as coordinator,
        spawn_ranks(fail_often, 2, coordinator.address, options, backend=None, env=SECRET) as ranks,
    ):
        results = [outcome.result for outcome in ranks.join(60)]
    for result in results:
        assert result["groups"] > AVERAGES, "each average failed once"
        assert result["alive"][2:] == [1] * (AVERAGES - 2), result["alive"]
        for name in ("descriptors", "threads"):
            counts = [usage[name] for usage in result["usage"][2:]]
            assert max(counts) - counts[0] <= 2, (name, counts)
