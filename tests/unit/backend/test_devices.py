"""CUDA tensors fall back to NCCL. No GPU is needed: the tensors are fake, and a stub takes the place of NCCL's
group."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

from dtcomm import torch_compat
from dtcomm.backend import fallback_backends
from dtcomm.backend.process_group import DtcommProcessGroup

CUDA = torch.device("cuda", 0)


class GroupStub:
    """A stub of the torch group around NCCL that records the names of its calls."""

    BackendType = dist.ProcessGroup.BackendType

    def __init__(self) -> None:
        self.registered: list[tuple[str, Any]] = []
        self.called: list[str] = []

    def _set_default_backend(self, kind: Any) -> None:
        return None

    def _register_backend(self, device: torch.device, kind: Any, backend: Any) -> None:
        self.registered.append((device.type, kind))

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*_: Any) -> Any:
            self.called.append(name)
            return dist.Work()

        return call


def _calls(group: DtcommProcessGroup, tensor: torch.Tensor) -> dict[str, Callable[[], Any]]:
    """Return every operation of a group by the name of the fallback's method that it must call."""
    pair = [tensor, tensor]
    barrier = dist.BarrierOptions()
    barrier.device = CUDA
    scattering = dist.ReduceScatterOptions()
    return {
        "allreduce": lambda: group.allreduce([tensor], dist.AllreduceOptions()),
        "allreduce_coalesced": lambda: group.allreduce_coalesced(pair),
        "reduce": lambda: group.reduce([tensor], dist.ReduceOptions()),
        "broadcast": lambda: group.broadcast([tensor], dist.BroadcastOptions()),
        "allgather": lambda: group.allgather([pair], [tensor]),
        "_allgather_base": lambda: group._allgather_base(tensor, tensor),
        "allgather_coalesced": lambda: group.allgather_coalesced([pair, pair], pair),
        "allgather_into_tensor_coalesced": lambda: group.allgather_into_tensor_coalesced(pair, pair),
        "gather": lambda: group.gather([pair], [tensor], dist.GatherOptions()),
        "scatter": lambda: group.scatter([tensor], [pair], dist.ScatterOptions()),
        "reduce_scatter": lambda: group.reduce_scatter([tensor], [pair], scattering),
        "_reduce_scatter_base": lambda: group._reduce_scatter_base(tensor, tensor, scattering),
        "reduce_scatter_tensor_coalesced": lambda: group.reduce_scatter_tensor_coalesced(pair, pair),
        "alltoall": lambda: group.alltoall(pair, pair),
        "alltoall_base": lambda: group.alltoall_base(tensor, tensor),
        "barrier": lambda: group.barrier(barrier),
        "send": lambda: group.send([tensor], 1),
        "recv": lambda: group.recv([tensor], 1),
        "recv_anysource": lambda: group.recv_anysource([tensor]),
    }


@pytest.mark.parametrize("nccl", [True, False])
def test_every_operation_on_a_gpu_falls_back_and_is_reported(
    monkeypatch: pytest.MonkeyPatch, nccl: bool
) -> None:
    nccl_group = GroupStub()

    def process_group(*_: Any) -> GroupStub:
        return nccl_group

    process_group.BackendType = GroupStub.BackendType  # type: ignore[attr-defined]
    dist_stub = SimpleNamespace(ProcessGroup=process_group, is_nccl_available=lambda: nccl)
    monkeypatch.setattr(fallback_backends, "dist", dist_stub)
    torch_stub = SimpleNamespace(device=torch.device, cuda=SimpleNamespace(is_available=lambda: True))
    monkeypatch.setattr(fallback_backends, "torch", torch_stub)
    monkeypatch.setattr(fallback_backends.FallbackBackends, "_make_nccl", lambda *_: "nccl")
    monkeypatch.setattr(torch_compat, "make_gloo", lambda *_: "gloo")
    group = DtcommProcessGroup(dist.HashStore(), 0, 2, timedelta(seconds=5), "devices")
    group._ranks = [0, 1]  # torch does not know the group
    with FakeTensorMode():
        tensor = torch.empty(8, device=CUDA)
        calls = _calls(group, tensor)
        for call in calls.values():
            call()
    kind = GroupStub.BackendType.NCCL if nccl else GroupStub.BackendType.GLOO
    assert nccl_group.registered == [("cuda", kind)]
    assert nccl_group.called == list(calls)
    fallbacks = [(to, reason, times) for (_, to, reason), times in group._fallbacks.counts.items()]
    assert len(fallbacks) == len(calls)
    assert set(fallbacks) == {("nccl" if nccl else "gloo", "on cuda", 1)}
