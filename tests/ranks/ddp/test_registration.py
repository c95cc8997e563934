"""A model whose hook is registered on some ranks only is an error that names the others, within seconds."""

from __future__ import annotations

import time

import pytest
import torch.distributed as dist

from dtcomm import ddp
from dtcomm.ddp import observers
from dtcomm.errors import CollectiveMismatch
from dtcomm.launch.ranks import run_ranks
from tests.unit.ddp.models import backward, wrapped


def register_on_some_ranks(rank: int, world_size: int, hooked: tuple[int, ...]) -> str:
    first = ddp.compress(wrapped(), "int8")  # another model of the group, with the hook on all ranks
    model = wrapped()
    if rank not in hooked:
        return ""
    state = ddp.compress(model, "int8")
    with pytest.MonkeyPatch.context() as patch, pytest.raises(CollectiveMismatch) as error:
        patch.setattr(observers, "REGISTRATION_LIMIT_S", 0.3)
        backward(model, rank, 0)
    assert state.error is error.value and first.error is None
    return str(error.value)


def test_ranks_without_the_hook_are_named() -> None:
    messages = run_ranks(register_on_some_ranks, 3, (1,))
    assert messages[1].startswith(
        "dtcomm.ddp: ranks 0 and 2 did not register the hook for this model within 0.3 s"
    )
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
