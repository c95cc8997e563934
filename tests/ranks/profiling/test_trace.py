"""Traces of training steps: their tracks, their merge onto one clock, and the command that prints them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dtcomm.cli.trace import main
from dtcomm.profiling import merge, trace
from tests.unit.profiling.steps import MS, step

SKEW = 7_000_000_000  # between two hosts' monotonic clocks


def write_trace(folder: Path, rank: int, host: str = "local", ahead: int = 0) -> Path:
    """Write the trace of a rank whose monotonic clock is ``ahead`` of the first one's by these nanoseconds."""
    steps = [trace._shifted(step(n), ahead) for n in range(3)]
    path = Path(trace.write(folder / "run.json", "ddp", rank, host, steps))
    if ahead:
        content = json.loads(path.read_text())
        content["dtcomm"][0]["wall_minus_monotonic_ns"] -= ahead
        content["dtcomm"][0]["boot"] = "another"
        path.write_text(json.dumps(content))
    return path


def slices(path: Path, rank: int) -> list[dict[str, Any]]:
    events = json.loads(path.read_text())["traceEvents"]
    return [event for event in events if event["ph"] == "X" and event["pid"] == rank]


def test_every_interval_of_a_trace_is_on_its_track(tmp_path: Path) -> None:
    path = write_trace(tmp_path, 3)
    assert path.name == "run.rank3.json"
    events = json.loads(path.read_text())["traceEvents"]
    names = {event["args"]["name"] for event in events if event["ph"] == "M" and "name" in event["args"]}
    assert {"rank 3 (local)", "steps", "hook", "bucket 0", "bucket 1"} <= names
    intervals = slices(path, 3)
    in_flight = [event for event in intervals if event["name"] == "in flight"]
    assert len(in_flight) == 6
    assert in_flight[0]["dur"] == 38_000 and in_flight[0]["args"]["ratio"] == 4
    assert sum(event["tid"] == 4 for event in intervals) == 6  # waits
    begins = [event for event in events if event["ph"] == "b"]
    ends = {event["id"]: event["ts"] for event in events if event["ph"] == "e"}
    assert len(begins) == 6 and all(ends[event["id"]] > event["ts"] for event in begins)


def test_slices_of_a_track_never_cross(tmp_path: Path) -> None:
    """Slices must nest or follow each other; Perfetto drops others."""
    intervals = slices(write_trace(tmp_path, 0), 0)
    for track in {event["tid"] for event in intervals}:
        open_until: list[float] = []
        for event in sorted((e for e in intervals if e["tid"] == track), key=lambda e: (e["ts"], -e["dur"])):
            while open_until and open_until[-1] <= event["ts"]:
                open_until.pop()
            end = event["ts"] + event["dur"]
            assert not open_until or end <= open_until[-1]
            open_until.append(end)


def test_ranks_of_other_hosts_are_shifted_to_the_first_ones_clock(tmp_path: Path) -> None:
    paths = [write_trace(tmp_path, 0), write_trace(tmp_path, 1), write_trace(tmp_path, 2, "other", SKEW)]
    merged = tmp_path / "all.json"
    merge(paths, merged)
    first_events = {rank: slices(merged, rank)[0] for rank in range(3)}
    # In microseconds. The earliest event is at 0; the other host's is as close as the wall clocks agree.
    assert min(event["ts"] for event in first_events.values()) == 0
    assert first_events[0]["ts"] == first_events[1]["ts"]
    assert abs(first_events[2]["ts"] - first_events[0]["ts"]) < 1000
    assert [metadata["rank"] for metadata, _ in trace.read([merged])] == [0, 1, 2]
    merged_again = tmp_path / "again.json"
    merge([merged], merged_again)
    assert slices(merged_again, 2) == slices(merged, 2)


def test_a_trace_of_torch_profiler_is_shifted_to_the_same_clock(tmp_path: Path) -> None:
    path = write_trace(tmp_path, 0)
    offset = json.loads(path.read_text())["dtcomm"][0]["wall_minus_monotonic_ns"]
    base = 1_700_000_000_000_000_000
    event = {"ph": "X", "name": "aten::mm", "pid": 77, "tid": 1, "dur": 5.0}
    event["ts"] = (step(0).begin + 2 * MS + offset - base) / 1e3
    profile = tmp_path / "profile.json"
    profile.write_text(json.dumps({"baseTimeNanoseconds": base, "traceEvents": [event]}))
    merge([profile, path], tmp_path / "all.json")
    assert slices(tmp_path / "all.json", 77)[0]["ts"] == pytest.approx(2000, abs=1)


def test_the_command_prints_and_merges(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [str(write_trace(tmp_path, rank)) for rank in range(2)]
    out = tmp_path / "all.json"
    assert main([*paths, "-o", str(out)]) == 0
    output = capsys.readouterr().out
    assert "rank 1" in output and "exposed for 30%" in output
    assert main([str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ranks"]["1"]["share"] == pytest.approx(0.3)
    invalid = tmp_path / "other.json"
    invalid.write_text("[]")
    assert main([str(invalid)]) == 2
    assert "no trace" in capsys.readouterr().err
