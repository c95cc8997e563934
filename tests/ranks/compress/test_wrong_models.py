"""A function that gets what another one takes raises a TypeError that names the other one."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.nn.parallel import DistributedDataParallel

from dtcomm import ddp, frameworks, fsdp, local_sgd, pipeline, tp
from dtcomm.compress.models import INSTEAD
from tests.support.rank_tests import on_ranks

#: Function → the kinds of objects that it takes, or refuses for another reason than their type.
FUNCTIONS: dict[Callable[[Any], Any], set[str]] = {
    lambda given: ddp.compress(given): {"ddp"},
    lambda given: ddp.attach(given): {"framework"},
    lambda given: fsdp.compress(given): {"fsdp"},
    lambda given: fsdp.attach(given): {"framework"},
    lambda given: frameworks.save_with(given, SimpleNamespace()): {"framework"},
    lambda given: tp.compress(given, None, plan={"0": "replicated"}): {"module"},
    lambda given: pipeline.compress(given): {"stage"},
    lambda given: local_sgd.attach(given, lambda model: None): {"framework"},  # type: ignore[arg-type, return-value]
    lambda given: local_sgd.LocalSGD(given): {"module", "ddp", "fsdp", "compiled"},
}


def make_objects(rank: int, ranks: int) -> dict[str, Any]:
    """Return an object of each kind."""
    sharded = nn.Sequential(nn.Linear(8, 8))
    fully_shard(sharded, mesh=init_device_mesh("cpu", (ranks,)))
    replicated = DistributedDataParallel(nn.Linear(8, 8))
    module = nn.Linear(8, 8)
    return {
        "framework": SimpleNamespace(strategy=SimpleNamespace(setup=None)),
        "stage": PipelineStage(module, rank, ranks, torch.device("cpu")),
        "optimizer": torch.optim.SGD(module.parameters(), lr=0.1),
        "tensor": torch.ones(8),
        "compiled": torch.compile(replicated),
        "fsdp": sharded,
        "ddp": replicated,
        "module": module,
        "": object(),
    }


@on_ranks(2)
def test_each_function_names_the_one_that_takes_what_it_was_given(rank: int, ranks: int) -> None:
    objects = make_objects(rank, ranks)
    assert objects.keys() == INSTEAD.keys()
    for function, taken in FUNCTIONS.items():
        for kind in objects.keys() - taken:
            with pytest.raises(TypeError) as raised:
                function(objects[kind])
            assert str(raised.value).endswith(INSTEAD[kind]), (kind, raised.value)
            assert f"got {type(objects[kind]).__name__}" in str(raised.value)


@on_ranks(2)
def test_a_list_of_stages_is_judged_by_its_first_element(rank: int, ranks: int) -> None:
    with pytest.raises(TypeError, match=r"stages: expected stages .*, got Linear; wrap it in Distributed"):
        pipeline.compress([nn.Linear(8, 8)])
