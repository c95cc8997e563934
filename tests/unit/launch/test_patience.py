from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.support import patience
from tests.support.patience import Patience

TEXT = "some avg10=0.09 avg60=0.73 avg300=0.40 total={}\nfull avg10=0.00 avg60=0.01 avg300=0.06 total=7\n"


def test_time_in_which_others_had_the_cores_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "cpu"
    monkeypatch.setattr(patience, "PRESSURE", file)
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    file.write_text(TEXT.format(5_000_000))
    watch = Patience()
    now[0] += 3.0
    assert watch.seconds() == 3.0
    file.write_text(TEXT.format(7_000_000))
    assert watch.seconds() == 1.0
    file.write_text(TEXT.format(70_000_000))
    assert watch.seconds() == 0.0


def test_without_the_kernels_count_it_is_a_stopwatch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "PRESSURE", tmp_path / "none")
    begun = time.monotonic()
    watch = Patience()
    time.sleep(0.02)
    assert 0.02 <= watch.seconds() <= time.monotonic() - begun
