"""What ``dtcomm perf`` measures must not depend on whether the machine that runs these tests has a GPU."""

import pytest

from dtcomm.cli import perf_place


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody sees one, unless a test says so."""
    monkeypatch.setattr(perf_place, "found", lambda: False)
