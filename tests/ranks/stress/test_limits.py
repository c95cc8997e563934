"""Short runs of the cases of tests.stress.limits."""

from __future__ import annotations

import pytest

from dtcomm.launch.ranks import run_ranks
from tests.stress import limits


def test_unaligned_tensors_have_the_sums_of_aligned_ones() -> None:
    assert run_ranks(limits.use_unaligned_tensors, 2, 3001) == [[], []]


@pytest.mark.slow
def test_many_ranks() -> None:
    assert run_ranks(limits.use_many_ranks, 12) == [[]] * 12


def test_groups_leave_no_descriptors() -> None:
    assert run_ranks(limits.use_many_groups, 2, 20) == [[], []]


def test_wrong_results_are_reported() -> None:
    for wrong in run_ranks(limits.reduce_elements, 2, 2000, "topk:ratio=0.1"):
        assert wrong and wrong[0].startswith("all_reduce, topk")
    assert run_ranks(limits.reduce_elements, 2, 2000, "none") == [[], []]
    assert run_ranks(limits.move_elements, 3, 1000) == [[], [], []]
