"""A lowered schedule as the fused kernels take it: the programs that the engine runs, as numbers."""

from __future__ import annotations

from typing import Any, NamedTuple

from dtcomm.runtime.torchdist.layout import lay_out, payload_bytes
from dtcomm.runtime.types import GEOMETRY, OpSpec, TensorSpec
from dtcomm.schedule import Schedule, lower
from dtcomm.schedule.ir import CUT_AT_GRANULES
from dtcomm.schedule.lower import steps
from dtcomm.schedule.program import Program, Reduce, Send

EVERYTHING = 2**62  # elements: a piece that takes all


class Lowered(NamedTuple):
    """The programs of all ranks; ``keeps``: some rank keeps sums from step to step."""

    programs: tuple[Program, ...]
    step_of: tuple[tuple[int, ...], ...]
    steps: int
    keeps: bool

    @property
    def chunks(self) -> int:
        """Of the tensors; the same in all programs."""
        return self.programs[0].chunks

    def stated(self, shape: OpSpec, first: int, here: int) -> dict[str, Any]:
        """What a ``FusedCall`` of the ranks first .. first + here - 1 says of it."""
        return {
            "collective": GEOMETRY[shape.collective],
            "programs": [
                (
                    self.chunks,
                    list(self.programs[rank].payload_counts),
                    self.programs[rank].flat(),
                    list(self.step_of[rank]),
                )
                for rank in range(first, first + here)
            ],
            "steps": self.steps,
            "keeps": self.keeps,
        }

    def granules(self, shape: OpSpec, part: TensorSpec) -> int:
        """Of the largest chunk."""
        whole = -(-(max(shape.splits) if shape.splits else part.numel) // part.codec.granularity)
        return -(-whole // self.chunks) if shape.collective in CUT_AT_GRANULES else whole

    def sent(self, shape: OpSpec, rank: int) -> int:
        """Bytes of the payloads that a rank sends, one that goes to two peers twice."""
        pieces = lay_out(shape, self.chunks, EVERYTHING)
        if not pieces:
            return 0
        return sum(
            len(each.peers) * payload_bytes(pieces[0][each.chunk])
            for each in self.programs[rank].instructions
            if isinstance(each, Send)
        )


def lowered(schedule: Schedule) -> Lowered:
    """Of all ranks: they agree by it on what a call takes."""
    ranks = range(schedule.ranks)
    programs = tuple(lower(schedule, rank) for rank in ranks)
    keeps = any(
        isinstance(each, Reduce) and each.keep_partial_sum
        for program in programs
        for each in program.instructions
    )
    return Lowered(programs, tuple(steps(schedule, rank) for rank in ranks), max(schedule.steps, 1), keeps)
