"""What ``dtcomm perf`` measures must not depend on whether the machine that runs these tests has a GPU."""

import pytest

from dtcomm.cli.perf import placement


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody sees one, unless a test says so."""
    monkeypatch.setattr(placement, "found", lambda: False)
