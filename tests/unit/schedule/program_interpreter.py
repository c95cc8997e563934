"""Two independent interpreters: one of schedules, by the definition of versions, and one of lowered programs.

``evaluate`` follows the definition of versions literally and knows nothing of payloads or instructions;
``Programs`` runs the instructions of all ranks and knows nothing of schedules. Both take the codec as a
function of (rank, chunk, value) -> decoded value, so that an encoding done by the wrong rank, or twice, shows
in the bits.
"""

from __future__ import annotations

import functools
import operator
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from dtcomm.schedule import Program, Schedule
from dtcomm.schedule.lower import Copy, Decode, Encode, Forward, Local, Receive, Reduce, Send

Codec = Callable[[int, int, Any], Any]
Place = tuple[int, int]


def lossy_round(rank: int, chunk: int, value: float) -> float:
    """Round as a lossy codec does whose rounding differs from rank to rank, as in stochastic rounding."""
    grid = 8 + rank
    return round(value * grid) / grid


def inputs_of(schedule: Schedule, seed: int = 0) -> dict[Place, float]:
    """Numbers of very different sizes, so that the order of a sum shows in its last bits."""
    dice = random.Random(seed)
    return {
        (rank, chunk): dice.uniform(-1, 1) * 10.0 ** dice.randint(-2, 3)
        for rank in range(schedule.ranks)
        for chunk in range(schedule.chunks)
    }


class MeaninglessScheduleError(Exception):
    """The transfers of a step read a version that does not exist, or collide."""


def add(terms: list[Any]) -> Any:
    """Sum from left to right."""
    return functools.reduce(operator.add, terms)


def evaluate(
    schedule: Schedule,
    inputs: dict[Place, Any],
    codec: Codec,
    divisor: int = 1,
    add: Callable[[list[Any]], Any] = add,
) -> dict[Place, Any]:
    """Return the outputs by the definition of versions."""
    value = {place: x for place, x in inputs.items() if schedule.starts(*place)}
    parts = {(rank, chunk): {rank} for rank, chunk in value}
    is_bytes = dict.fromkeys(value, False)
    for step in range(schedule.steps):
        now = [t for t in schedule.transfers if t.step == step]
        for place in {(t.src, t.chunk) for t in now}:
            if place not in value:
                raise MeaninglessScheduleError(f"{place} is sent in step {step} before it is there")
            if not is_bytes[place]:
                value[place] = codec(*place, value[place])
                is_bytes[place] = True
        before, before_parts = dict(value), {place: set(ranks) for place, ranks in parts.items()}
        for dst, chunk in {(t.dst, t.chunk) for t in now}:
            into = [t for t in now if (t.dst, t.chunk) == (dst, chunk)]
            if len(into) != len({t.src for t in into}) or (len(into) > 1 and "copy" in {t.op for t in into}):
                raise MeaninglessScheduleError(f"collision at {dst, chunk} in step {step}")
            if into[0].op == "copy":
                value[dst, chunk] = before[into[0].src, chunk]
                parts[dst, chunk] = before_parts[into[0].src, chunk]
                is_bytes[dst, chunk] = True
                continue
            if (dst, chunk) not in before:
                raise MeaninglessScheduleError(f"{dst, chunk} is added to in step {step} before it is there")
            terms = sorted([dst, *(t.src for t in into)])
            total = add([before[rank, chunk] for rank in terms])
            parts[dst, chunk] = set().union(*(before_parts[rank, chunk] for rank in terms))
            if len(parts[dst, chunk]) == schedule.ranks and divisor != 1:
                total /= divisor
            value[dst, chunk], is_bytes[dst, chunk] = total, False
    return {place: x for place, x in value.items() if schedule.ends(*place)}


@dataclass(frozen=True)
class Symbol:
    """A value as an expression, with how often each rank's input is in it."""

    text: str
    counts: tuple[tuple[int, int], ...]


def symbolic_outputs(schedule: Schedule) -> dict[Place, Symbol] | None:
    """Return the symbolic outputs of all ranks; None if the transfers have no meaning."""
    inputs = {
        (rank, chunk): Symbol(f"x{rank},{chunk}", ((rank, 1),))
        for rank in range(schedule.ranks)
        for chunk in range(schedule.chunks)
    }

    def encode(rank: int, chunk: int, value: Symbol) -> Symbol:
        return Symbol(f"q{rank}({value.text})", value.counts)

    def add(terms: list[Symbol]) -> Symbol:
        counts: Counter[int] = Counter()
        for term in terms:
            counts.update(dict(term.counts))
        return Symbol(f"[{' '.join(term.text for term in terms)}]", tuple(sorted(counts.items())))

    try:
        return evaluate(schedule, inputs, encode, add=add)
    except MeaninglessScheduleError:
        return None


