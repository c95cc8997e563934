"""Fixture that hides the machine's GPUs from `dtcomm perf`."""

import pytest

from dtcomm.cli.perf import placement


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `dtcomm perf` see no GPU, so that tests do not depend on the machine."""
    monkeypatch.setattr(placement, "cuda_available", lambda: False)
