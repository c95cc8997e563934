"""``dtcomm perf --virtual`` in the emulator: flags, table, JSON, CSV, picture and check, without a GPU."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from dtcomm import algorithms
from dtcomm.cli.main import main
from dtcomm.cli.perf import args
from dtcomm.cli.perf import virtual as perf_virtual
from dtcomm.cli.perf.collectives import COLLECTIVES
from dtcomm.cli.perf.report import PerfReport, ProgressListener
from dtcomm.codecs import codec
from dtcomm.measure.memory_floor import minimum_bytes_moved
from dtcomm.measure.virtual_ranks import VirtualRanks
from dtcomm.runtime.cuda_peer.launch import COLLECTIVES as FUSED
from tests.support.recording_clock import RecordingClock

QUICK = "--device emulator -n 2 -w 1"


def virtual(line: str, clock: RecordingClock | None = None) -> PerfReport:
    return perf_virtual.run(args.parse(f"{line} {QUICK}".split()), ProgressListener(), clock)


@pytest.mark.parametrize("collective", algorithms.collectives())
def test_every_collective_by_one_launch_and_by_programs(collective: str) -> None:
    ring = "ring" if "ring" in algorithms.available(collective) else "tree"
    root = "-r 1" if COLLECTIVES[collective].rooted else ""
    report = virtual(
        f"{collective} --virtual 3 -b 600 -e 600 --codec none,int8 -d bfloat16 --algorithm auto,{ring} {root}"
    )
    assert report.wrong == 0 and len(report.ranks) == 3 and len(report.rows) == 4
    for row in report.rows:
        lossy, direct = row.variant.codec == "int8", row.variant.algorithm == "auto"
        name = "two_shot" if collective == "all_reduce" and lossy else "one_shot"
        assert row.transport is not None and row.transport.name == f"fused:{name if direct else ring}"
        assert row.primary.check.wrong == 0  # it was checked
        # The minimum of the bytes that a program moves is not known.
        assert (row.primary.memory_floor_share is not None) == (direct and collective in FUSED)
    sent = {(row.variant.codec, row.variant.algorithm): row.wire_bytes for row in report.rows}
    for name in ("auto", ring):
        none, int8 = sent["none", name], sent["int8", name]
        assert none is not None and int8 is not None and (int8 < none or none == 0)


def test_a_custom_schedule_runs(tmp_path: Path) -> None:
    file = tmp_path / "mine.txt"
    file.write_text(str(algorithms.build("halving", "all_reduce", 3)))
    (row,) = virtual(f"--schedule {file} --virtual 3 -b 1K -e 1K --codec int8").rows
    assert row.transport is not None and row.transport.name == "fused:mine"
    with pytest.raises(SystemExit):
        virtual(f"--schedule {file} --virtual 2")


def test_table_json_csv_and_plot_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = {kind: tmp_path / f"found.{kind}" for kind in ("json", "csv", "png")}
    line = f"perf all_reduce --virtual 2 -b 256 -e 512 -f 2 --codec int8 --algorithm one_shot,two_shot -G 2 {QUICK} "
    line += f"--json {files['json']} --csv {files['csv']} --plot {files['png']}"
    assert main(line.split()) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "# WARNING: " + perf_virtual.WARNING in lines
    (head,) = (line.split() for line in lines if line.startswith("#       size"))
    rows = [line.split() for line in lines if not line.startswith("#")]
    # Of the head, `#` is a word of its own.
    assert [row[head.index("moved") - 1] for row in rows] == ["fused:one_shot", "fused:two_shot"] * 2
    document = json.loads(files["json"].read_text())
    config = document["config"]
    assert (config["ranks"], config["virtual_ranks"], config["device"]) == (2, 2, "emulator")
    assert config["graph_replays"] == 2 and config["gpus"] == [] and config["versions"]["torch"]
    for row in document["results"]:
        assert row["in_place"]["of_floor"] > 0 and row["in_place"]["nwrong"] == 0
        assert len(row["in_place_per_iter"]["times_us"]) == 2
    assert len(list(csv.DictReader(files["csv"].open()))) == 4
    assert files["png"].read_bytes().startswith(b"\x89PNG")


def test_the_memory_floor_share_is_the_time_of_copying_the_moved_bytes() -> None:
    class MillisecondClock(RecordingClock):
        """Copies and calls take a millisecond each."""

        def seconds(self, begin: int, end: int) -> float:
            super().seconds(begin, end)
            return 1e-3

    report = virtual(
        "all_reduce --virtual 2 -b 4K -e 4K --codec int4 --algorithm two_shot", MillisecondClock()
    )
    count = 1 << 10
    moved = minimum_bytes_moved("all_reduce", "two_shot", 2, count, 4, codec("int4").wire_bytes(count))
    for place in (report.rows[0].in_place, report.rows[0].out_of_place):
        assert place.memory_floor_share == pytest.approx(moved / (2 * perf_virtual.EMULATED_COPY))
    assert virtual("all_reduce --virtual 2 -b 1K -e 1K -C").rows[0].primary.memory_floor_share is None


def test_a_wrong_value_fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run = VirtualRanks.run

    def spoiled(self: VirtualRanks, plan: Any, inputs: Any, outputs: Any, residuals: Any = None) -> None:
        run(self, plan, inputs, outputs, residuals)
        outputs[1][-1] += 1

    monkeypatch.setattr(VirtualRanks, "run", spoiled)
    assert main(f"perf all_reduce --virtual 3 -b 1K -e 1K -c 2 {QUICK}".split()) == 1
    assert "# Out of bounds values : 4 FAILED" in capsys.readouterr().out


def test_ranks_that_differ_by_a_bit_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    run = VirtualRanks.run

    def spoiled(self: VirtualRanks, plan: Any, inputs: Any, outputs: Any, residuals: Any = None) -> None:
        run(self, plan, inputs, outputs, residuals)
        outputs[1][0] *= 1.0001

    monkeypatch.setattr(VirtualRanks, "run", spoiled)
    report = virtual("all_reduce --virtual 2 -b 1K -e 1K -O 0 --codec int8")
    assert report.wrong == 2 * 256


def test_virtual_ranks_under_a_launcher_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "1")
    assert main(f"perf all_reduce --virtual 2 {QUICK}".split()) == 2
    assert "--virtual 2: needs a single process" in capsys.readouterr().err


def test_published_times_are_printed_below_ours(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(f"perf all_reduce --virtual 2 -b 1K -e 4K -f 4 --codec int8 {QUICK}".split()) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "Published" in line]
    assert lines == ["# Published, 1K: MSCCL++ in graphs 4.6 us on 8 H100"]
    options = args.parse("all_reduce --virtual 2 --published --device emulator".split())
    assert options.sizes[:3] == [1 << 10, 2 << 10, 8 << 10] and options.sizes[-1] == 2 << 30
    with pytest.raises(SystemExit):
        args.parse("all_gather --virtual 2 --published --device emulator".split())
    assert "--published: the tables are of all_reduce, not all_gather" in capsys.readouterr().err
