"""Computation of the executor: what a program's instructions do to this rank's tensors, by the kernels' verbs."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from dtcomm import _C
from dtcomm.codecs import Codec
from dtcomm.codecs import codec as parse
from dtcomm.kernels import ops
from dtcomm.runtime.torchdist.rounds import RoundsPlan, Slice, payload_bytes
from dtcomm.runtime.types import Buffers
from dtcomm.schedule.program import Copy, Decode, Encode, Instruction, Local, Reduce
from dtcomm.work.statistics import PhaseTimer

NONE = parse("none")
_PHASE: dict[type, str] = {Encode: "encode", Reduce: "reduce"}

SliceId = tuple[int, int, int]  # (piece, chunk, number of the slice in the chunk)


class Arithmetic:
    """The tensors of one call and the computations on them.

    ``memory`` is the memory of each piece that is under way, with payloads at the plan's ``places``; the executor adds
    and removes it. ``timer`` takes the time of each phase.
    """

    def __init__(
        self, plan: RoundsPlan, buffers: Sequence[Buffers], seed: int, timer: PhaseTimer | None = None
    ) -> None:
        self.memory: dict[int, torch.Tensor] = {}
        self._plan = plan
        self._timer = timer
        self._seed = seed
        self._op = "sum" if plan.spec.op == "avg" else plan.spec.op
        self._inputs = [None if part.input is None else _flat(part.input) for part in buffers]
        self._outputs = [None if part.output is None else _flat(part.output) for part in buffers]
        self._residuals = [None if part.residual is None else _flat(part.residual) for part in buffers]
        self._partial_sums: dict[SliceId, torch.Tensor] = {}
        self._old_residuals: dict[
            SliceId, torch.Tensor
        ] = {}  # of residuals that a partial sum contains already

    def payload(self, piece: int, rank: int, payload_id: int, chunk: int, level: int) -> torch.Tensor:
        """The bytes of a payload of ``rank``, which is an encoding of a chunk for a level."""
        at = self._plan.places[piece][rank, payload_id]
        return self.memory[piece][at : at + payload_bytes(self._plan.pieces[piece][chunk], level)]

    def execute(self, piece: int, at: int, instruction: Instruction) -> None:
        """Execute instruction ``at`` of the program, which neither sends nor receives, on a piece."""
        if self._timer is None:
            self._execute(piece, at, instruction)
            return
        begin = time.monotonic_ns()
        self._execute(piece, at, instruction)
        self._timer.add(_PHASE.get(type(instruction), "decode"), begin)

    def _execute(self, piece: int, at: int, instruction: Instruction) -> None:
        plan = self._plan
        for nth, part_slice in enumerate(plan.pieces[piece][instruction.chunk]):
            spec = plan.spec.parts[part_slice.part]
            match instruction:
                case Encode(payload_id=payload_id, output=output, level=level):
                    ops.encode(
                        spec.at(level),
                        self._input(part_slice),
                        key=_C.mix_key(self._seed, plan.rank, payload_id),
                        offset=part_slice.in_offset,
                        residual=self._residual(part_slice),
                        out=self._bytes(piece, plan.rank, payload_id, part_slice, level),
                        decoded=self._output(part_slice) if output else None,
                    )
                case Reduce():
                    self._reduce(piece, at, instruction, part_slice, (piece, instruction.chunk, nth))
                case Decode(peer=peer, payload_id=payload_id, level=level):
                    out = self._output(part_slice)
                    if out is not None:
                        payload = self._bytes(piece, peer, payload_id, part_slice, level)
                        ops.decode(spec.at(level), payload, part_slice.numel, spec.dtype, out=out)
                case Copy():
                    out, source = self._output(part_slice), self._input(part_slice)
                    if out is not None and out.data_ptr() != source.data_ptr():
                        out.copy_(source)
                case _:
                    raise TypeError(f"{instruction} is not arithmetic")

    def _reduce(self, piece: int, at: int, reduce: Reduce, part_slice: Slice, slice_id: SliceId) -> None:
        plan, numel = self._plan, part_slice.numel
        spec = plan.spec.parts[part_slice.part]
        levels = reduce.input_levels or (0,) * len(reduce.inputs)
        payloads = [
            self._bytes(piece, rank, payload_id, part_slice, level)
            for (rank, payload_id), level in zip(reduce.inputs, levels, strict=True)
        ]
        residual = self._residual(part_slice)
        reads, writes = at in plan.residual_reads, at in plan.residual_writes
        local = None
        if reduce.local is Local.INPUT:
            local = self._input(part_slice)
            if residual is not None and reads and not (writes and reduce.payload_id is not None):
                # The sum is encoded later or never, so the residual is added here.
                local = local.float() + residual
                if writes:
                    residual.zero_()
                else:
                    self._old_residuals[slice_id] = residual.clone()
        elif reduce.local is Local.ACCUMULATOR:
            local = self._partial_sums[slice_id]
        divisor = plan.divisor if reduce.divide else 1
        out = self._output(part_slice) if reduce.output else None
        position: int | None = reduce.position
        codecs = [spec.at(level) for level in levels]
        codec = spec.at(reduce.level) if reduce.payload_id is not None else codecs[0]
        if any(other != codec for other in codecs):
            # The terms have another codec than the sum: the sum's encoding gets their fp32 sum.
            local = self._sum(codecs, payloads, numel, spec.dtype, local, reduce.position)
            payloads, position = [], None
        if reduce.payload_id is None:
            if reduce.keep_partial_sum:
                wide = accumulator_dtype(spec.dtype)
                out = torch.empty(numel, dtype=wide, device=self.memory[piece].device)
                self._partial_sums[slice_id] = out
            ops.reduce(codec, payloads, numel, local, position, divisor, out, op=self._op, dtype=spec.dtype)
            return
        old_residual = None
        if residual is not None and writes and not reads:
            # It is in the partial sum already. Adding -0.0 changes no number; a block that is not finite keeps its
            # residual, here -0.0, which is then replaced by the old one.
            old_residual = self._old_residuals.pop(slice_id)
            residual.fill_(-0.0)
        ops.reduce_encode(
            codec,
            payloads,
            numel,
            local,
            position,
            divisor,
            residual if writes else None,
            self._bytes(piece, plan.rank, reduce.payload_id, part_slice, reduce.level),
            op=self._op,
            dtype=spec.dtype,
            key=_C.mix_key(self._seed, plan.rank, reduce.payload_id),
            offset=part_slice.in_offset,
            decoded=out,
        )
        if old_residual is not None and residual is not None:
            torch.where(residual.view(torch.int32) == -(2**31), old_residual, residual, out=residual)

    def _sum(
        self,
        codecs: Sequence[Codec],
        payloads: Sequence[torch.Tensor],
        numel: int,
        dtype: torch.dtype,
        local: torch.Tensor | None,
        position: int,
    ) -> torch.Tensor:
        """The sum in rank order of payloads of different codecs."""
        wide = accumulator_dtype(dtype)
        terms = [
            ops.decode(codec, payload, numel, dtype if codec.name == "none" else wide).to(wide)
            for codec, payload in zip(codecs, payloads, strict=True)
        ]
        if local is not None:
            terms.insert(position, local.to(wide))
        raw = [term.view(torch.uint8) for term in terms]
        return ops.reduce(NONE, _padded(raw, NONE.wire_bytes(numel, wide)), numel, op=self._op, dtype=wide)

    def _bytes(self, piece: int, rank: int, payload_id: int, part_slice: Slice, level: int) -> torch.Tensor:
        offset, size = part_slice.span(level)
        at = self._plan.places[piece][rank, payload_id] + offset
        return self.memory[piece][at : at + size]

    def _input(self, part_slice: Slice) -> torch.Tensor:
        tensor = self._inputs[part_slice.part]
        assert tensor is not None, "only ranks with an input read it"
        return tensor[part_slice.in_offset : part_slice.in_offset + part_slice.numel]

    def _output(self, part_slice: Slice) -> torch.Tensor | None:
        tensor = self._outputs[part_slice.part]
        return (
            None
            if tensor is None
            else tensor[part_slice.out_offset : part_slice.out_offset + part_slice.numel]
        )

    def _residual(self, part_slice: Slice) -> torch.Tensor | None:
        tensor = self._residuals[part_slice.part]
        return (
            None if tensor is None else tensor[part_slice.in_offset : part_slice.in_offset + part_slice.numel]
        )


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type in which an unencoded sum of ``dtype`` is kept between instructions."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def _padded(payloads: Sequence[torch.Tensor], size: int) -> list[torch.Tensor]:
    # Payloads end at multiples of 16 bytes.
    return [torch.nn.functional.pad(payload, (0, size - payload.numel())) for payload in payloads]


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    # In memory order, whatever the strides: the caller's tensors are dense.
    return tensor.detach().as_strided((tensor.numel(),), (1,))