def outputs_are_correct(schedule: Schedule) -> bool:
    """Check by brute force that every output exists, holds each contribution once, and is equal on all ranks."""
    outputs = symbolic_outputs(schedule)
    if outputs is None:
        return False
    for chunk in range(schedule.chunks):
        expected_counts = tuple((rank, 1) for rank in range(schedule.ranks) if schedule.starts(rank, chunk))
        symbols = [outputs.get((rank, chunk)) for rank in range(schedule.ranks) if schedule.ends(rank, chunk)]
        if (
            any(symbol is None or symbol.counts != expected_counts for symbol in symbols)
            or len(set(symbols)) != 1
        ):
            return False
    return True


@dataclass
class Programs:
    """Runs the programs of all ranks, one instruction at a time in a seeded order, and checks each instruction."""

    programs: list[Program]
    inputs: dict[Place, float]
    codec: Codec
    divisor: int = 1
    payloads: dict[Place, float] = field(default_factory=dict)
    visible: set[tuple[int, int, int]] = field(default_factory=set)  # (reader, owner, payload_id)
    accumulators: dict[Place, float] = field(default_factory=dict)
    outputs: dict[Place, float] = field(default_factory=dict)
    encodings: Counter[Place] = field(default_factory=Counter)

    def run(self, seed: int = 0) -> dict[Place, float]:
        dice = random.Random(seed)
        at = [0] * len(self.programs)
        while unfinished := [r for r, p in enumerate(self.programs) if at[r] < len(p.instructions)]:
            dice.shuffle(unfinished)
            moved = False
            for rank in unfinished:
                instruction = self.programs[rank].instructions[at[rank]]
                if isinstance(instruction, Receive):
                    if (instruction.peer, instruction.payload_id) not in self.payloads:
                        continue
                    if (rank, instruction.peer, instruction.payload_id) not in self.visible:
                        continue
                self._do(rank, instruction)
                at[rank] += 1
                moved = True
            assert moved, f"stuck at {at}"
        return self.outputs

    def _do(self, rank: int, instruction: object) -> None:
        match instruction:
            case Encode(chunk=chunk, payload_id=payload_id, output=output):
                self._write(rank, payload_id, self._encode(rank, chunk, self._input(rank, chunk)))
                if output:
                    self._output(rank, chunk, self.payloads[rank, payload_id])
            case Send(payload_id=payload_id, peers=peers):
                assert (rank, payload_id) in self.payloads, "sent before it was written"
                assert peers == tuple(sorted(set(peers))) and rank not in peers
                for peer in peers:
                    assert (peer, rank, payload_id) not in self.visible, "sent twice to the same peer"
                    self.visible.add((peer, rank, payload_id))
            case Receive():
                pass
            case Forward(peer=peer, source_id=source, payload_id=payload_id):
                self._write(rank, payload_id, self._read(rank, peer, source))
            case Decode(chunk=chunk, peer=peer, payload_id=payload_id):
                self._output(rank, chunk, self._read(rank, peer, payload_id))
            case Copy(chunk=chunk):
                self._output(rank, chunk, self._input(rank, chunk))
            case Reduce():
                self._reduce(rank, instruction)
            case _:
                raise AssertionError(instruction)

    def _reduce(self, rank: int, r: Reduce) -> None:
        terms = [self._read(rank, *payload) for payload in r.inputs]
        if r.local is Local.INPUT:
            terms.insert(r.position, self._input(rank, r.chunk))
        elif r.local is Local.ACCUMULATOR:
            terms.insert(r.position, self.accumulators.pop((rank, r.chunk)))
        total = terms[0]
        for term in terms[1:]:
            total += term
        if r.divide:
            total /= self.divisor
        if r.payload_id is not None:
            total = self._encode(rank, r.chunk, total)
            self._write(rank, r.payload_id, total)
        if r.output:
            self._output(rank, r.chunk, total)
        if r.keep_partial_sum:
            assert r.payload_id is None and not r.output
            self.accumulators[rank, r.chunk] = total

    def _encode(self, rank: int, chunk: int, value: float) -> float:
        self.encodings[rank, chunk] += 1
        return self.codec(rank, chunk, value)

    def _write(self, rank: int, payload_id: int, value: float) -> None:
        assert (rank, payload_id) not in self.payloads, "a payload is written once"
        assert 0 <= payload_id < self.programs[rank].payload_counts[rank]
        self.payloads[rank, payload_id] = value

    def _read(self, rank: int, peer: int, payload_id: int) -> float:
        assert rank == peer or (rank, peer, payload_id) in self.visible, "read before it was received"
        return self.payloads[peer, payload_id]

    def _input(self, rank: int, chunk: int) -> float:
        assert (rank, chunk) not in self.outputs, "input read after the output was written over it"
        return self.inputs[rank, chunk]

    def _output(self, rank: int, chunk: int, value: float) -> None:
        assert (rank, chunk) not in self.outputs, "an output is written once"
        self.outputs[rank, chunk] = value
