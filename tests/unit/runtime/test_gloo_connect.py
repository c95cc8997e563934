"""Connecting through Gloo: what its errors become."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from dtcomm.errors import DtcommError, PeerLost
from dtcomm.runtime.bootstrap import processes
from dtcomm.runtime.process_groups import Deadline

FAILURE = "[/src/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:51866.\nstack"


@pytest.fixture(autouse=True)
def broken_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any) -> Any:
        raise RuntimeError(FAILURE)

    monkeypatch.setattr(dist, "ProcessGroupGloo", fail)


def connect(check: Any) -> Any:
    store = dist.HashStore()
    return processes.connect_gloo(
        store, store, 0, 2, timedelta(seconds=5), Deadline(timedelta(seconds=5)), check
    )


def test_a_failed_connection_is_an_error_of_dtcomm() -> None:
    with pytest.raises(DtcommError) as error:
        connect(lambda: None)
    assert (
        str(error.value) == "Gloo could not connect the ranks: Connection closed by peer [127.0.0.1]:51866."
    )


def test_the_rank_that_caused_it_is_named_if_it_is_known() -> None:
    def check() -> None:
        raise PeerLost("rank 1 is gone")

    with pytest.raises(PeerLost, match="rank 1 is gone"):
        connect(check)


def test_a_rank_whose_own_system_call_failed_does_not_wait_for_the_errors_of_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else the others, whose connections it closed, could report theirs first."""

    def fail(*arguments: Any) -> Any:
        raise RuntimeError("[enforce fail at tcp/device.cc:186] rv != -1. -1 vs -1. Too many open files")

    monkeypatch.setattr(dist, "ProcessGroupGloo", fail)
    monkeypatch.setattr(processes, "_GLOO_GRACE_S", 30.0)
    started = time.monotonic()
    with pytest.raises(DtcommError, match=r"^Gloo could not connect the ranks: .*Too many open files$"):
        connect(lambda: None)
    assert time.monotonic() - started < 20.0
