"""Ranks that die, stop, leave or call something else: the others raise an error that names the rank, and clean up.

`python -m tests.stress.faults` does the same twenty times over for every kind and world size.
"""

from __future__ import annotations

import pytest

from tests.stress import faults
from tests.stress.fault_ranks import Fault


@pytest.mark.parametrize("numel", [faults.SMALL, faults.LARGE])
@pytest.mark.parametrize("kind", ["SIGKILL", "exit(0)", "exit(1)", *faults.MISMATCHES])
def test_survivors_name_the_rank_at_fault(kind: str, numel: int) -> None:
    fault = Fault(kind=kind, victim=1, numel=numel, after=0.2, fork=False)
    assert faults.attempt(fault, 3)["faults"] == []


@pytest.mark.parametrize("kind", ["SIGSTOP", "absent"])
def test_missing_rank_is_named_at_the_timeout(kind: str) -> None:
    fault = Fault(kind=kind, victim=2, numel=faults.LARGE, after=0.2, fork=False)
    assert faults.attempt(fault, 3)["faults"] == []


def test_forked_child_does_not_hide_the_death_of_its_rank() -> None:
    fault = Fault(kind="SIGKILL", victim=0, numel=faults.LARGE, after=0.2, fork=True)
    assert faults.attempt(fault, 2)["faults"] == []
