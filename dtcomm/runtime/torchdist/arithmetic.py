"""The computation of one operation: what the instructions of a plan do to this rank's tensors, by the kernels' verbs.

Chunks do not depend on each other. So what a round computes is cut into steps with at most one instruction of each
chunk, and a step's calls of the same codec run as a group (`dtcomm.kernels.calls.CallGroup`): on a device they are one
launch, however many parameters, peers and chunks there are.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from dtcomm import _C
from dtcomm.codecs import Codec
from dtcomm.codecs import codec as parse
from dtcomm.codecs.base import ELEMENT_TYPES
from dtcomm.kernels import dispatch, eager, ops
from dtcomm.kernels.calls import CallGroup, GroupedCall, Place, Runner, Tensors
from dtcomm.runtime.torchdist.rounds import RoundsPlan, Slice, accumulator_dtype, payload_bytes
from dtcomm.runtime.types import Buffers
from dtcomm.schedule.lower import Copy, Decode, Encode, Instruction, Local, Reduce
from dtcomm.work.statistics import PhaseTimer

Phase = Literal["encode", "reduce", "decode"]
NONE = parse("none")
_PHASE: dict[type, Phase] = {Encode: "encode", Reduce: "reduce"}
_MEMORY = 0  # the place of a piece's memory; the inputs, outputs and residuals of all parts follow


@dataclass
class Step:
    """Calls that do not depend on each other, each with (position in the program, instruction, slice of its chunk).

    ``group`` are the same calls for the kernels, or None where each takes several calls of kernels.
    """

    phase: Phase
    calls: list[tuple[int, Instruction, int]]
    group: CallGroup | None
    runners: dict[str, Runner | None] = field(default_factory=dict)  # by kernel

    def runner(self, memory: torch.Tensor) -> Runner | None:
        """What runs the group with the kernel in use; None: the calls run one by one."""
        if self.group is None:
            return None
        kernel = dispatch.kernel_for(self.group.codec, "codec", memory)
        if kernel not in self.runners:
            self.runners[kernel] = eager.prepare(kernel, self.group, memory.device)
        return self.runners[kernel]


class Arithmetic:
    """The tensors of one call and the computations on them.

    ``memory`` is the memory of each piece that is under way, with payloads and partial sums where the plan places them;
    the executor adds and removes it. ``timer`` takes the time of each phase.
    """

    def __init__(
        self, plan: RoundsPlan, buffers: Sequence[Buffers], seed: int, timer: PhaseTimer | None = None
    ) -> None:
        self.memory: dict[int, torch.Tensor] = {}
        self._plan = plan
        self._timer = timer
        self._seed = seed
        self._inputs = [part.input for part in buffers]
        self._outputs = [part.output for part in buffers]
        self._residuals = [part.residual for part in buffers]
        self._tensors: dict[int, Tensors] = {}

    def payload(self, piece: int, rank: int, payload_id: int, chunk: int, level: int) -> torch.Tensor:
        """The bytes of a payload of ``rank``, which is an encoding of a chunk for a level."""
        at = self._plan.places[piece][rank, payload_id]
        return self.memory[piece][at : at + payload_bytes(self._plan.pieces[piece][chunk], level)]

    def compute(self, piece: int, at: int, after: bool) -> None:
        """Do the computations of round ``at`` on a piece, before its exchange or after it."""
        memory = self.memory[piece]
        for step in steps(self._plan, piece, at, after):
            begin = time.monotonic_ns() if self._timer is not None else 0
            run = step.runner(memory)
            if run is not None:
                run(self._tensors_of(piece), self._seed)
            else:
                for position, instruction, nth in step.calls:
                    self._execute(piece, position, instruction, nth)
            if self._timer is not None:
                self._timer.add(step.phase, begin)

    def _tensors_of(self, piece: int) -> Tensors:
        tensors = self._tensors.get(piece)
        if tensors is None:
            tensors = Tensors([self.memory[piece], *self._inputs, *self._outputs, *self._residuals])
            self._tensors[piece] = tensors
        return tensors

    def release(self, piece: int) -> torch.Tensor:
        """Forget a piece that is finished and return its memory."""
        self._tensors.pop(piece, None)
        return self.memory.pop(piece)

    def _execute(self, piece: int, at: int, instruction: Instruction, nth: int) -> None:
        """Execute instruction ``at`` of the program on one slice of its chunk."""
        plan = self._plan
        part_slice = plan.pieces[piece][instruction.chunk][nth]
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
                self._reduce(piece, at, instruction, part_slice, nth)
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

    def _reduce(self, piece: int, at: int, reduce: Reduce, part_slice: Slice, nth: int) -> None:
        plan, numel = self._plan, part_slice.numel
        spec = plan.spec.parts[part_slice.part]
        levels = _input_levels(reduce)
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
        elif reduce.local is Local.ACCUMULATOR:
            local = self._partial_sum(piece, reduce.chunk, part_slice, nth)
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
                out = self._partial_sum(piece, reduce.chunk, part_slice, nth)
            ops.reduce(codec, payloads, numel, local, position, divisor, out, op=plan.op, dtype=spec.dtype)
            return
        old_residual = None
        if residual is not None and writes and not reads:
            # It is in the partial sum already. Adding -0.0 changes no number; a block that is not finite keeps its
            # residual, here -0.0, which is then replaced by the old one.
            old_residual = residual.clone()
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
            op=plan.op,
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
        return ops.reduce(
            NONE, _padded(raw, NONE.wire_bytes(numel, wide)), numel, op=self._plan.op, dtype=wide
        )

    def _partial_sum(self, piece: int, chunk: int, part_slice: Slice, nth: int) -> torch.Tensor:
        wide = accumulator_dtype(self._plan.spec.parts[part_slice.part].dtype)
        at = self._plan.sums[piece][chunk][nth]
        return self.memory[piece][at : at + part_slice.numel * wide.itemsize].view(wide)

    def _bytes(self, piece: int, rank: int, payload_id: int, part_slice: Slice, level: int) -> torch.Tensor:
        offset, size = part_slice.span(level)
        at = self._plan.places[piece][rank, payload_id] + offset
        return self.memory[piece][at : at + size]

    def _input(self, part_slice: Slice) -> torch.Tensor:
        tensor = self._part(self._inputs, part_slice, part_slice.in_offset)
        assert tensor is not None, "only ranks with an input read it"
        return tensor

    def _output(self, part_slice: Slice) -> torch.Tensor | None:
        return self._part(self._outputs, part_slice, part_slice.out_offset)

    def _residual(self, part_slice: Slice) -> torch.Tensor | None:
        return self._part(self._residuals, part_slice, part_slice.in_offset)

    def _part(
        self, tensors: Sequence[torch.Tensor | None], part_slice: Slice, offset: int
    ) -> torch.Tensor | None:
        tensor = tensors[part_slice.part]
        return None if tensor is None else _flat(tensor)[offset : offset + part_slice.numel]


def steps(plan: RoundsPlan, piece: int, at: int, after: bool) -> list[Step]:
    """Return the steps of round ``at`` on a piece, before its exchange or after it; the plan keeps them."""
    known = plan.steps.get((piece, at, after))
    if known is None:
        round_ = plan.rounds[at]
        known = plan.steps[piece, at, after] = list(
            _steps(plan, piece, round_.after if after else round_.before)
        )
    return known


def _steps(plan: RoundsPlan, piece: int, instructions: Iterable[tuple[int, Instruction]]) -> Iterable[Step]:
    waves: list[dict[tuple[object, ...], Step]] = []  # steps by kind of call
    calls: dict[int, list[GroupedCall]] = {}
    seen: dict[int, int] = {}  # by chunk
    for at, instruction in instructions:
        chunk = instruction.chunk
        wave = seen[chunk] = seen.get(chunk, -1) + 1
        for nth, part_slice in enumerate(plan.pieces[piece][chunk]):
            while len(waves) <= wave:
                waves.append({})
            dtype, phase = plan.spec.parts[part_slice.part].dtype, _PHASE.get(type(instruction), "decode")
            codec, call = _grouped_call(plan, piece, at, instruction, part_slice, nth)
            step = waves[wave].setdefault((phase, codec, dtype), Step(phase, [], None))
            step.calls.append((at, instruction, nth))
            if codec is not None and call is not None:
                calls.setdefault(id(step), []).append(call)
                step.group = CallGroup(codec, dtype, plan.rank, tuple(calls[id(step)]))
    for by_kind in waves:
        yield from by_kind.values()


def _grouped_call(
    plan: RoundsPlan, piece: int, at: int, instruction: Instruction, part_slice: Slice, nth: int
) -> tuple[Codec | None, GroupedCall | None]:
    """Return the codec and the call of kernels that an instruction is on a slice; None: it takes several."""
    parts, index, numel = len(plan.spec.parts), part_slice.part, part_slice.numel
    spec = plan.spec.parts[index]
    if spec.dtype not in ELEMENT_TYPES:
        return None, None

    def payload(rank: int, payload_id: int, level: int) -> Place:
        return _MEMORY, plan.places[piece][rank, payload_id] + part_slice.span(level)[0]

    source = 1 + index, part_slice.in_offset * spec.dtype.itemsize
    output = 1 + parts + index, part_slice.out_offset * spec.dtype.itemsize
    residual = 1 + 2 * parts + index, part_slice.in_offset * torch.float32.itemsize
    match instruction:
        case Encode(payload_id=payload_id, level=level):
            return spec.at(level), GroupedCall(
                numel=numel,
                local=source,
                residual_in=residual,
                residual_out=residual,
                payload_id=payload_id,
                offset=part_slice.in_offset,
                payload_out=payload(plan.rank, payload_id, level),
                out=output if instruction.output else None,
            )
        case Decode(peer=peer, payload_id=payload_id, level=level):
            return spec.at(level), GroupedCall(numel, (payload(peer, payload_id, level),), out=output)
        case Copy():
            return NONE, GroupedCall(numel, local=source, out=output)
        case Reduce():
            pass
        case _:
            raise TypeError(f"{instruction} is not arithmetic")
    reduce, levels, wide = instruction, _input_levels(instruction), accumulator_dtype(spec.dtype)
    codecs = [spec.at(level) for level in levels]
    encodes = reduce.payload_id is not None
    codec = spec.at(reduce.level) if encodes else codecs[0]
    if any(other != codec for other in codecs):
        return None, None
    reads, writes = at in plan.residual_reads, at in plan.residual_writes
    call = GroupedCall(
        numel=numel,
        payloads=tuple(
            payload(rank, payload_id, level)
            for (rank, payload_id), level in zip(reduce.inputs, levels, strict=True)
        ),
        position=reduce.position,
        residual_in=residual if reads and reduce.local is Local.INPUT else None,
        residual_out=residual if writes and (encodes or reads) else None,
        divisor=plan.divisor if reduce.divide else 1,
        op=plan.op,
        payload_id=reduce.payload_id or 0,
        offset=part_slice.in_offset,
        payload_out=payload(plan.rank, reduce.payload_id, reduce.level)
        if reduce.payload_id is not None
        else None,
        out=output if reduce.output else None,
    )
    if reduce.local is Local.INPUT:
        call = call._replace(local=source)
    elif reduce.local is Local.ACCUMULATOR:
        call = call._replace(local=(_MEMORY, plan.sums[piece][reduce.chunk][nth]), local_dtype=wide)
    if reduce.keep_partial_sum and not encodes:
        call = call._replace(out=(_MEMORY, plan.sums[piece][reduce.chunk][nth]), out_dtype=wide)
    return codec, call


def _input_levels(reduce: Reduce) -> Sequence[int]:
    return reduce.input_levels or (0,) * len(reduce.inputs)


def _padded(payloads: Sequence[torch.Tensor], size: int) -> list[torch.Tensor]:
    # Payloads end at multiples of 16 bytes.
    return [torch.nn.functional.pad(payload, (0, size - payload.numel())) for payload in payloads]


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    # In memory order, whatever the strides: the caller's tensors are dense.
    return tensor.detach().as_strided((tensor.numel(),), (1,))
