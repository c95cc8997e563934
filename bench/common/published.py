"""Published times of all-reduces on GPUs, to be printed beside our own. They are of their authors' machines."""

from __future__ import annotations

from typing import NamedTuple

K, M, G = 2**10, 2**20, 2**30


class PublishedTime(NamedTuple):
    """The time of one all-reduce.

    Attributes:
        source: What was measured, and where it is published.
        machine: The GPUs.
        microseconds: Size of each rank's tensor in bytes -> time in microseconds.
    """

    source: str
    machine: str
    microseconds: dict[int, float]


ALL_REDUCE = (
    PublishedTime(
        "flashinfer FP8 two-shot (flashinfer#3759)",
        "8 H200",
        {8 * M: 41.4, 32 * M: 150.0, 128 * M: 524.0, 512 * M: 1833.0, 2 * G: 7220.0},
    ),
    PublishedTime(
        "NCCL (flashinfer#3759)",
        "8 H200",
        {8 * M: 80.6, 32 * M: 199.0, 128 * M: 627.0, 512 * M: 2444.0, 2 * G: 9518.0},
    ),
    PublishedTime(
        "torch multimem (flashinfer#3759)", "8 H200", {2 * K: 8.5, 8 * K: 8.5, 512 * K: 11.3, 8 * M: 46.0}
    ),
    PublishedTime("MSCCL++ in graphs", "8 H100", {1 * K: 4.6, 16 * K: 5.4}),
)
#: All sizes in the tables, in bytes.
SIZES = tuple(sorted({size for entry in ALL_REDUCE for size in entry.microseconds}))


def published_line(size: int) -> str:
    """Return the published times of an all-reduce of ``size`` bytes a rank as one line; empty if there are none."""
    times = [
        f"{entry.source} {entry.microseconds[size]:g} us on {entry.machine}"
        for entry in ALL_REDUCE
        if size in entry.microseconds
    ]
    return "; ".join(times)
