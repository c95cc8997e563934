"""``dtcomm tune``: the table that it writes, and how ranks use it."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import dtcomm
from dtcomm import env, planner
from dtcomm.cli import tune as tune_command
from dtcomm.cli.tune.measure import (
    BenchmarkCase,
    CaseSamples,
    GroupResult,
    _by_collective_and_codec,
    first_faster,
    lower_quartile,
    measure_sums,
)
from dtcomm.launch.ranks import run_ranks
from dtcomm.runtime.communicator import get_communicator
from tests.ranks.cli.test_perf import OWN_ALGORITHM, ROOT

QUICK = ["--nproc", "2", "--seconds", "0.5", "--collective", "all_reduce", "-e", "16K"]


def test_tune_writes_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "tune.json"
    assert tune_command.main([*QUICK, "--codec", "none", "--output", str(path)]) == 0
    assert f"algorithm='auto' uses it in jobs with DTCOMM_TUNE={path}" in capsys.readouterr().out
    document = json.loads(path.read_text())
    assert {row["algorithm"] for row in document["measured"]} >= {"ring", "tree", "one_shot", "two_shot"}
    assert all(seconds > 0 for row in document["measured"] for _, seconds in row["points"])
    assert dict(document["rates"])["int8"]["encode"] > 0 and document["inside"]["bandwidth"] > 0


@pytest.mark.slow
def test_tune_measures_the_algorithm_of_an_imported_module(tmp_path: Path) -> None:
    (tmp_path / "own_algorithms.py").write_text(OWN_ALGORITHM)
    path = tmp_path / "tune.json"
    line = ["-m", "dtcomm", "tune", *QUICK, "--import", "own_algorithms", "--output", str(path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, *line], cwd=tmp_path, env=environment, check=True, timeout=60)
    assert "star" in {row["algorithm"] for row in json.loads(path.read_text())["measured"]}


def row(name: str = "ring", *, ranks: int = 2, seconds: float = 1.0) -> planner.Measured:
    kind: dict[str, Any] = {"collective": "all_reduce", "codec": "none", "hosts": 1}
    return planner.Measured(**kind, algorithm=name, ranks=ranks, points=((1024, seconds),))


def test_merge_keeps_rows_that_were_not_measured_again() -> None:
    limits = [("int8", ranks, 1, 1 << 20) for ranks in (7, 2)]
    earlier = planner.Table(measured=(row(ranks=7), row(), row("tree")), compress_from=tuple(limits))
    measured = (row(seconds=2.0),)
    slower = (("int8", 2, 1, math.inf),)
    result = GroupResult(ranks=2, hosts=1, measured=measured, rates=(), links={}, compress_from=slower)
    merged = tune_command._merged(earlier, [result])
    assert merged.measured == (row(ranks=7), row(seconds=2.0))
    assert merged.compress_from == (limits[0], *slower)
    assert planner.parse(json.dumps(merged.as_dict())) == merged


@pytest.mark.parametrize(
    ("coded", "first"), [([9, 9, 1, 1], 4), ([1, 9, 1, 1], 4), ([1, 1, 1, 1], 1), ([1, 1, 1, 5], math.inf)]
)
def test_a_codec_pays_from_where_it_is_faster_at_all_larger_sizes(coded: list[int], first: float) -> None:
    assert first_faster([1, 2, 4, 8], [5, 5, 5, 5], coded) == first


def measure_on_cpu(rank: int, ranks: int) -> tuple[tuple[str, int, int, float], ...]:
    return measure_sums(["none", "int8", "int4"], 256 * 1024, 1, torch.device("cpu"))


def test_sums_of_activations_are_measured_alike_on_all_ranks() -> None:
    first, second = run_ranks(measure_on_cpu, 2)
    assert first == second and [codec for codec, *_ in first] == ["int8", "int4"]
    for _, ranks, hosts, size in first:
        assert (ranks, hosts) == (2, 1) and size in (math.inf, 64 * 1024, 128 * 1024, 256 * 1024)


def test_a_curve_has_the_lower_quartile_of_each_size_that_was_sampled() -> None:
    assert [lower_quartile(range(count)) for count in (1, 4, 5, 8, 9)] == [0, 0, 1, 1, 2]
    codec, names = dtcomm.codec("none"), ("ring",)
    samples = [
        CaseSamples(
            case=BenchmarkCase(collective="all_reduce", codec=codec, nbytes=nbytes, algorithms=names),
            medians=medians,
        )
        for nbytes, medians in ((1, {"ring": [9.0, 1.0]}), (2, {"ring": [3.0]}), (4, {}))
    ]
    assert _by_collective_and_codec(samples) == {("all_reduce", "none"): {"ring": [(1, 1.0), (2, 3.0)]}}


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--nproc 1", "--nproc 1: expected at least 2 ranks"),
        ("--seconds 0", "--seconds 0: expected more than 0"),
        ("--codec int9", "unknown codec 'int9'"),
        ("-e 12", "12: expected at least 1K bytes"),
        ("-o /none/x.json", "--output /none/x.json: there is no folder /none"),
        ("-o /", "--output /: is a folder"),
    ],
)
def test_invalid_arguments_are_refused(argv: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        tune_command.main(argv.split())
    assert message in capsys.readouterr().err


def test_a_file_that_is_no_table_is_not_overwritten(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "notes.json"
    path.write_text('{"version": 0}')
    assert tune_command.main([*QUICK, "--codec", "none", "--output", str(path)]) == 2
    assert "cannot be read: version 0" in capsys.readouterr().err
    assert path.read_text() == '{"version": 0}'


def write_table(path: Path, fastest: str) -> Path:
    """Write a table in which ``fastest`` is a second faster than the others."""
    points = {
        name: ((1024, 1.0 if name == fastest else 2.0),) for name in ("ring", "tree", "one_shot", "two_shot")
    }
    kind: dict[str, Any] = {"collective": "all_reduce", "codec": "none", "ranks": 2, "hosts": 1}
    measured = [planner.Measured(**kind, algorithm=name, points=pairs) for name, pairs in points.items()]
    path.write_text(json.dumps(planner.Table(source="a test", measured=tuple(measured)).as_dict()))
    return path


def choose_algorithm(rank: int, world_size: int, tables: dict[int, str]) -> tuple[str, float]:
    os.environ["DTCOMM_TUNE"] = tables[rank]
    tensor = torch.full((512,), rank + 1.0)
    dtcomm.all_reduce(tensor, algorithm="auto")
    communicator = get_communicator(None)
    assert dtcomm.info()["table"] == ("dtcomm's own constants" if tables[0] == "off" else "a test")
    dtcomm.release()
    table = planner.parse(communicator.tuning_table)
    decision = planner.explain("all_reduce", 512, torch.float32, dtcomm.codec("none"), 2, table=table)
    return decision.algorithm, float(tensor[0])


def test_all_ranks_use_the_table_of_rank_zero(tmp_path: Path) -> None:
    first, second = write_table(tmp_path / "a.json", "tree"), write_table(tmp_path / "b.json", "ring")
    assert run_ranks(choose_algorithm, 2, {0: str(first), 1: str(second)}) == [("tree", 3.0)] * 2
    assert run_ranks(choose_algorithm, 2, {0: "off", 1: str(second)}) == [("one_shot", 3.0)] * 2


def test_table_is_read_from_the_cache_or_the_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("DTCOMM_TUNE")
    assert env.tune_file().parent == tmp_path / "dtcomm"
    assert env.tune_text() == ""
    env.tune_file().parent.mkdir()
    table = json.dumps(planner.Table().as_dict())
    env.tune_file().write_text(table)
    assert env.tune_text() == table
    for damaged in ("", table[:40], "[]", '{"version": 0}'):
        env.tune_file().write_text(damaged)
        caplog.clear()
        assert env.tune_text() == ""
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        assert str(env.tune_file()) in caplog.text
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")  # as a HOME that is no folder
    assert env.tune_text() == ""
    monkeypatch.setenv("DTCOMM_TUNE", "off")
    assert env.tune_text() == ""
    monkeypatch.setenv("DTCOMM_TUNE", str(tmp_path / "none.json"))
    with pytest.raises(ValueError, match=r"DTCOMM_TUNE=.*none\.json: .*No such file"):
        env.tune_text()
