from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dtcomm.cli.main import main
from dtcomm.cli.perf import measure
from dtcomm.cli.perf.args import parse
from dtcomm.cli.perf.collectives import COLLECTIVES
from dtcomm.cli.perf.output import plot_lines
from dtcomm.cli.perf.runner import PerfReport, PerfRow
from dtcomm.launch.ranks import run_ranks

ROOT = Path(__file__).parents[3]
QUICK = ["-n", "3", "-w", "1"]


def perf(tmp_path: Path, line: str, status: int = 0) -> dict[str, Any]:
    file = tmp_path / "report.json"
    assert main(["perf", *QUICK, "--json", str(file), *line.split()]) == status
    document = json.loads(file.read_text())
    assert isinstance(document, dict)
    return document


def measure_on_warm_ranks(line: str, nproc: int = 2) -> PerfReport:
    """Return the report of a measurement without the command, on warm ranks."""
    options = parse([*QUICK, "--no-pin", "--json", "-", *line.split()])
    report = run_ranks(measure, nproc, options)[0]
    assert isinstance(report, PerfReport)
    return report


def wrong_counts(row: PerfRow) -> list[int | None]:
    places = [place for place in (row.out_of_place, row.in_place) if place is not None]
    return [None if place.check is None else place.check.wrong for place in places]


def test_native_and_gloo_are_measured_in_one_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    document = perf(
        tmp_path, "all_reduce -b 1K -e 64K -f 64 -c 2 --backend native,gloo --codec none --codec int8"
    )
    assert document["out_of_bounds"] == {"count": 0, "okay": True}
    results = document["results"]
    assert [(row["size"], row["backend"], row["codec"]) for row in results] == [
        (size, *variant)
        for size in (1024, 65536)
        for variant in (("native", "none"), ("native", "int8"), ("gloo", "none"))
    ]
    for row in results:
        for place in ("out_of_place", "in_place"):
            assert row[place]["time"] > 0 and row[place]["bus_bw"] > 0 and row[place]["nwrong"] == 0
            assert len(row[f"{place}_per_iter"]["times_us"]) == 3
        assert row["ratio"] > 0 and (row["backend"] != "gloo" or row["ratio"] == 1)
    assert document["config"]["backends"]["native"].startswith("runtime native, kernels ")
    table = capfd.readouterr().out.splitlines()
    lines = [line for line in table if not line.startswith("#")]
    assert len(lines) == len(results) and lines[0].split()[:3] == ["1024", "256", "float"]
    assert "# Out of bounds values : 0 OK" in table


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_every_collective_with_and_without_compression(collective: str) -> None:
    report = measure_on_warm_ranks(
        f"{collective} -b 90K -e 90K --backend native,gloo --codec none --codec int8 -d float,bfloat16",
        nproc=3,
    )
    assert len(report.rows) == 2 * 3 and report.wrong == 0
    for row in report.rows:
        assert (row.in_place is None) == COLLECTIVES[collective].needs_two_tensors
        for place in filter(None, (row.out_of_place, row.in_place)):
            assert place.check is not None and place.check.wrong == 0
            error = place.check.mean_error
            assert (error is not None and 0 < error < 0.02) if row.variant.codec == "int8" else error is None
        assert (row.wire_bytes is None) == (row.variant.backend == "gloo")
    none, int8 = (row.wire_bytes for row in report.rows[:2])
    assert none is not None and int8 is not None and 0 < int8 < 0.3 * none


def test_every_dtype_and_operator() -> None:
    report = measure_on_warm_ranks(
        "all_reduce -b 4000 -e 4000 -d all -o all --codec none --codec fp16", nproc=3
    )
    assert report.wrong == 0
    assert len({(row.datatype, row.op) for row in report.rows}) == 8 * 4 - 4  # integers have no average


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_group_backend_sends_the_bytes_of_the_native_engine(collective: str) -> None:
    report = measure_on_warm_ranks(
        f"{collective} -b 90K -e 90K --backend process_group,native --codec none --codec int8"
    )
    assert report.wrong == 0 and len(report.rows) == 4
    assert report.backends["process_group"].startswith("runtime process_group")
    wire = {str(row.variant): row.wire_bytes for row in report.rows}
    for codec in ("none", "int8"):
        assert wire[f"process_group {codec} auto"] == wire[f"native {codec} auto"]


def test_less_common_options() -> None:
    report = measure_on_warm_ranks("broadcast -b 8K -e 8K -r all -m 6 -z 1 -C -O 0 -N 2 --algorithm ring")
    assert [row.root for row in report.rows] == [0, 1, 0, 1]
    assert all(row.out_of_place is None and wrong_counts(row) == [0] for row in report.rows)
    assert report.ranks[0].device.startswith("cpu any of")


def test_sizes_beyond_the_memory_are_skipped_with_a_warning() -> None:
    report = measure_on_warm_ranks("all_reduce -b 1K -e 1024G -f 1073741824")
    assert [row.size for row in report.rows] == [1024]
    assert "are left out" in report.warnings[0]
    with pytest.raises(ValueError, match="-b 1099511627776: sizes over"):
        measure_on_warm_ranks("all_reduce -b 1024G -e 1024G")


def test_single_rank_sends_nothing() -> None:
    (row,) = measure_on_warm_ranks("all_reduce -b 8K -e 8K --codec int8", nproc=1).rows
    assert row.wire_bytes == 0 and wrong_counts(row) == [0, 0]


def test_inputs_are_refilled_before_sums_overflow() -> None:
    for flags in ("-n 40 -w 40", "-n 9 -w 0 -m 8"):
        report = measure_on_warm_ranks(
            f"all_reduce -b 4K -e 4K -d half {flags} --backend tests.ranks.cli.backends:StaysFinite", nproc=3
        )
        timing = report.rows[0].primary.timing
        assert report.wrong == 0 and len(timing.iterations) == int(flags.split()[1])


