"""Byte counts as people write them (1K, 64M, 1.5G; K is 1024, as in nccl-tests) and argparse types for them."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable

UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def parse_size(text: str) -> int:
    """Return the bytes of a number with an optional unit K, M, G or T (``KB`` and ``KiB`` mean the same).

    Raises:
        ValueError: ``text`` is not a size.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:I?B)?", text.strip().upper())
    if not match:
        raise ValueError(f"{text!r} is not a size; valid: 4096, 1K, 64M, 1.5G")
    return int(float(match[1]) * UNITS[match[2]]) if "." in match[1] else int(match[1]) * UNITS[match[2]]


def size_argument(least: int) -> Callable[[str], int]:
    """Return an argparse type for a size of at least ``least`` bytes."""

    def convert(text: str) -> int:
        try:
            size = parse_size(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
        if size < least:
            raise argparse.ArgumentTypeError(f"{text}: expected at least {format_size(least)} bytes")
        return size

    return convert


def count_argument(least: int) -> Callable[[str], int]:
    """Return an argparse type for a whole number of at least ``least``."""

    def convert(text: str) -> int:
        if not re.fullmatch(r"\d+", text) or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number of at least {least}")
        return int(text)

    return convert


def format_size(size: int) -> str:
    """Return the shortest exact text of ``size``, which ``parse_size`` reads back."""
    for unit in "TGMK":
        if size and size % UNITS[unit] == 0:
            return f"{size // UNITS[unit]}{unit}"
    return str(size)


def series(smallest: int, largest: int, step: int, factor: int) -> list[int]:
    """Return the sizes from ``smallest`` to ``largest``, growing by ``factor`` if it is above 1, else by ``step``.

    Raises:
        ValueError: The sizes do not grow.
    """
    sizes = [smallest]
    while (size := sizes[-1] * factor if factor > 1 else sizes[-1] + step) <= largest:
        if size <= sizes[-1]:
            raise ValueError(f"sizes do not grow from {sizes[-1]}")
        sizes.append(size)
    return sizes
