from __future__ import annotations

import pytest
import torch

from dtcomm.codecs import codec
from dtcomm.compress.bucket_layout import BucketLayout, build_layout
from dtcomm.compress.policy import default_policy
from dtcomm.compress.report import ParameterTotals, Report, format_bytes, group_rows

SHAPES = {"norm": (40,), "bias": (10,), "matrix": (50, 40), "other": (64, 64), "tail": (3,)}


def packing(
    spec: str = "int8", dtype: torch.dtype = torch.float32, skew: int = 0
) -> tuple[torch.Tensor, BucketLayout]:
    """A buffer as DDP's: views of one allocation, in order, and itself perhaps not at its start."""
    numel = sum(torch.Size(shape).numel() for shape in SHAPES.values())
    buffer = torch.zeros(numel + skew, dtype=dtype)[skew:]
    views, start = [], 0
    for name, shape in SHAPES.items():
        size = torch.Size(shape).numel()
        views.append((name, buffer[start : start + size].view(shape)))
        start += size
    return buffer, build_layout(buffer, views, tuple(range(len(views))), default_policy(spec).choose)


@pytest.mark.parametrize("skew", [0, 5])
def test_each_matrix_has_a_segment_and_uncompressed_neighbours_share_one(skew: int) -> None:
    buffer, packed = packing(skew=skew)
    assert [[member.name for member in segment.members] for segment in packed.segments] == [
        ["norm", "bias"],
        ["matrix"],
        ["other"],
        ["tail"],
    ]
    assert [str(segment.codec) for segment in packed.segments] == ["none", "int8", "int8", "none"]
    cut = packed.split(buffer)
    assert [tensor.numel() for tensor in cut] == [50, 2000, 4096, 3]
    for tensor in cut:
        tensor.fill_(1)
    assert buffer.all()


def test_without_compression_a_buffer_is_one_segment() -> None:
    buffer, packed = packing("none")
    assert len(packed.segments) == 1
    assert packed.split(buffer)[0] is buffer
    assert packed.lossy == []


def test_bytes_are_split_in_proportion_to_the_payloads() -> None:
    _, packed = packing()
    payload = sum(segment.payload_bytes for segment in packed.segments)
    packed.wire_bytes = 3 * payload
    tallies: dict[str, ParameterTotals] = {}
    packed.add_to(tallies)
    assert sum(tally.wire_bytes for tally in tallies.values()) == pytest.approx(3 * payload)
    assert tallies["matrix"].wire_bytes == pytest.approx(3 * codec("int8").wire_bytes(2000))
    assert tallies["matrix"].plain_bytes == pytest.approx(3 * 2000 * 4)
    assert tallies["norm"].wire_bytes == tallies["norm"].plain_bytes


def test_report_groups_by_codec_and_reason_and_says_why() -> None:
    _, packed = packing()
    packed.wire_bytes = sum(segment.payload_bytes for segment in packed.segments)
    packed.lossy[0].signal, packed.lossy[0].error = 4.0, 0.01
    tallies: dict[str, ParameterTotals] = {}
    packed.add_to(tallies)
    made = group_rows(tallies.items())
    by_codec = {row.codec: row for row in made}
    assert by_codec["int8"].names == ("matrix", "other")
    assert by_codec["int8"].relative_error == pytest.approx(0.05)
    assert by_codec["int8"].saved_bytes > 0.7 * by_codec["int8"].plain_bytes
    assert by_codec["none"].why == "policy: ndim<2"
    assert by_codec["none"].relative_error == 0.0
    report = Report(
        policy="p",
        feedback=True,
        steps=1,
        messages=1,
        wire_bytes=packed.wire_bytes,
        plain_bytes=round(packed.plain_bytes),
        seconds=0.5,
        residual_bytes=0,
        rows=made,
    )
    assert "policy: ndim<2" in str(report)
    assert "5.0e-02" in str(report)
    assert report.to_dict()["rows"][0]["names"] == ["matrix", "other"]
    assert report.to_dict()["rows"][0]["saved_bytes"] == made[0].saved_bytes


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (3 * 2**40, "3072.0 GiB")]
)
def test_format_bytes(count: int, text: str) -> None:
    assert format_bytes(count) == text
