"""Naming the rank that caused a failure, from the records in a store."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from dtcomm.errors import CollectiveTimeout, PeerLost
from dtcomm.runtime.torchdist.faults import FaultAttribution

NAMES = ["rank 0", "rank 1", "rank 2"]


def of_rank(rank: int, store: Any) -> FaultAttribution:
    return FaultAttribution(SimpleNamespace(rank=lambda: rank), NAMES, 5.0, store)


def test_the_rank_at_the_end_of_the_chain_is_named() -> None:
    store = dist.HashStore()
    ended = RuntimeError("its process has ended")
    assert str(of_rank(1, store).error(2, ended, "a call")).startswith("rank 2 is gone")
    first = of_rank(0, store)
    assert first.gave_up(1) and not first.gave_up(2)
    error = first.error(1, RuntimeError("it has given up"), "a call")
    assert isinstance(error, PeerLost) and str(error).startswith("rank 2 is gone (a call")


class SilentStore:
    """A store that does not answer, as torch's FileStore does not where its file is gone."""

    def __init__(self) -> None:
        self.released = threading.Event()
        self.questions = 0

    def check(self, keys: list[str]) -> bool:
        self.questions += 1
        self.released.wait(60)
        raise RuntimeError("no answer")

    def set(self, key: str, value: str) -> None:
        self.check([key])


@pytest.fixture
def silent() -> Iterator[SilentStore]:
    store = SilentStore()
    yield store
    store.released.set()


def test_a_store_that_does_not_answer_delays_an_error_by_seconds_only(silent: SilentStore) -> None:
    attribution = of_rank(0, silent)
    begin = time.monotonic()
    assert isinstance(attribution.error(1, RuntimeError("its process has ended"), "a call"), PeerLost)
    assert not attribution.gave_up(1)
    assert isinstance(attribution.error(2, RuntimeError("Timed out"), "a call"), CollectiveTimeout)
    assert time.monotonic() - begin < 15
    assert silent.questions == 1  # a thread is left in the store, and no more are sent after it


def test_a_store_that_is_gone_leaves_the_error_as_it_is(silent: SilentStore) -> None:
    silent.released.set()
    assert str(of_rank(0, silent).error(1, RuntimeError("x"), "a call")) == "rank 1 is gone (a call: x)"
