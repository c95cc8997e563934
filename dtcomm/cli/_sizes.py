"""Byte counts as people write them: 1K, 64M, 1.5G. K is 1024, as in nccl-tests."""

from __future__ import annotations

import re

UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def parse_size(text: str) -> int:
    """Bytes in ``text``: a number and one of K, M, G, T (``KB`` and ``KiB`` are the same). ValueError otherwise."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:I?B)?", text.strip().upper())
    if not match:
        raise ValueError(f"{text!r} is not a size; write 4096, 1K, 64M or 1.5G")
    return int(float(match[1]) * UNITS[match[2]]) if "." in match[1] else int(match[1]) * UNITS[match[2]]


def format_size(size: int) -> str:
    """The shortest exact way to write ``size``, which ``parse_size`` reads back."""
    for unit in "TGMK":
        if size and size % UNITS[unit] == 0:
            return f"{size // UNITS[unit]}{unit}"
    return str(size)


def series(smallest: int, largest: int, step: int, factor: int) -> list[int]:
    """Sizes from ``smallest`` to ``largest``: times ``factor`` where it is over 1, else plus ``step``."""
    sizes = [smallest]
    while (size := sizes[-1] * factor if factor > 1 else sizes[-1] + step) <= largest:
        if size <= sizes[-1]:
            raise ValueError(f"sizes do not grow from {sizes[-1]}")
        sizes.append(size)
    return sizes
