"""The segments of a bucket, and how reports divide its bytes."""

from __future__ import annotations

import pytest
import torch

from dtcomm.codecs import codec
from dtcomm.compress.bucket import BucketLayout, build_layout
from dtcomm.compress.policy import default_policy
from dtcomm.compress.report import format_bytes
from dtcomm.compress.traffic import ParameterTotals, group_rows
from tests.unit.compress.test_report import make_report

SHAPES = {"norm": (40,), "bias": (10,), "matrix": (50, 40), "other": (64, 64), "tail": (3,)}


def make_layout(
    spec: str = "int8", dtype: torch.dtype = torch.float32, skew: int = 0
) -> tuple[torch.Tensor, BucketLayout]:
    """Return a buffer like DDP's, which starts at element ``skew`` of its allocation, and its layout."""
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
    buffer, layout = make_layout(skew=skew)
    assert [[member.name for member in segment.members] for segment in layout.segments] == [
        ["norm", "bias"],
        ["matrix"],
        ["other"],
        ["tail"],
    ]
    assert [str(segment.codec) for segment in layout.segments] == ["none", "int8", "int8", "none"]
    parts = layout.split(buffer)
    assert [tensor.numel() for tensor in parts] == [50, 2000, 4096, 3]
    for tensor in parts:
        tensor.fill_(1)
    assert buffer.all()


def test_without_compression_a_buffer_is_one_segment() -> None:
    buffer, layout = make_layout("none")
    assert len(layout.segments) == 1
    assert layout.split(buffer)[0] is buffer
    assert layout.lossy == []


def test_bytes_are_split_in_proportion_to_the_payloads() -> None:
    _, layout = make_layout()
    payload = round(sum(segment.payload_bytes() for segment in layout.segments))
    layout.wire_bytes = 3 * payload
    totals: dict[str, ParameterTotals] = {}
    layout.add_to(totals)
    assert sum(total.wire_bytes for total in totals.values()) == pytest.approx(3 * payload)
    assert totals["matrix"].wire_bytes == pytest.approx(3 * codec("int8").wire_bytes(2000))
    assert totals["matrix"].plain_bytes == pytest.approx(3 * 2000 * 4)
    assert totals["norm"].wire_bytes == totals["norm"].plain_bytes


def test_report_groups_by_codec_and_reason_and_says_why() -> None:
    _, layout = make_layout()
    layout.wire_bytes = round(sum(segment.payload_bytes() for segment in layout.segments))
    layout.lossy[0].signal, layout.lossy[0].error = 4.0, 0.01
    totals: dict[str, ParameterTotals] = {}
    layout.add_to(totals)
    rows = group_rows(totals.items())
    by_codec = {row.codec: row for row in rows}
    assert by_codec["int8"].names == ("matrix", "other")
    assert by_codec["int8"].relative_error == pytest.approx(0.05)
    assert by_codec["int8"].saved_bytes > 0.7 * by_codec["int8"].plain_bytes
    assert by_codec["none"].reason == "policy: ndim<2"
    assert by_codec["none"].relative_error == 0.0
    report = make_report(*rows)
    assert "policy: ndim<2" in str(report)
    assert "5.0e-02" in str(report)
    assert report.to_dict()["rows"][0]["names"] == ["matrix", "other"]
    assert report.to_dict()["rows"][0]["saved_bytes"] == rows[0].saved_bytes


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (3 * 2**40, "3072.0 GiB")]
)
def test_format_bytes(count: int, text: str) -> None:
    assert format_bytes(count) == text
