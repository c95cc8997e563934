"""Lowered schedules in the form in which the fused CUDA kernels take them: the engine's programs, as numbers."""

from __future__ import annotations

from typing import Any, NamedTuple

from dtcomm.runtime.types import GEOMETRY, OpSpec, TensorSpec
from dtcomm.schedule import Schedule, lower
from dtcomm.schedule.ir import CUT_AT_GRANULES
from dtcomm.schedule.lower import steps
from dtcomm.schedule.program import Program, Reduce, Send


class LoweredSchedule(NamedTuple):
    """The programs of all ranks. ``step_of`` holds the schedule's step of each instruction of each rank's program;
    ``keeps_sums`` says whether some rank keeps sums from step to step.
    """

    programs: tuple[Program, ...]
    step_of: tuple[tuple[int, ...], ...]
    steps: int
    keeps_sums: bool

    @property
    def chunks(self) -> int:
        """Chunks of the tensors, the same in all programs."""
        return self.programs[0].chunks

    def kernel_spec(self, spec: OpSpec, first_rank: int, local_ranks: int) -> dict[str, Any]:
        """The arguments of ``_cuda.FusedPlan`` that describe the programs of the local ranks."""
        return {
            "collective": GEOMETRY[spec.collective],
            "programs": [
                (
                    self.chunks,
                    list(self.programs[rank].payload_counts),
                    self.programs[rank].flat(),
                    list(self.step_of[rank]),
                )
                for rank in range(first_rank, first_rank + local_ranks)
            ],
            "steps": self.steps,
            "keeps_sums": self.keeps_sums,
        }

    def chunk_granules(self, spec: OpSpec, part: TensorSpec) -> int:
        """Granules of the largest chunk."""
        whole = -(-(max(spec.splits) if spec.splits else part.numel) // part.codec.granularity)
        return -(-whole // self.chunks) if spec.collective in CUT_AT_GRANULES else whole

    def sent_bytes(self, spec: OpSpec, rank: int) -> int:
        """Bytes of the payloads that a rank sends; a payload that goes to two peers counts twice."""
        chunk_bytes = spec.chunk_payload_bytes(self.chunks, len(self.programs))
        return sum(
            len(instruction.peers) * chunk_bytes[instruction.chunk]
            for instruction in self.programs[rank].instructions
            if isinstance(instruction, Send)
        )


def lower_for_all_ranks(schedule: Schedule) -> LoweredSchedule:
    """The programs of all ranks: every rank lowers them all, so that all agree on the memory that a call takes."""
    ranks = range(schedule.ranks)
    programs = tuple(lower(schedule, rank) for rank in ranks)
    keeps_sums = any(
        isinstance(instruction, Reduce) and instruction.keep_partial_sum
        for program in programs
        for instruction in program.instructions
    )
    step_of = tuple(steps(schedule, rank) for rank in ranks)
    return LoweredSchedule(programs, step_of, max(schedule.steps, 1), keeps_sums)
