"""Writes lowered programs as text for csrc/tests/cuda_emulated: python -m tests.cuda.program_files FILE.

There is one line for each schedule: collective algorithm ranks chunks steps. Two lines follow for each rank: the
payload counts of all ranks and the flat instructions (their number first), and the steps of the instructions.
"""

from __future__ import annotations

import sys
from pathlib import Path

from dtcomm.algorithms import build
from dtcomm.schedule import lower
from dtcomm.schedule.lower import steps

SCHEDULES = {
    "all_reduce": ("one_shot", "two_shot", "ring", "tree", "double_tree", "halving"),
    "reduce_scatter": ("one_shot", "ring"),
    "all_gather": ("one_shot", "ring"),
    "all_to_all": ("one_shot",),
}
RANKS = (2, 3, 4, 8)


def lines() -> list[str]:
    """The lines of all schedules."""
    out = []
    for collective, algorithms in SCHEDULES.items():
        for algorithm in algorithms:
            for ranks in RANKS:
                schedule = build(algorithm, collective, ranks)
                out.append(f"{collective} {algorithm} {ranks} {schedule.chunks} {schedule.steps}")
                for rank in range(ranks):
                    program = lower(schedule, rank)
                    flat, step_of = program.flat(), steps(schedule, rank)
                    out.append(" ".join(map(str, [*program.payload_counts, len(flat), *flat])))
                    out.append(" ".join(map(str, [len(step_of), *step_of])))
    return out


if __name__ == "__main__":
    Path(sys.argv[1]).write_text("\n".join(lines()) + "\n")
