"""Chunks and pieces cover every tensor once, at granules, whatever other tensors the message holds."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dtcomm import _C, algorithms
from dtcomm.codecs import codec
from dtcomm.codecs.base import ELEMENT_TYPES
from dtcomm.runtime.torchdist.rounds import cut_into_pieces, payload_bytes, piece_elements
from dtcomm.runtime.types import GEOMETRY, OPS, OpSpec, TensorSpec
from dtcomm.schedule import lower
from dtcomm.schedule.ir import CUT_AT_GRANULES
from tests.unit.runtime.simulated_cases import SHARDS_IN, SHARDS_OUT
from tests.unit.schedule.test_verify import schedules

WHOLE, SCATTER, GATHER, EXCHANGE = range(4)

parts = st.builds(
    TensorSpec,
    st.one_of(st.integers(0, 40), st.integers(0, 20_000)),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.sampled_from([codec(spec) for spec in ("none", "fp16", "int8", "int8:block=4096")]),
    st.none(),
)


@st.composite
def op_specs(draw: st.DrawFn) -> OpSpec:
    collective = draw(st.sampled_from(sorted(GEOMETRY)))
    drawn = draw(st.lists(parts, min_size=1, max_size=4))
    return OpSpec(collective, "sum", tuple(drawn), "one_shot")


def number_of_chunks(spec: OpSpec, ranks: int) -> int:
    return ranks**2 if spec.collective == "all_to_all" else ranks


def chunk_layout(*args: object, **kwargs: object) -> list[list[list[tuple[int, int, int, int]]]]:
    return _C.chunk_layout(*args, **kwargs)  # type: ignore[arg-type]


def test_whole_tensors_are_cut_at_granules() -> None:
    assert chunk_layout(WHOLE, [(2500, 1024)], 2, 2) == [[[(0, 0, 0, 1024)]], [[(0, 1024, 1024, 1476)]]]


def test_pieces_take_whole_granules_of_every_segment() -> None:
    (pieces,) = chunk_layout(WHOLE, [(100, 32), (100, 64)], 1, 1, elements=70)
    assert pieces == [[(0, 0, 0, 96)], [(0, 96, 96, 4), (1, 0, 0, 100)]]


@pytest.mark.parametrize(("geometry", "expected"), [(SCATTER, (0, 20, 0, 10)), (GATHER, (0, 0, 20, 10))])
def test_shard_offsets(geometry: int, expected: tuple[int, int, int, int]) -> None:
    assert chunk_layout(geometry, [(10, 4)], 3, 3)[2] == [[expected]]


def test_exchange_of_unequal_shards() -> None:
    splits = [1, 2, 3, 0]
    assert chunk_layout(EXCHANGE, [(3, 1)], 4, 2, splits) == [
        [[(0, 0, 0, 1)]],
        [[(0, 1, 0, 2)]],
        [[(0, 0, 1, 3)]],
        [],
    ]


@pytest.mark.parametrize(
    "arguments",
    [(4, [(1, 1)], 1, 1), (WHOLE, [(1, 0)], 1, 1), (EXCHANGE, [(1, 1)], 3, 2), (WHOLE, [(1, 1)], 0, 1)],
)
def test_wrong_arguments_are_refused(arguments: tuple[object, ...]) -> None:
    with pytest.raises(ValueError, match=r"geometry|segments|chunks"):
        chunk_layout(*arguments)


@given(op_specs(), st.integers(1, 6), st.integers(1, 9000))
@settings(max_examples=60, deadline=None)
def test_every_element_is_in_one_slice(spec: OpSpec, ranks: int, elements: int) -> None:
    schedule = algorithms.build("one_shot", spec.collective, ranks)
    pieces = cut_into_pieces(spec, number_of_chunks(spec, ranks), ranks, elements)
    for rank in range(ranks):
        for index, part in enumerate(spec.parts):
            shards_in = ranks if spec.collective in SHARDS_IN else 1
            shards_out = ranks if spec.collective in SHARDS_OUT else 1
            reads = torch.zeros(part.numel * shards_in, dtype=torch.int)
            writes = torch.zeros(part.numel * shards_out, dtype=torch.int)
            for piece in pieces:
                for number, chunk in enumerate(piece):
                    for run in (run for run in chunk if run.part == index):
                        assert run.numel > 0
                        # One shot starts and ends with as many chunks as there are in one_shot's all_reduce.
                        if spec.collective in CUT_AT_GRANULES or schedule.starts(rank, number):
                            reads[run.in_offset : run.in_offset + run.numel] += 1
                        if spec.collective in CUT_AT_GRANULES or schedule.ends(rank, number):
                            writes[run.out_offset : run.out_offset + run.numel] += 1
            starts, ends = (
                any(holds(rank, chunk) for chunk in range(schedule.chunks))
                for holds in (schedule.starts, schedule.ends)
            )
            if starts or spec.collective in CUT_AT_GRANULES:
                assert reads.eq(1).all()
            if ends or spec.collective in CUT_AT_GRANULES:
                assert writes.eq(1).all()


@given(op_specs(), st.integers(1, 6), st.integers(1, 9000))
@settings(max_examples=60, deadline=None)
def test_slices_are_granules_back_to_back(spec: OpSpec, ranks: int, elements: int) -> None:
    chunks = number_of_chunks(spec, ranks)
    pieces = cut_into_pieces(spec, chunks, ranks, elements)
    for number, piece in enumerate(pieces):
        assert len(piece) == chunks
        for index, chunk in enumerate(piece):
            payload_offset = 0
            for run in chunk:
                part = spec.parts[run.part]
                shard = (index % ranks) * part.numel  # for all_to_all the receiver's shard
                begin = run.in_offset - (shard if spec.collective in SHARDS_IN else 0)
                assert begin % part.codec.granularity == 0
                size = part.codec.wire_bytes(run.numel, part.dtype)
                assert run.inside == run.between == (payload_offset, size)
                payload_offset += size
            assert payload_bytes(chunk) == payload_offset
            continues = number + 1 < len(pieces) and pieces[number + 1][index]
            assert not continues or sum(run.numel for run in chunk) >= elements


@given(op_specs(), st.integers(1, 6))
@settings(max_examples=40, deadline=None)
def test_chunk_payload_bytes_are_those_of_one_piece(spec: OpSpec, ranks: int) -> None:
    chunks = number_of_chunks(spec, ranks)
    pieces = cut_into_pieces(spec, chunks, ranks, 2**40)
    assert len(pieces) <= 1
    sizes = [payload_bytes(chunk) for chunk in pieces[0]] if pieces else [0] * chunks
    assert spec.chunk_payload_bytes(chunks, ranks) == sizes


@given(st.integers(1, 20_000), st.integers(1, 5), st.integers(1, 9000), st.booleans())
@settings(max_examples=40, deadline=None)
def test_both_levels_are_cut_at_the_coarser_granules(
    numel: int, chunks: int, elements: int, coarse_inside: bool
) -> None:
    fine, coarse = codec("int8"), codec("int8:block=4096")
    levels = (coarse, fine) if coarse_inside else (fine, coarse)
    spec = OpSpec("all_reduce", "sum", (TensorSpec(numel, torch.float32, *levels),), "hierarchical")
    for piece in cut_into_pieces(spec, chunks, chunks, elements):
        for chunk in piece:
            for level, layout in enumerate(levels):
                assert payload_bytes(chunk, level) == sum(layout.wire_bytes(run.numel) for run in chunk)
            assert all(run.in_offset % 4096 == 0 for run in chunk)


@given(
    parts, st.lists(parts, max_size=3), st.lists(parts, max_size=3), st.integers(1, 6), st.integers(1, 9000)
)
@settings(max_examples=40, deadline=None)
def test_neighbours_do_not_move_an_element_to_another_chunk(
    part: TensorSpec, before: list[TensorSpec], after: list[TensorSpec], chunks: int, elements: int
) -> None:
    def chunk_of_each_element(*parts: TensorSpec, index: int) -> list[int]:
        spec = OpSpec("all_reduce", "sum", parts, "two_shot")
        numbers = [-1] * part.numel
        for piece in cut_into_pieces(spec, chunks, chunks, elements):
            for number, chunk in enumerate(piece):
                for run in (run for run in chunk if run.part == index):
                    numbers[run.in_offset : run.in_offset + run.numel] = [number] * run.numel
        return numbers

    with_neighbours = chunk_of_each_element(*before, part, *after, index=len(before))
    assert with_neighbours == chunk_of_each_element(part, index=0)


@given(schedules(), st.integers(0, 30_000), st.sampled_from(["none", "int8"]))
@settings(max_examples=30, deadline=None)
def test_chunk_sizes_match_schedule(schedule, numel: int, spec: str) -> None:
    total = numel if schedule.collective in CUT_AT_GRANULES else numel * schedule.ranks
    operation = OpSpec(
        schedule.collective, "sum", (TensorSpec(numel, torch.float32, codec(spec)),), "one_shot"
    )
    pieces = cut_into_pieces(operation, schedule.chunks, schedule.ranks, 5000)
    for chunk in range(schedule.chunks):
        elements = sum(run.numel for piece in pieces for run in piece[chunk])
        assert elements == schedule.chunk_numel(chunk, total, codec(spec).granularity)


@given(op_specs(), st.integers(1, 4), st.sampled_from([1, 4096, 65536]))
@settings(max_examples=60, deadline=None)
def test_engine_cuts_the_same_number_of_pieces(spec: OpSpec, ranks: int, elements: int) -> None:
    schedule = algorithms.build("one_shot", spec.collective, ranks)
    program = lower(schedule, 0)
    native = _C.NativeProgram(0, ranks, program.chunks, list(program.payload_counts), program.flat())
    largest = max(part.dtype.itemsize for part in spec.parts)
    finest = min(part.codec.granularity for part in spec.parts)
    piece_bytes = elements * largest * (ranks if spec.collective == "all_to_all" else program.chunks)
    plan_spec = _C.PlanSpec(
        program=native,
        geometry=GEOMETRY[spec.collective],
        op=OPS[spec.op],
        average=False,
        segments=[
            (part.numel, ELEMENT_TYPES[part.dtype], part.codec.native(), part.at(1).native())
            for part in spec.parts
        ],
        slot_bytes=2**40,
        max_boxes=64,
        splits=list(spec.splits),
        variants=_C.Variants(piece_bytes=piece_bytes),
    )
    plan = _C.NativePlan(plan_spec)
    pieces = cut_into_pieces(spec, program.chunks, ranks, max(finest, elements // finest * finest))
    assert plan.pieces == max(
        1, len(pieces)
    )  # an empty operation takes one piece, so that no rank gets too far ahead


@pytest.mark.parametrize("spec", ["none", "fp16", "int8"])
@pytest.mark.parametrize("chunks", [1, 2, 5])
@pytest.mark.parametrize("numel", [0, 1, 10**5, 10**6 + 7])
def test_pieces_have_payloads_near_the_target_size(numel: int, chunks: int, spec: str) -> None:
    operation = OpSpec("all_reduce", "sum", (TensorSpec(numel, torch.float32, codec(spec)),), "two_shot")
    pieces = cut_into_pieces(operation, chunks, chunks, piece_elements(operation, chunks, chunks, 65536))
    sizes = [payload_bytes(chunk) for piece in pieces[:-1] for chunk in piece if chunk]
    assert all(65536 <= size <= 2 * 65536 + 8192 for size in sizes)
    assert bool(pieces) is (numel > 0)
