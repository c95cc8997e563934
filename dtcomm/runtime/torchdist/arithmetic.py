"""The computation of one operation: what the instructions of a plan do to this rank's tensors, by the kernels' verbs.

Chunks do not depend on each other. So what a round computes is cut into steps with at most one instruction of each
chunk, and a step's calls of the same codec run as a group (`dtcomm.kernels.calls.CallGroup`): on a device they are one
launch, however many parameters, peers and chunks there are.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from dtcomm.codecs import Codec
from dtcomm.codecs import codec as parse
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
    """Calls of a codec that do not depend on each other.

    ``terms`` are the codecs of each call's payloads where they differ from the codec of the sum, else None.
    """

    phase: Phase
    group: CallGroup
    terms: tuple[Codec, ...] | None
    runners: dict[str, Runner] = field(default_factory=dict)  # by kernel

    def run(self, tensors: Tensors, seed: int) -> None:
        """Run the calls with the kernel in use."""
        memory = tensors.tensors[_MEMORY]
        assert memory is not None
        kernel = dispatch.kernel_for(self.group.codec, "codec", memory)
        if self.terms is not None:
            for call in self.group.calls:
                _run_mixed(kernel, self.group, call, self.terms, tensors, seed)
            return
        if kernel not in self.runners:
            self.runners[kernel] = eager.prepare(kernel, self.group, memory.device)
        self.runners[kernel](tensors, seed)


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
        for step in steps(self._plan, piece, at, after):
            begin = time.monotonic_ns() if self._timer is not None else 0
            step.run(self._tensors_of(piece), self._seed)
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


def _run_mixed(
    kernel: str, group: CallGroup, call: GroupedCall, codecs: Sequence[Codec], tensors: Tensors, seed: int
) -> None:
    """Sum payloads of these codecs and the local term in rank order; what the call does to a sum is done to that."""
    numel, dtype = call.numel, group.dtype
    wide = accumulator_dtype(dtype)
    terms = [
        ops.decode(codec, payload, numel, dtype if codec.name == "none" else wide).to(wide)
        for codec, place in zip(codecs, call.payloads, strict=True)
        if (payload := tensors.at(place, codec.wire_bytes(numel, dtype), torch.uint8)) is not None
    ]
    local = tensors.at(call.local, numel, call.local_dtype or dtype)
    residual = tensors.at(call.residual_in, numel, torch.float32)
    if local is not None and residual is not None and (call.payload_out is None or call.residual_out is None):
        # The sum is encoded later or never, so the residual is added here.
        local = local.float() + residual
        if call.residual_out is not None:
            residual.zero_()
        call = call._replace(residual_in=None, residual_out=None)
    if local is not None:
        terms.insert(call.position, local.to(wide))
    size = NONE.wire_bytes(numel, wide)
    raw = [
        torch.nn.functional.pad(term.view(torch.uint8), (0, size - numel * wide.itemsize)) for term in terms
    ]
    total = ops.reduce(NONE, raw, numel, op=call.op, dtype=wide)
    place = len(tensors.tensors), 0
    call = call._replace(payloads=(), position=0, local=place, local_dtype=wide)
    eager.run_single(kernel, group, call, Tensors([*tensors.tensors, total]), seed)


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
    waves: list[dict[tuple[Any, ...], list[GroupedCall]]] = []  # calls by their kind
    seen: dict[int, int] = {}  # by chunk
    for at, instruction in instructions:
        chunk = instruction.chunk
        wave = seen[chunk] = seen.get(chunk, -1) + 1
        for nth, part_slice in enumerate(plan.pieces[piece][chunk]):
            while len(waves) <= wave:
                waves.append({})
            dtype, phase = plan.spec.parts[part_slice.part].dtype, _PHASE.get(type(instruction), "decode")
            codec, terms, call = _grouped_call(plan, piece, at, instruction, part_slice, nth)
            waves[wave].setdefault((phase, codec, terms, dtype), []).append(call)
    for by_kind in waves:
        for (phase, codec, terms, dtype), calls in by_kind.items():
            yield Step(phase, CallGroup(codec, dtype, plan.rank, tuple(calls)), terms)


def _grouped_call(
    plan: RoundsPlan, piece: int, at: int, instruction: Instruction, part_slice: Slice, nth: int
) -> tuple[Codec, tuple[Codec, ...] | None, GroupedCall]:
    """Return the codec of what an instruction is on a slice, those of its payloads if they differ, and the call."""
    parts, index, numel = len(plan.spec.parts), part_slice.part, part_slice.numel
    spec = plan.spec.parts[index]

    def payload(rank: int, payload_id: int, level: int) -> Place:
        return _MEMORY, plan.places[piece][rank, payload_id] + part_slice.span(level)[0]

    source = 1 + index, part_slice.in_offset * spec.dtype.itemsize
    output = 1 + parts + index, part_slice.out_offset * spec.dtype.itemsize
    residual = 1 + 2 * parts + index, part_slice.in_offset * torch.float32.itemsize
    match instruction:
        case Encode(payload_id=payload_id, level=level):
            return (
                spec.at(level),
                None,
                GroupedCall(
                    numel=numel,
                    local=source,
                    residual_in=residual,
                    residual_out=residual,
                    payload_id=payload_id,
                    offset=part_slice.in_offset,
                    payload_out=payload(plan.rank, payload_id, level),
                    out=output if instruction.output else None,
                ),
            )
        case Decode(peer=peer, payload_id=payload_id, level=level):
            return spec.at(level), None, GroupedCall(numel, (payload(peer, payload_id, level),), out=output)
        case Copy():
            return NONE, None, GroupedCall(numel, local=source, out=output)
        case Reduce():
            pass
        case _:
            raise TypeError(f"{instruction} is not arithmetic")
    reduce, wide = instruction, accumulator_dtype(spec.dtype)
    levels = reduce.input_levels or (0,) * len(reduce.inputs)
    codecs = tuple(spec.at(level) for level in levels)
    encodes = reduce.payload_id is not None
    codec = spec.at(reduce.level) if encodes else codecs[0]
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
    return codec, codecs if any(other != codec for other in codecs) else None, call
