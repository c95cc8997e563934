"""The agreement of ranks on memory that all can access. Every rank is a thread; torch's device memory is replaced."""

import threading
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as torch_memory

from dtcomm.runtime.bootstrap.rendezvous import StoreExchange
from dtcomm.runtime.cuda_peer import memory
from dtcomm.runtime.cuda_peer.memory import IPC, SYMMETRIC, LocalBuffer, PeerBuffers
from dtcomm.runtime.process_groups import Deadline

RANKS = 3
NAMES = [f"rank {rank}" for rank in range(RANKS)]


def map_on_all_ranks(
    monkeypatch: pytest.MonkeyPatch,
    info_of: Callable[[str, int], dict],
    offset_of: Callable[[str, int], int] = lambda kind, rank: 0,
) -> list[tuple[str, str]]:
    """The kind of memory that every rank got, and the reason why it is not a preferred kind."""

    def allocated(kind: str, group: object, device: object, size: int, rank: int, ranks: int) -> LocalBuffer:
        return LocalBuffer(torch.zeros(size), info_of(kind, rank))

    def mapped(kind: str, infos: list, rank: int) -> PeerBuffers:
        assert infos == [info_of(kind, rank) for rank in range(RANKS)]
        return PeerBuffers(kind, (), torch.zeros(1), None, offset_of(kind, rank))

    monkeypatch.setattr(memory, "allocate", allocated)
    monkeypatch.setattr(memory, "map_symmetric", lambda _, __, infos, rank: mapped(SYMMETRIC, infos, rank))
    monkeypatch.setattr(memory, "map_ipc_handles", lambda _, __, infos, rank, ___: mapped(IPC, infos, rank))
    store, results = dist.HashStore(), [("", "")] * RANKS

    def work(rank: int) -> None:
        exchange = StoreExchange(store, "test", rank, range(RANKS), Deadline(timedelta(seconds=20)))
        device = torch.device("cpu")
        buffers, reason = memory.map_peers(exchange, NAMES, None, device, 8, rank, ["a", "b", "c"])
        results[rank] = "" if buffers is None else buffers.kind, reason

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(set(results)) == 1, results
    return results


def failing_step(kind: str, rank: int) -> Callable[[str, int], int]:
    def step(step_kind: str, at: int) -> int:
        if (step_kind, at) == (kind, rank):
            raise RuntimeError("out of memory\nand more")
        return 0

    return step


def test_symmetric_memory_is_preferred(monkeypatch: pytest.MonkeyPatch) -> None:
    assert map_on_all_ranks(monkeypatch, lambda kind, rank: {"from": rank})[0] == (SYMMETRIC, "")


@pytest.mark.parametrize("step", ["allocate", "map"])
def test_failure_of_one_rank_moves_all_ranks_to_ipc(monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    fault = failing_step(SYMMETRIC, 1)
    info_of = fault if step == "allocate" else lambda kind, rank: 0
    offset_of = fault if step == "map" else lambda kind, rank: 0
    assert map_on_all_ranks(monkeypatch, info_of, offset_of)[0] == (
        IPC,
        "symmetric memory: rank 1: out of memory",
    )


def test_all_ranks_report_the_same_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    kind, reason = map_on_all_ranks(
        monkeypatch,
        failing_step(IPC, 2),
        lambda kind, rank: rank,  # offsets
    )[0]
    assert (
        kind == "" and "symmetric memory: the ranks' memory begins at different offsets, [0, 1, 2]" in reason
    )
    assert "CUDA IPC: rank 2: out of memory" in reason and "and more" not in reason


def test_torch_rendezvous_is_refused_when_counts_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch numbers a process's rendezvous, so all ranks must have made the same number of them."""
    own = torch.zeros(4, dtype=torch.uint8)
    groups: list[str] = []

    def rendezvous(tensor: torch.Tensor, group: str) -> SimpleNamespace:
        groups.append(group)
        if group == "breaks":
            raise RuntimeError("not here")
        return SimpleNamespace(buffer_ptrs=[tensor.data_ptr() - 2, 0], offset=2)

    monkeypatch.setattr(torch_memory, "rendezvous", rendezvous)
    monkeypatch.setattr(memory, "_rendezvous", 4)

    def map_group(group: str, peer_count: int) -> PeerBuffers:
        local = LocalBuffer(own, {"rendezvous": memory._rendezvous})
        return memory.map_symmetric(
            SimpleNamespace(group_name=group), local, [local.info, {"rendezvous": peer_count}], 0
        )

    buffers = map_group("works", 4)
    assert buffers.addresses == (own.data_ptr(), 2) and buffers.offset == 2
    with pytest.raises(RuntimeError, match=r"rendezvous counts differ between ranks \(\[5, 4\]\)"):
        map_group("not asked", 4)
    with pytest.raises(RuntimeError, match="not here"):
        map_group("breaks", 5)
    with pytest.raises(RuntimeError, match="rendezvous counts differ"):
        map_group("not asked", -1)
    assert groups == ["works", "breaks"]
