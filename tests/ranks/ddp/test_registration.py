"""What some ranks alone call, or with other options, is an error that names them or the options, within seconds."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from dtcomm import ddp, fsdp, tp
from dtcomm.collectives import groups
from dtcomm.ddp import observers
from dtcomm.errors import CollectiveMismatch
from dtcomm.fsdp import sharded_optimizer
from dtcomm.launch.ranks import run_ranks
from dtcomm.local_sgd import LocalSGD, local_sgd
from tests.unit.ddp.models import backward, wrapped


def register_on_some_ranks(rank: int, world_size: int, hooked: tuple[int, ...]) -> str:
    first = ddp.compress(wrapped(), "int8")  # another model of the group, with the hook on all ranks
    model = wrapped()
    if rank not in hooked:
        return ""
    state = ddp.compress(model, "int8")
    with pytest.MonkeyPatch.context() as patch, pytest.raises(CollectiveMismatch) as error:
        patch.setattr(groups, "ANNOUNCEMENT_LIMIT_S", 0.3)
        backward(model, rank, 0)
    assert state.error is error.value and first.error is None
    return str(error.value)


def test_ranks_without_the_hook_are_named() -> None:
    messages = run_ranks(register_on_some_ranks, 3, (1,))
    assert messages[1].startswith("dtcomm.ddp.compress: ranks 0 and 2 did not call it within 0.3 s")
    assert messages[0] == messages[2] == ""


def register_late(rank: int, world_size: int) -> tuple[int, bool]:
    # A subgroup, whose ranks are not the positions in it.
    group = dist.new_group([1, 2])
    if rank == 0:
        return 0, False
    model = wrapped(process_group=group)
    if rank == 2:
        time.sleep(0.3)
    state = ddp.compress(model, "int8")
    for step in range(2):
        backward(model, rank, step)
    observed = state._reducer._callbacks["begin_pass"]
    return state.steps, any(
        isinstance(callback.__self__, observers.RegistrationObserver) for callback in observed
    )


def test_a_rank_that_registers_later_is_waited_for() -> None:
    """After the first pass there is nothing left to check."""
    assert run_ranks(register_late, 3) == [(0, False), (2, False), (2, False)]


def layers() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))


def use_ddp(**options: Any) -> None:
    model = DistributedDataParallel(layers())
    ddp.compress(model, "int8", **options)
    model(torch.ones(2, 64)).sum().backward()


def use_fsdp(**options: Any) -> None:
    model = layers()
    fully_shard(model)
    fsdp.compress(model, "int8", **options)
    model(torch.ones(2, 64))


def use_sharded_optimizer(**options: Any) -> None:
    fsdp.ShardedOptimizer(layers().named_parameters(), torch.optim.SGD, lr=0.1, gradients="int8", **options)


def use_local_sgd(**options: Any) -> None:
    LocalSGD(layers(), **options)


def use_tp(**options: Any) -> None:
    model = layers()
    tp.compress(model, None, "int8", {"0": "column", "1": "row"}, **options)
    model(torch.ones(2, 64))


CASES: list[tuple[Callable[..., None], str, dict[str, Any], dict[str, Any], str]] = [
    (use_ddp, "dtcomm.ddp.compress", {}, {"feedback": False}, '{"feedback": "False"}'),
    (
        use_ddp,
        "dtcomm.ddp.compress",
        {"feedback": True},
        {"feedback": True, "residual": "int8"},
        '{"residual": "int8"}',
    ),
    (use_fsdp, "dtcomm.fsdp.compress", {}, {"sample_every": 7}, '{"sample_every": "7"}'),
    (use_sharded_optimizer, "ShardedOptimizer", {}, {"feedback": True}, '"feedback": "True"'),
    (use_local_sgd, "LocalSGD", {"every": 2}, {"every": 3}, '{"every": "3"}'),
    (use_tp, "dtcomm.tp.compress", {}, {"latency": False}, '{"latency": "False"}'),
]


def call_unlike(rank: int, world_size: int) -> list[tuple[str, str]]:
    """Return what each integration says to other options on rank 1, and then where rank 1 does not call it."""
    said = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(groups, "ANNOUNCEMENT_LIMIT_S", 0.5)
        for module in (sharded_optimizer, local_sgd):
            patch.setattr(module, "CONSTRUCTOR_LIMIT_S", 0.5)
        for use, _, first, second, _ in CASES:
            dist.barrier()
            with pytest.raises(CollectiveMismatch) as differs:
                use(**(second if rank else first))
            said.append((str(differs.value), ""))
        for number, use in enumerate(dict.fromkeys(case[0] for case in CASES)):
            dist.barrier()
            if use is use_ddp:
                continue
            if rank == 0:
                with pytest.raises(CollectiveMismatch) as missing:
                    use()
                said[number] = said[number][0], str(missing.value)
            elif use is use_fsdp:
                fully_shard(layers())  # makes a mesh with the other rank
    return said


def test_every_integration_names_options_that_differ_and_ranks_that_do_not_call_it() -> None:
    for rank, said in enumerate(run_ranks(call_unlike, 2)):
        for (_, function, _, _, differing), (differs, missing) in zip(CASES, said, strict=True):
            assert f"options of {function}: rank 0: " in differs.replace("dtcomm.fsdp.S", "S").replace(
                "dtcomm.local_sgd.L", "L"
            )
            assert differing in differs and '"seed"' not in differs
            assert not missing or "rank 1 did not call it within 0.5 s" in missing
        assert sum(bool(missing) for _, missing in said) == (4 if rank == 0 else 0)
