"""Chunks and pieces cover every tensor once, at granules, whatever else is in the message."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dtcomm import _C, algorithms
from dtcomm.codecs import codec
from dtcomm.codecs.base import ELEMENT_TYPES
from dtcomm.runtime.torchdist.layout import lay_out, payload_bytes, piece_elements
from dtcomm.runtime.types import GEOMETRY, OPS, OpSpec, TensorSpec
from dtcomm.schedule import lower
from dtcomm.schedule.ir import CUT_AT_GRANULES
from tests.unit.runtime.orders import SHARDS_IN, SHARDS_OUT
from tests.unit.schedule.test_verify import schedules

parts = st.builds(
    TensorSpec,
    st.one_of(st.integers(0, 40), st.integers(0, 20_000)),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.sampled_from([codec(spec) for spec in ("none", "fp16", "int8", "int8:block=4096")]),
    st.none(),
)


@st.composite
def shapes(draw: st.DrawFn) -> OpSpec:
    collective = draw(st.sampled_from(sorted(GEOMETRY)))
    drawn = draw(st.lists(parts, min_size=1, max_size=4))
    return OpSpec(collective, "sum", tuple(drawn), "one_shot")


def chunks_of(shape: OpSpec, ranks: int) -> int:
    return ranks**2 if shape.collective == "all_to_all" else ranks


@given(shapes(), st.integers(1, 6), st.integers(1, 9000))
@settings(max_examples=60, deadline=None)
def test_every_element_is_in_one_slice(shape: OpSpec, ranks: int, elements: int) -> None:
    schedule = algorithms.build("one_shot", shape.collective, ranks)
    chunks = chunks_of(shape, ranks)
    pieces = lay_out(shape, chunks, elements)
    for rank in range(ranks):
        for index, part in enumerate(shape.parts):
            shards_in = ranks if shape.collective in SHARDS_IN else 1
            shards_out = ranks if shape.collective in SHARDS_OUT else 1
            ins = torch.zeros(part.numel * shards_in, dtype=torch.int)
            outs = torch.zeros(part.numel * shards_out, dtype=torch.int)
            for piece in pieces:
                for number, chunk in enumerate(piece):
                    for each in (each for each in chunk if each.part == index):
                        assert each.numel > 0
                        # One shot starts and ends with as many chunks as there are in one_shot's all_reduce.
                        if shape.collective in CUT_AT_GRANULES or schedule.starts(rank, number):
                            ins[each.in_offset : each.in_offset + each.numel] += 1
                        if shape.collective in CUT_AT_GRANULES or schedule.ends(rank, number):
                            outs[each.out_offset : each.out_offset + each.numel] += 1
            starts, ends = (
                any(holds(rank, chunk) for chunk in range(schedule.chunks))
                for holds in (schedule.starts, schedule.ends)
            )
            if starts or shape.collective in CUT_AT_GRANULES:
                assert ins.eq(1).all()
            if ends or shape.collective in CUT_AT_GRANULES:
                assert outs.eq(1).all()


@given(shapes(), st.integers(1, 6), st.integers(1, 9000))
@settings(max_examples=60, deadline=None)
def test_slices_are_granules_back_to_back(shape: OpSpec, ranks: int, elements: int) -> None:
    chunks = chunks_of(shape, ranks)
    pieces = lay_out(shape, chunks, elements)
    for number, piece in enumerate(pieces):
        assert len(piece) == chunks
        for index, chunk in enumerate(piece):
            at = 0
            for each in chunk:
                part = shape.parts[each.part]
                shard = (index % ranks) * part.numel  # of all_to_all the receiver's
                begin = each.in_offset - (shard if shape.collective in SHARDS_IN else 0)
                assert begin % part.codec.granularity == 0
                assert each.wire_offset == at
                assert each.wire_bytes == part.codec.wire_bytes(each.numel, part.dtype)
                at += each.wire_bytes
            assert payload_bytes(chunk) == at
            more = number + 1 < len(pieces) and pieces[number + 1][index]
            assert not more or sum(each.numel for each in chunk) >= elements


@given(st.integers(1, 20_000), st.integers(1, 5), st.integers(1, 9000), st.booleans())
@settings(max_examples=40, deadline=None)
def test_both_levels_are_cut_alike(numel: int, chunks: int, elements: int, coarse_inside: bool) -> None:
    fine, coarse = codec("int8"), codec("int8:block=4096")
    levels = (coarse, fine) if coarse_inside else (fine, coarse)
    shape = OpSpec("all_reduce", "sum", (TensorSpec(numel, torch.float32, *levels),), "hierarchical")
    for piece in lay_out(shape, chunks, elements):
        for chunk in piece:
            for level, layout in enumerate(levels):
                assert payload_bytes(chunk, level) == sum(layout.wire_bytes(each.numel) for each in chunk)
            assert all(each.in_offset % 4096 == 0 for each in chunk)


@given(
    parts, st.lists(parts, max_size=3), st.lists(parts, max_size=3), st.integers(1, 6), st.integers(1, 9000)
)
@settings(max_examples=40, deadline=None)
def test_neighbours_do_not_move_an_element_to_another_chunk(
    part: TensorSpec, before: list[TensorSpec], after: list[TensorSpec], chunks: int, elements: int
) -> None:
    def owners(*parts: TensorSpec, index: int) -> list[int]:
        shape = OpSpec("all_reduce", "sum", parts, "two_shot")
        found = [-1] * part.numel
        for piece in lay_out(shape, chunks, elements):
            for number, chunk in enumerate(piece):
                for each in (each for each in chunk if each.part == index):
                    found[each.in_offset : each.in_offset + each.numel] = [number] * each.numel
        return found

    assert owners(*before, part, *after, index=len(before)) == owners(part, index=0)


@given(schedules(), st.integers(0, 30_000), st.sampled_from(["none", "int8"]))
@settings(max_examples=30, deadline=None)
def test_chunks_are_the_schedule_s(schedule, numel: int, spec: str) -> None:
    total = numel if schedule.collective in CUT_AT_GRANULES else numel * schedule.ranks
    shape = OpSpec(schedule.collective, "sum", (TensorSpec(numel, torch.float32, codec(spec)),), "one_shot")
    pieces = lay_out(shape, schedule.chunks, 5000)
    for chunk in range(schedule.chunks):
        laid = sum(each.numel for piece in pieces for each in piece[chunk])
        assert laid == schedule.chunk_numel(chunk, total, codec(spec).granularity)


@given(shapes(), st.integers(1, 4), st.sampled_from([1, 4096, 65536]))
@settings(max_examples=60, deadline=None)
def test_the_engine_cuts_alike(shape: OpSpec, ranks: int, elements: int) -> None:
    schedule = algorithms.build("one_shot", shape.collective, ranks)
    program = lower(schedule, 0)
    native = _C.NativeProgram(0, ranks, program.chunks, list(program.payload_counts), program.flat())
    largest = max(part.dtype.itemsize for part in shape.parts)
    finest = min(part.codec.granularity for part in shape.parts)
    plan = _C.NativePlan(
        program=native,
        geometry=GEOMETRY[shape.collective],
        op=OPS[shape.op],
        average=False,
        segments=[
            (part.numel, ELEMENT_TYPES[part.dtype], part.codec.native(), part.at(1).native())
            for part in shape.parts
        ],
        piece_bytes=elements * largest * (ranks if shape.collective == "all_to_all" else program.chunks),
        slot_bytes=2**40,
        zero_copy=False,
        text="",
        max_boxes=64,
        splits=list(shape.splits),
    )
    pieces = lay_out(shape, program.chunks, max(finest, elements // finest * finest))
    assert plan.pieces == max(1, len(pieces))  # what is empty takes a turn: nobody runs away


@pytest.mark.parametrize("spec", ["none", "fp16", "int8"])
@pytest.mark.parametrize("chunks", [1, 2, 5])
@pytest.mark.parametrize("numel", [0, 1, 10**5, 10**6 + 7])
def test_messages_are_large(numel: int, chunks: int, spec: str) -> None:
    shape = OpSpec("all_reduce", "sum", (TensorSpec(numel, torch.float32, codec(spec)),), "two_shot")
    pieces = lay_out(shape, chunks, piece_elements(shape, chunks, 65536))
    sizes = [payload_bytes(chunk) for piece in pieces[:-1] for chunk in piece if chunk]
    assert all(65536 <= size <= 2 * 65536 + 8192 for size in sizes)
    assert bool(pieces) is (numel > 0)
