"""A short run of the random operations of tests.stress.bit_identity, with a new seed every time."""

from __future__ import annotations

import random

import pytest

from tests.stress.bit_identity import ONE_HOST, WAYS, Way, piece

SEED = random.SystemRandom().randrange(10**6)
CASES = [(2, ONE_HOST), *((3, way) for way in dict.fromkeys(WAYS))]


@pytest.mark.parametrize(("ranks", "way"), CASES, ids=lambda each: getattr(each, "name", each))
def test_random_operations_end_alike_and_right(ranks: int, way: Way) -> None:
    print(f"seed {SEED}")
    found = piece(ranks, str(SEED), 40, way)
    assert found["wrong"] == []
    assert found["compared"] > 0 and found["exact"] > 0
