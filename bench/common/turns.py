"""The order in which contestants are measured."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


def in_turn(contestants: Sequence[T], repetition: int) -> list[T]:
    """Return the contestants in the order of a repetition: a random one, the same in every run.

    In one fixed order, what recurs at regular times, such as a timer of TCP, may always meet the same contestant.

    Example:
        >>> sorted(in_turn(["a", "b", "c"], 7))
        ['a', 'b', 'c']
    """
    return random.Random(repetition).sample(list(contestants), len(contestants))
