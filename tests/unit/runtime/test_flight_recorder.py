"""The flight recorder: records that are made while groups change, and records of failures."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dtcomm.runtime import flight_recorder


class FakeCommunicator:
    """A communicator that calls ``on_record`` while it is recorded."""

    global_rank = 3

    def __init__(self, name: str, on_record: Callable[[], Any] = lambda: None) -> None:
        self.name = name
        self.on_record = on_record
        flight_recorder.add(self)

    def record(self) -> dict[str, Any]:
        self.on_record()
        return {"id": self.name}


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(flight_recorder, "_recorded", {})
    yield


def names() -> list[str]:
    return [made["id"] for made in flight_recorder.record()["communicators"]]


def test_groups_may_be_made_and_dropped_during_a_record() -> None:
    made = []

    def change() -> None:
        made.append(FakeCommunicator(f"new {len(made)}"))
        flight_recorder.drop(first)

    first, second = FakeCommunicator("b", change), FakeCommunicator("a", change)
    assert names() == ["a", "b"]
    assert names() == ["a", "new 0", "new 1"]
    del second
    made.clear()
    assert names() == []


@pytest.mark.parametrize("error", [RuntimeError("closed"), MemoryError(), KeyError("x")])
@pytest.mark.parametrize("action", ["ignore", "error"])
def test_the_record_of_a_failure_never_raises(
    error: Exception, action: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise error

    communicator = FakeCommunicator("broken", fail)
    monkeypatch.setenv("DTCOMM_FLIGHT_DIR", str(tmp_path))
    with warnings.catch_warnings():
        warnings.simplefilter(action)
        flight_recorder.failed(ValueError("the failure"))
    communicator.on_record = lambda: None
    flight_recorder.failed(ValueError("the failure"))
    (path,) = tmp_path.iterdir()
    assert json.loads(path.read_text())["reason"] == "ValueError: the failure"


def test_a_forked_child_records_only_its_own_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DTCOMM_FLIGHT_DIR", str(tmp_path))
    inherited = FakeCommunicator("the parent's")
    child = os.fork()
    if child == 0:
        own = FakeCommunicator("the child's")
        flight_recorder.failed(ValueError("the failure"))
        os._exit(0 if names() == [own.name] else 1)
    assert os.waitpid(child, 0)[1] == 0
    (path,) = tmp_path.iterdir()
    assert [made["id"] for made in json.loads(path.read_text())["communicators"]] == ["the child's"]
    assert names() == [inherited.name]


def test_a_record_is_private_and_replaces_what_is_in_its_place(tmp_path: Path) -> None:
    kept = FakeCommunicator("a")
    victim = tmp_path / "victim"
    victim.write_text("precious")
    folder = tmp_path / "records"
    folder.mkdir()
    for name in ("rank-3.json", f".rank-3.{os.getpid()}"):
        (folder / name).symlink_to(victim)
    path = flight_recorder.write(folder)
    assert path.name == f"rank-{kept.global_rank}.json"
    assert victim.read_text() == "precious" and not path.is_symlink()
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_record_that_cannot_be_written_leaves_no_file(tmp_path: Path) -> None:
    kept = FakeCommunicator("a")
    kept.global_rank = 4
    (tmp_path / "rank-4.json").mkdir()  # a file cannot replace a folder
    with pytest.raises(OSError, match="directory"):
        flight_recorder.write(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["rank-4.json"]
