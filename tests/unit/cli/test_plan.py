"""``dtcomm plan``."""

import json
from pathlib import Path

import pytest

from dtcomm.cli.plan.main import main

PLAN = "all_reduce --system h100 --hosts 2 --per-host 8 -b 1M -e 8G -f 8 --codec int8".split()


def plan_as_json(capsys: pytest.CaptureFixture[str], *argv: str) -> dict:
    assert main([*argv, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_json_has_consistent_times_and_bandwidths(capsys: pytest.CaptureFixture[str]) -> None:
    plan = plan_as_json(capsys, *PLAN)
    assert [row["size"] for row in plan["results"][::2]] == [2**20 * 8**index for index in range(5)]
    for row in plan["results"]:
        assert row["collective"] == "all_reduce" and row["codec"] in ("none", "int8")
        assert row["algbw"] == pytest.approx(row["size"] / row["time_us"] / 1e3, rel=1e-3)
        assert row["busbw"] == pytest.approx(row["algbw"] * 15 / 8, rel=1e-3)
    assert plan["results"][-1]["speedup"] > 1.5
    assert set(plan["break_even_bytes"]) == {"int8"}
    assert {row["algorithm"] for row in plan["alternatives"]} > {"ring", "tree", "two_shot"}


def test_printed_tables_and_verdicts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*PLAN, "--model", "params=7e9,step_ms=100"]) == 0
    text = capsys.readouterr().out
    assert "nvls_tree" in text and "scaling" in text and "on this system int8 pays from" in text
    assert main(["-e", "1M"]) == 0
    assert "on the local engine int8 is not faster than none" in capsys.readouterr().out


def test_prediction_of_a_model_on_a_slow_link(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--inside", "memory", "--between", "1gbit", "--hosts", "2", "--per-host", "1"]
    none, int8 = plan_as_json(capsys, *argv, "--model", "params=1e7,step_ms=50,dtype=bf16")["model"]["rows"]
    assert none["scaling_efficiency"] < int8["scaling_efficiency"] < 1
    assert int8["speedup"] > 1.5
    assert (none["residual_bytes"], int8["residual_bytes"]) == (0, 4e7)


def test_a_record_is_replayed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "steps.json"
    bucket = {"bytes": 2**20, "ready_ms": 5, "comm_ms": 2}
    path.write_text(json.dumps({"ranks": 2, "step_ms": 8.4, "rest_ms": 1, "buckets": [bucket]}))
    argv = [
        "--inside",
        "memory",
        "--between",
        "10gbit",
        "--hosts",
        "2",
        "--per-host",
        "1",
        "--record",
        str(path),
    ]
    plan = plan_as_json(capsys, *argv)["record"]
    assert plan["replay_error"] == pytest.approx(8 / 8.4 - 1, abs=1e-4)
    assert "an error of -4.8%" in plan["words"][0]
    assert plan["rows"][1]["speedup"] >= 1


def test_systems_from_files_links_and_rank_counts(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "rack.json"
    path.write_text(
        '{"device": "b200", "inside": "nvlink5", "between": "xdr", "hosts": 3, "per_host": 4, "nics": 4}'
    )
    assert plan_as_json(capsys, "--topology", str(path))["system"]["ranks"] == 12
    assert (
        plan_as_json(capsys, "--inside", "nvlink4", "--between", "400gbit", "--ranks", "32")["system"][
            "hosts"
        ]
        == 4
    )
    assert plan_as_json(capsys, "--system", "a100", "--ranks", "64")["system"]["hosts"] == 8


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--system", "h300"], "invalid choice: 'h300'"),
        (["--inside", "wet string"], "link: 'wet string' is not one of nvlink3"),
        (["--system", "h100", "--inside", "nvlink4"], "--system and --inside: give one of them"),
        (["--system", "h100", "--ranks", "12"], "--ranks 12: does not divide into hosts of 8"),
        (["--codec", "int9"], "codec: unknown codec 'int9'"),
        (["--model", "params=7e9"], "no step_ms="),
        (["--model", "params=x,step_ms=1"], "'params=x': not a value for params"),
        (["--record", "/nowhere.json"], "--record /nowhere.json: there is no such file"),
        (["--plot", "/no/where.png"], "there is no folder /no"),
        (["-b", "2M", "-e", "1M"], "-e 1048576: less than -b 2097152"),
        (["-d", "quarter"], "-d quarter: want one of int8"),
    ],
)
def test_wrong_arguments_are_refused(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(argv)
    assert message in capsys.readouterr().err


def test_unknown_algorithms_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*PLAN, "--algorithm", "rings"]) == 2
    assert "'rings' is not one of auto, all, ring" in capsys.readouterr().err


def test_plot_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "plan.png"
    assert main([*PLAN, "--model", "params=1e9,step_ms=100", "--plot", str(path), "--json"]) == 0
    assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 20_000


def test_memory_of_every_stage(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--system", "h100", "--hosts", "2", "--memory", "params=1e9,layers=10,dtype=bf16"]
    plan = plan_as_json(capsys, *argv)
    assert (plan["ranks"], plan["itemsize"], plan["layers"]) == (16, 2, 10)
    rows = {(row["stage"], row["feedback"], row["delta"]): row for row in plan["results"]}
    assert len(rows) == len(plan["results"]) > 15
    plain = [rows[stage, "none", False]["total"] for stage in ("ddp", "zero-1", "zero-2", "fsdp")]
    assert plain == sorted(plain, reverse=True)
    sharded = rows["fsdp", "none", False]
    assert (sharded["parameters"], sharded["optimizer"]) == (4e9 / 16, 8e9 / 16)
    for stage in ("zero-1", "zero-2", "fsdp"):
        residual_bytes = [
            rows[stage, form, False]["residuals"] for form in ("none", "loco", "int8", "bf16", "fp32")
        ]
        assert residual_bytes == sorted(residual_bytes) and residual_bytes[-1] == 4e9
    assert rows["fsdp", "loco", True]["references"] == 2e9
    assert main(argv) == 0
    text = capsys.readouterr().out
    assert "zero-2" in text and "delta:" in text and "bytes/parameter" in text
    for value, message in (
        ("layers=3", "no params="),
        ("params=0", "not a value"),
        ("params=1,x=2", "is not one of"),
    ):
        with pytest.raises(SystemExit):
            main(["--memory", value])
        assert message in capsys.readouterr().err
