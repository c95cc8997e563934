"""Torch's engines of NCCL: which one serves a group, what it is made with, and what is used of an unknown one."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from dtcomm.runtime.bootstrap import cuda

DEVICE = torch.device("cuda", 1)


class Engine:
    """What all engines have; ``made`` is what the last one was made with."""

    made: tuple[Any, ...] = ()
    called = "nccl"

    class Options:
        pass

    def __init__(self, *arguments: Any) -> None:
        Engine.made = arguments

    def name(self) -> str:
        return self.called


class ProcessGroupNCCL(Engine):
    """`nccl` until torch 2.14, then `nccl-legacy`."""

    bound_device_id = None


class ProcessGroupNCCL2(Engine):
    """`nccl2`, and since torch 2.15 `nccl`."""

    called = "nccl2"


class ProcessGroupNCCLLazy(Engine):
    called = "nccl-lazy"


class Other(Engine):
    called = "NCCL4Py"


KNOWN = [ProcessGroupNCCL, ProcessGroupNCCL2, ProcessGroupNCCLLazy]


def group_of(backend: object, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(dist, "get_backend", lambda group: "cpu:gloo,cuda:nccl")
    return SimpleNamespace(_get_backend=lambda device: backend)


@pytest.mark.parametrize("engine", [*KNOWN, Other])
def test_every_engine_is_nccl(engine: type[Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    assert cuda.backend_of(group_of(engine(), monkeypatch), DEVICE) == "nccl"


@pytest.mark.parametrize("engine", KNOWN)
@pytest.mark.parametrize("wrapped", [False, True])
def test_a_private_communicator_is_of_the_groups_engine_and_device(
    engine: type[Engine], wrapped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for known in KNOWN:
        monkeypatch.setattr(c10d, known.__name__, known, raising=False)
    backend: object = SimpleNamespace(wrapped_pg=engine()) if wrapped else engine()
    name = cuda.nccl_engine(group_of(backend, monkeypatch), DEVICE)
    assert name == engine.__name__
    store = dist.HashStore()
    private = cuda.make_nccl(name, store, 1, [4, 5, 6], timedelta(seconds=7), DEVICE)
    assert type(private) is engine
    assert Engine.made[:3] == (store, 1, 3)
    options = Engine.made[3]
    assert options._timeout == timedelta(seconds=7) and options.global_ranks_in_group == [4, 5, 6]
    assert DEVICE in (*Engine.made[4:], getattr(private, "bound_device_id", None))


def test_an_unknown_engine_is_used_through_its_group(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cuda.nccl_engine(group_of(Other(), monkeypatch), DEVICE) is None


@pytest.mark.skipif(not dist.is_nccl_available(), reason="this torch has no NCCL")
def test_torch_has_the_engines_that_are_named() -> None:
    assert isinstance(c10d.ProcessGroupNCCL.Options(), object)
    for name in cuda.NCCL_ENGINES:
        engine = getattr(c10d, name, None)  # the later ones are not in every version
        assert engine is None or engine.__name__ == name
    options = c10d.ProcessGroupNCCL.Options()
    options.global_ranks_in_group = [0, 1]
    assert options.global_ranks_in_group == [0, 1]
