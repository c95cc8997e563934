"""What the instructions of a program do to tensors, on this rank, for one piece; the kernels' verbs do the work."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import torch

from dtcomm import _C
from dtcomm.codecs import Codec
from dtcomm.codecs import codec as parse
from dtcomm.kernels import ops
from dtcomm.runtime.phase_timer import PhaseTimer
from dtcomm.runtime.torchdist.layout import Chunk, Piece, Slice, payload_bytes
from dtcomm.runtime.torchdist.plan import Box, Plan, accumulator_dtype
from dtcomm.runtime.types import Buffers
from dtcomm.schedule.program import Copy, Decode, Encode, Instruction, Local, Reduce

NONE = parse("none")
_PHASE: dict[type, str] = {Encode: "encode", Reduce: "reduce"}


class Arithmetic:
    """One call's tensors; ``slots[i]`` is the memory of the boxes of the pieces that use slot i.

    ``places`` are those of the boxes in each slot, where they are not the plan's.
    """

    def __init__(
        self,
        plan: Plan,
        buffers: Sequence[Buffers],
        slots: Sequence[torch.Tensor],
        seed: int,
        watch: PhaseTimer | None = None,
        places: Sequence[Mapping[Box, int]] = (),
    ) -> None:
        self._plan = plan
        self._watch = watch
        self._slots = slots
        self._places = places
        self._seed = seed
        self._op = "sum" if plan.spec.op == "avg" else plan.spec.op
        self._inputs = [None if part.input is None else _flat(part.input) for part in buffers]
        self._outputs = [None if part.output is None else _flat(part.output) for part in buffers]
        self._residuals = [None if part.residual is None else _flat(part.residual) for part in buffers]
        self._accumulators: dict[tuple[int, int, int], torch.Tensor] = {}  # (slot, chunk, nth slice)
        self._taken: dict[tuple[int, int, int], torch.Tensor] = {}

    def payload(self, slot: int, rank: int, box: int, chunk: Chunk, level: int) -> torch.Tensor:
        """The bytes of a box, which holds an encoding of ``level``."""
        at = self._place(slot, rank, box)
        return self._slots[slot][at : at + payload_bytes(chunk, level)]

    def do(self, slot: int, piece: Piece, at: int, instruction: Instruction) -> None:
        """Instruction number ``at``, which neither sends nor receives, for the piece that uses ``slot``."""
        if self._watch is None:
            self._do(slot, piece, at, instruction)
            return
        begin = time.monotonic_ns()
        self._do(slot, piece, at, instruction)
        self._watch.add(_PHASE.get(type(instruction), "decode"), begin)

    def _do(self, slot: int, piece: Piece, at: int, instruction: Instruction) -> None:
        chunk = piece[instruction.chunk]
        for nth, each in enumerate(chunk):
            match instruction:
                case Encode(payload_id=box, output=output, level=level):
                    ops.encode(
                        self._plan.spec.parts[each.part].at(level),
                        self._input(each),
                        key=_C.mix_key(self._seed, self._plan.rank, box),
                        offset=each.in_offset,
                        residual=self._residual(each),
                        out=self._bytes(slot, self._plan.rank, box, each, level),
                        decoded=self._output(each) if output else None,
                    )
                case Reduce():
                    self._reduce(slot, at, instruction, each, (slot, instruction.chunk, nth))
                case Decode(peer=peer, payload_id=box, level=level):
                    part, out = self._plan.spec.parts[each.part], self._output(each)
                    if out is not None:
                        payload = self._bytes(slot, peer, box, each, level)
                        ops.decode(part.at(level), payload, each.numel, part.dtype, out=out)
                case Copy():
                    out, given = self._output(each), self._input(each)
                    if out is not None and out.data_ptr() != given.data_ptr():
                        out.copy_(given)
                case _:
                    raise TypeError(f"{instruction} is not arithmetic")

    def _reduce(self, slot: int, at: int, r: Reduce, each: Slice, place: tuple[int, int, int]) -> None:
        part = self._plan.spec.parts[each.part]
        levels = r.input_levels or (0,) * len(r.inputs)
        payloads = [
            self._bytes(slot, rank, box, each, level)
            for (rank, box), level in zip(r.inputs, levels, strict=True)
        ]
        residual = self._residual(each)
        local, takes, leaves = None, at in self._plan.takes, at in self._plan.leaves
        if r.local is Local.INPUT:
            local = self._input(each)
            if residual is not None and takes and not (leaves and r.payload_id is not None):
                # The sum is encoded later or never, so the residual joins it here.
                local = local.float() + residual
                if leaves:
                    residual.zero_()
                else:
                    self._taken[place] = residual.clone()
        elif r.local is Local.ACCUMULATOR:
            local = self._accumulators[place]
        divisor = self._plan.divisor if r.divide else 1
        out = self._output(each) if r.output else None
        position: int | None = r.position
        codecs = [part.at(level) for level in levels]
        codec = part.at(r.level) if r.payload_id is not None else codecs[0]
        if any(each_codec != codec for each_codec in codecs):
            # Terms of another codec than the sum's: their fp32 sum is all that its encoding sees of them.
            local = self._sum(codecs, payloads, each.numel, part.dtype, local, r.position)
            payloads, position = [], None
        if r.payload_id is None:
            if r.keep_partial_sum:
                wide = accumulator_dtype(part.dtype)
                out = self._accumulators[place] = torch.empty(
                    each.numel, dtype=wide, device=self._slots[slot].device
                )
            ops.reduce(
                codec,
                payloads,
                each.numel,
                local,
                position,
                divisor,
                out,
                op=self._op,
                dtype=part.dtype,
            )
            return
        before = None
        if residual is not None and leaves and not takes:
            # It has been added already. Adding -0.0 changes no number; where the encoding is no number either, it
            # stays and gives place to what was there before.
            before = self._taken.pop(place)
            residual.fill_(-0.0)
        ops.reduce_encode(
            codec,
            payloads,
            each.numel,
            local,
            position,
            divisor,
            residual if leaves else None,
            self._bytes(slot, self._plan.rank, r.payload_id, each, r.level),
            op=self._op,
            dtype=part.dtype,
            key=_C.mix_key(self._seed, self._plan.rank, r.payload_id),
            offset=each.in_offset,
            decoded=out,
        )
        if before is not None and residual is not None:
            torch.where(residual.view(torch.int32) == -(2**31), before, residual, out=residual)

    def _sum(
        self,
        codecs: Sequence[Codec],
        payloads: Sequence[torch.Tensor],
        numel: int,
        dtype: torch.dtype,
        local: torch.Tensor | None,
        position: int,
    ) -> torch.Tensor:
        """In rank order, as the kernels take it."""
        wide = accumulator_dtype(dtype)
        terms = [
            ops.decode(codec, payload, numel, dtype if codec.name == "none" else wide).to(wide)
            for codec, payload in zip(codecs, payloads, strict=True)
        ]
        if local is not None:
            terms.insert(position, local.to(wide))
        bytes = [term.view(torch.uint8) for term in terms]
        return ops.reduce(NONE, _padded(bytes, NONE.wire_bytes(numel, wide)), numel, op=self._op, dtype=wide)

    def _bytes(self, slot: int, rank: int, box: int, each: Slice, level: int) -> torch.Tensor:
        offset, size = each.place(level)
        at = self._place(slot, rank, box) + offset
        return self._slots[slot][at : at + size]

    def _place(self, slot: int, rank: int, box: int) -> int:
        return (self._places[slot] if self._places else self._plan.places)[rank, box]

    def _input(self, each: Slice) -> torch.Tensor:
        given = self._inputs[each.part]
        assert given is not None, "only ranks with an input read it"
        return given[each.in_offset : each.in_offset + each.numel]

    def _output(self, each: Slice) -> torch.Tensor | None:
        output = self._outputs[each.part]
        return None if output is None else output[each.out_offset : each.out_offset + each.numel]

    def _residual(self, each: Slice) -> torch.Tensor | None:
        residual = self._residuals[each.part]
        return None if residual is None else residual[each.in_offset : each.in_offset + each.numel]


def _padded(payloads: Sequence[torch.Tensor], size: int) -> list[torch.Tensor]:
    # Payloads end at 16 bytes.
    return [torch.nn.functional.pad(payload, (0, size - payload.numel())) for payload in payloads]


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    # In memory order, whatever the strides: the caller's tensors are dense.
    return tensor.detach().as_strided((tensor.numel(),), (1,))
