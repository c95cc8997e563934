"""How ranks agree on memory that all of them reach: each a thread, what torch makes on a device stood in for."""

import threading
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as torch_memory

from dtcomm.runtime.bootstrap.store_exchange import StoreExchange
from dtcomm.runtime.cuda_peer import memory
from dtcomm.runtime.cuda_peer.memory import IPC, SYMMETRIC, Offer, Reached

RANKS = 3
NAMES = [f"rank {rank}" for rank in range(RANKS)]


def agreed(
    monkeypatch: pytest.MonkeyPatch,
    offer: Callable[[str, int], dict],
    reach: Callable[[str, int], int] = lambda kind, rank: 0,
) -> list[tuple[str, str]]:
    """What every rank ended with: the kind of memory, and why there is none."""

    def offered(kind: str, group: object, device: object, size: int, rank: int, ranks: int) -> Offer:
        return Offer(torch.zeros(size), offer(kind, rank))

    def reached(kind: str, words: list, rank: int) -> Reached:
        assert words == [offer(kind, each) for each in range(RANKS)]
        return Reached(kind, (), torch.zeros(1), None, reach(kind, rank))

    monkeypatch.setattr(memory, "offer", offered)
    monkeypatch.setattr(memory, "symmetric", lambda _, __, words, rank: reached(SYMMETRIC, words, rank))
    monkeypatch.setattr(memory, "by_handles", lambda _, __, words, rank, ___: reached(IPC, words, rank))
    store, said = dist.HashStore(), [("", "")] * RANKS

    def work(rank: int) -> None:
        exchange = StoreExchange(store, "test", rank, range(RANKS), timedelta(seconds=20))
        device = torch.device("cpu")
        made, why = memory.reach(exchange, NAMES, None, device, 8, rank, ["a", "b", "c"])
        said[rank] = "" if made is None else made.kind, why

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(set(said)) == 1, said
    return said


def fails(kind: str, rank: int) -> Callable[[str, int], int]:
    def step(given: str, at: int) -> int:
        if (given, at) == (kind, rank):
            raise RuntimeError("out of memory\nand more")
        return 0

    return step


def test_symmetric_memory_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    assert agreed(monkeypatch, lambda kind, rank: {"from": rank})[0] == (SYMMETRIC, "")


@pytest.mark.parametrize("step", ["offer", "reach"])
def test_one_rank_that_cannot_moves_all_to_the_next_kind(monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    fault = fails(SYMMETRIC, 1)
    offer = fault if step == "offer" else lambda kind, rank: 0
    reach = fault if step == "reach" else lambda kind, rank: 0
    assert agreed(monkeypatch, offer, reach)[0] == (IPC, "symmetric memory: rank 1: out of memory")


def test_all_say_alike_why_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    kind, why = agreed(
        monkeypatch,
        fails(IPC, 2),
        lambda kind, rank: rank,  # offsets
    )[0]
    assert kind == "" and "symmetric memory: the ranks' memories begin at different offsets, [0, 1, 2]" in why
    assert "CUDA IPC: rank 2: out of memory" in why and "and more" not in why


def test_torch_is_not_asked_where_ranks_would_wait_in_vain(monkeypatch: pytest.MonkeyPatch) -> None:
    """It numbers a process's rendezvous, so all ranks have to have been at as many."""
    own = torch.zeros(4, dtype=torch.uint8)
    asked: list[str] = []

    def rendezvous(tensor: torch.Tensor, group: str) -> SimpleNamespace:
        asked.append(group)
        if group == "breaks":
            raise RuntimeError("not here")
        return SimpleNamespace(buffer_ptrs=[tensor.data_ptr() - 2, 0], offset=2)

    monkeypatch.setattr(torch_memory, "rendezvous", rendezvous)
    monkeypatch.setattr(memory, "_rendezvous", 4)

    def go(group: str, other: int) -> Reached:
        mine = Offer(own, {"rendezvous": memory._rendezvous})
        return memory.symmetric(
            SimpleNamespace(group_name=group), mine, [mine.word, {"rendezvous": other}], 0
        )

    made = go("works", 4)
    assert made.addresses == (own.data_ptr(), 2) and made.word == 2
    with pytest.raises(RuntimeError, match=r"different numbers of rendezvous, \[5, 4\]"):
        go("not asked", 4)
    with pytest.raises(RuntimeError, match="not here"):
        go("breaks", 5)
    with pytest.raises(RuntimeError, match="different numbers"):
        go("not asked", -1)
    assert asked == ["works", "breaks"]
