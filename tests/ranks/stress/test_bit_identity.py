"""A short run of the random operations of tests.stress.bit_identity, with a new seed every time."""

from __future__ import annotations

import random

import pytest

from tests.stress.bit_identity import ONE_HOST, WAYS, Way, piece

SEED = random.SystemRandom().randrange(10**6)
CASES = [(2, ONE_HOST), *((3, way) for way in dict.fromkeys(WAYS))]


@pytest.mark.parametrize(("ranks", "way"), CASES, ids=lambda value: getattr(value, "name", value))
def test_random_operations_give_equal_and_right_results(ranks: int, way: Way) -> None:
    print(f"seed {SEED}")
    result = piece(ranks, str(SEED), 40, way, seconds=100)
    assert result["wrong"] == []
    assert result["compared"] > 0 and result["exact"] > 0