def test_wrong_values_fail_the_command(tmp_path: Path) -> None:
    document = perf(
        tmp_path, "all_reduce -b 4K -e 4K --backend tests.ranks.cli.backends:OffByOne -c 3", status=1
    )
    row = document["results"][0]
    assert (row["out_of_place"]["nwrong"], row["in_place"]["nwrong"]) == (3, 3)
    assert document["out_of_bounds"] == {"count": 6, "okay": False}


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_wrong_values_are_counted(collective: str) -> None:
    root = "-r 1" if COLLECTIVES[collective].rooted else ""  # the faulty rank must have an output
    (row,) = measure_on_warm_ranks(
        f"{collective} -b 4K -e 4K {root} --backend tests.ranks.cli.backends:OffByOne"
    ).rows
    assert wrong_counts(row) == [1] * len(wrong_counts(row)) and wrong_counts(row)


OWN_ALGORITHM = """
import dtcomm
from dtcomm.schedule import Builder


def star(ranks):
    builder = Builder("all_reduce", ranks, chunks=1)
    for rank in range(1, ranks):
        builder.chunk(0).at(rank).reduce_to(0)
    for rank in range(1, ranks):
        builder.chunk(0).at(0).copy_to(rank)
    return builder.build()


dtcomm.algorithms.register("star", "all_reduce", star)
"""


@pytest.mark.slow
def test_algorithm_of_an_imported_module_is_measured(tmp_path: Path) -> None:
    (tmp_path / "own_algorithms.py").write_text(OWN_ALGORITHM)
    file = tmp_path / "report.json"
    line = "-b 9K -e 9K -n 3 -w 1 --nproc 3 --codec int8 --algorithm ring,star --import own_algorithms --json"
    command = [sys.executable, "-m", "dtcomm", "perf", "all_reduce", *line.split(), str(file)]
    subprocess.run(command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True, timeout=60)
    rows = json.loads(file.read_text())["results"]
    assert [row["algorithm"] for row in rows] == ["ring", "star"]
    assert all(row["in_place"]["nwrong"] == 0 for row in rows)


def test_wrong_import_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    (tmp_path / "takes_a_name.py").write_text(
        "import dtcomm\ndtcomm.algorithms.register('ring', 'reduce', print)"
    )
    for module, message in (
        ("no_such_module", "--import no_such_module: No module named 'no_such_module'"),
        ("takes_a_name", "--import takes_a_name: name: 'ring' is taken"),
    ):
        with pytest.raises(SystemExit):
            parse(["all_reduce", "--import", module])
        assert message in capsys.readouterr().err


def test_wrong_values_are_not_counted_without_checks() -> None:
    (row,) = measure_on_warm_ranks(
        "all_reduce -b 4K -e 4K --backend tests.ranks.cli.backends:OffByOne -c 0"
    ).rows
    assert wrong_counts(row) == [None, None]


@pytest.mark.parametrize("backend", ["LosesRank1", "DiffersByABit"])
def test_lossy_results_outside_the_error_bound_are_wrong(backend: str) -> None:
    name = f"tests.ranks.cli.backends:{backend}"
    report = measure_on_warm_ranks(f"all_reduce -b 64K -e 64K -O 0 --codec int8 --backend {name}")
    assert report.wrong > 16384 * 0.8


def test_failed_rank_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    line = "perf all_reduce -b 1K -e 1K -n 3 -w 1 --backend tests.ranks.cli.backends:Raises"
    assert main(line.split()) == 2
    errors = capfd.readouterr().err
    assert "rank 1 raised OSError: the cable is out" in errors
    assert errors.endswith("dtcomm perf: the cable is out\n")


def test_root_outside_the_group_is_refused() -> None:
    with pytest.raises(ValueError, match="-r 7: there are only 2 ranks"):
        measure_on_warm_ranks("broadcast -r 7")


def test_json_is_the_only_output_on_stdout(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["perf", "all_reduce", "-b", "1K", "-e", "1K", *QUICK, "--json", "-"]) == 0
    output = capfd.readouterr()
    assert json.loads(output.out)["results"][0]["size"] == 1024
    assert output.err == ""


@pytest.mark.slow
def test_ranks_of_torchrun_are_used(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3", "-m"]
    command += ["dtcomm", "perf", "all_gather", "-b", "3K", "-e", "3K", *QUICK, "--json", str(file)]
    command += ["--device", "cpu"]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    completed = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)
    assert completed.returncode == 0, completed.stderr
    document = json.loads(file.read_text())
    assert document["config"]["ranks"] == 3 and document["results"][0]["size"] == 3072
    assert completed.stdout.count("Collective test starting") == 1


def test_comparison_with_peers_is_reported_and_plotted(tmp_path: Path) -> None:
    file = tmp_path / "picture.png"
    document = perf(
        tmp_path, f"broadcast -b 4K -e 32K -f 8 --codec none,int8:block=64 --compare gloo --plot {file}"
    )
    for row in document["results"]:
        assert set(row["ratios"]) == {"gloo"} and row["ratios"]["gloo"]
    assert file.read_bytes().startswith(b"\x89PNG") and file.stat().st_size > 10_000


def test_plot_lines_are_named_by_what_differs() -> None:
    report = measure_on_warm_ranks("all_reduce -b 1K -e 2K -f 2 --codec none,int8 --backend native,gloo")
    lines = [(name, len(rows)) for name, rows in plot_lines(report).items()]
    assert lines == [("dtcomm none", 2), ("dtcomm int8", 2), ("gloo", 2)]
