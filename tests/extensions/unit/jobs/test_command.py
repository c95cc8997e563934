"""``dtcomm plan``."""

import json
import re
import shlex
from pathlib import Path

import pytest

from dtcomm.extensions.jobs.command import COMMANDS, main

PLAN = "collective all_reduce --system h100 --hosts 2 --per-host 8 -b 1M -e 8G -f 8 --codec int8".split()


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


def printed(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(list(argv)) == 0
    return capsys.readouterr().out


def test_printed_tables_and_verdicts(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, *PLAN)
    assert "nvls_tree" in text and "verdict: on this system int8 pays from" in text
    assert "GPU kernels are assumed to reach 80%" in text and "neither has been measured" in text
    assert re.search(r"\d\.\d+ ms", text) and re.search(r"\d\.\d us", text)
    text = printed(capsys, "collective", "-e", "1M")
    assert "on the local engine int8 is not faster than none" in text


def test_a_verdict_agrees_with_its_table(capsys: pytest.CaptureFixture[str]) -> None:
    argv = "collective reduce_scatter --system h100 --hosts 8 --codec int8 -d bfloat16".split()
    plan = plan_as_json(capsys, *argv)
    paying = [row["size"] for row in plan["results"] if row["codec"] == "int8" and row["speedup"] > 1.1]
    assert paying == [2**20]  # not at 64 MiB
    assert 2**29 < plan["break_even_bytes"]["int8"] < 2**30
    assert plan["verdicts"][0].startswith("on this system int8 pays at 1 MiB and from ")


STEP = "step --system h100 --hosts 8 --model params=70e9,step_ms=2000,dtype=bf16 --codec int8".split()


def test_a_step_has_one_verdict_which_is_that_of_its_table(capsys: pytest.CaptureFixture[str]) -> None:
    plan = plan_as_json(capsys, *STEP)
    none, int8 = plan["model"]["rows"]
    assert plan["dtype"] == "bfloat16" and int8["speedup"] < 1
    # The estimates are those of the step's messages, in its dtype, and the step is computed from them.
    assert {row["size"] for row in plan["results"]} <= {row["size"] for row in plan["model"]["messages"]}
    seconds = {(row["size"], row["codec"]): row["time_us"] / 1e3 for row in plan["results"]}
    for row in (none, int8):
        total = sum(seconds[m["size"], row["codec"]] * m["count"] for m in plan["model"]["messages"])
        assert total == pytest.approx(row["communication_ms"], rel=1e-4)
    text = printed(capsys, *STEP)
    assert (
        text.count("verdict: no codec pays") == text.count("verdict:") == 1
        and f"int8 {int8['speedup']:.2f}x" in text
    )


def test_a_step_whose_communication_is_hidden_needs_no_codec(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["step", "--system", "h100", "--hosts", "8", "--model", "1B,step_ms=10000,dtype=bf16"]
    plan = plan_as_json(capsys, *argv)
    assert [row["speedup"] for row in plan["model"]["rows"]] == [1, 1]
    (verdict,) = plan["verdicts"]
    assert verdict.startswith("no codec pays in this step (int8 1.00x)") and "is hidden" in verdict


def test_a_codec_that_slows_the_step_down(capsys: pytest.CaptureFixture[str]) -> None:
    argv = "step --system h100 --hosts 2 --algorithm two_shot --codec int8 --model 1B,tokens=512".split()
    plan = plan_as_json(capsys, *argv)
    assert plan["model"]["rows"][1]["speedup"] < 0.9
    assert plan["verdicts"][0].endswith("its messages take longer with a codec than without")
    assert {row["algorithm"] for row in plan["results"] if row["codec"] == "int8"} == {"two_shot"}


def test_one_rank_sends_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    for strategy in ("ddp", "fsdp"):
        argv = ["step", strategy, "--system", "h100", "--ranks", "1", "--model", "1B,step_ms=9"]
        plan = plan_as_json(capsys, *argv)
        assert [row["communication_ms"] for row in plan["model"]["rows"]] == [0, 0]
        assert plan["verdicts"][0].endswith("one rank sends nothing")


def test_a_codec_that_pays_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    argv = "step --inside memory --between 10gbit --hosts 4 --per-host 1 --codec int8 --codec int4".split()
    plan = plan_as_json(capsys, *argv, "--model", "100M,step_ms=100")
    rows = {row["codec"]: row for row in plan["model"]["rows"]}
    assert rows["int4"]["speedup"] > rows["int8"]["speedup"] > 1.1
    (verdict,) = plan["verdicts"]
    assert verdict.startswith("int4 pays: ") and f"{rows['int4']['speedup']:.2f}x" in verdict
    assert f"int8 {rows['int8']['speedup']:.2f}x" in verdict


def test_the_guide_shows_the_verdicts_that_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    guide = (Path(__file__).parents[4] / "docs" / "guides" / "planning.md").read_text()
    console = guide.partition("```console\n")[2].partition("```")[0].splitlines()
    commands, verdicts = console[::2], console[1::2]
    assert len(commands) == len(verdicts) > 2
    for command, verdict in zip(commands, verdicts):
        arguments = command.removeprefix("$ dtcomm plan ").split()
        assert verdict in printed(capsys, *arguments).splitlines(), command


def test_devices_by_name_and_by_figures(capsys: pytest.CaptureFixture[str]) -> None:
    lora = ["--model", "7B,tokens=4096,trainable=20M,dtype=bf16"]
    plan = plan_as_json(capsys, "step", "--system", "4090", "--hosts", "4", *lora)
    assert plan["system"]["ranks"] == 4
    assert plan["model"]["gradient_bytes"] == 40e6 and not plan["system"]["device_is_assumed"]
    links = ["step", "--inside", "pcie4", "--between", "10gbit", "--hosts", "4", "--per-host", "1"]
    text = printed(capsys, *links, *lora)
    assert "the device is assumed to be a100 (79 GiB, 312 TFLOP/s)" in text and "--device 4090" in text
    assert "assumed to be" not in printed(capsys, *links, "--device", "4090", *lora)
    figures = "Mine,memory=16G,bf16=100T,bandwidth=600GB"
    own = plan_as_json(capsys, *links, "--device", figures, *lora)
    assert own["system"]["device"] == "mine" and own["system"]["device_memory_bytes"] == 16 * 2**30
    more = plan_as_json(capsys, *links, "--device", "4090,memory=48G", *lora)["system"]
    assert more["device"] == "4090" and more["device_memory_bytes"] == 48 * 2**30


def test_what_is_assumed_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    plan = plan_as_json(capsys, *STEP)
    text = printed(capsys, *STEP)
    assert plan["assumptions"] and all(line in text for line in (*plan["verdicts"], *plan["assumptions"]))


def test_a_step_of_fsdp(capsys: pytest.CaptureFixture[str]) -> None:
    argv = "step fsdp --system a100 --hosts 8 --nics 1 --codec int8".split()
    model = ["--model", "30B,layers=48,tokens=2048,dtype=bf16"]
    plan = plan_as_json(capsys, *argv, *model)
    step = plan["model"]
    assert step["strategy"] == "FSDP"
    assert [(m["collective"], m["count"]) for m in step["messages"]] == [
        ("reduce_scatter", 48),
        ("all_gather", 96),
    ]
    assert {m["size"] for m in step["messages"]} == {30e9 / 48 * 2}
    none, int8 = step["rows"]
    assert (none["residual_bytes"], int8["residual_bytes"]) == (0, 0)  # as in dtcomm.fsdp.compress
    # Without a codec each of the three collectives moves the same bytes, so that codecs for all gain more.
    compressed = plan_as_json(capsys, *argv, *model, "--parameters", "fp8_e4m3")["model"]["rows"]
    assert [(row["codec"], row["parameters"]) for row in compressed] == [
        ("none", "none"),
        ("none", "fp8_e4m3"),
        ("int8", "fp8_e4m3"),
    ]
    assert compressed[0]["step_ms"] == none["step_ms"]
    assert 1 < int8["speedup"] < compressed[1]["speedup"] < compressed[2]["speedup"]
    text = printed(capsys, *argv, *model)
    assert "all_gather" in text and "layers=" in text and "int8 pays: " in text


def test_flops_and_mfu_give_the_time_of_computing(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["step", "--system", "H100", "--hosts", "2", "--model"]
    step = plan_as_json(capsys, *argv, "params=7B,tokens=8K,mfu=0.5,dtype=bf16")["model"]
    assert step["flops"] == 6 * 7e9 * 8000
    assert step["rows"][0]["compute_ms"] == pytest.approx(6 * 7e9 * 8000 / (0.5 * 989.4e12) * 1e3, rel=1e-5)
    for row in step["rows"]:
        assert row["mfu"] == pytest.approx(0.5 * row["scaling_efficiency"], abs=1e-4)
    slower = plan_as_json(capsys, *argv, "7e9,tokens=8000,dtype=bf16")  # an MFU of 0.4
    assert slower["model"]["rows"][0]["compute_ms"] == pytest.approx(
        step["rows"][0]["compute_ms"] * 5 / 4, rel=1e-5
    )
    assert "MFU of 40%" in slower["model"]["computing"]
    assert any("typical" in line for line in slower["assumptions"])
    times = {
        compute: plan_as_json(capsys, *argv, f"1B,tokens=1000,{compute}")["model"]["rows"][0]["compute_ms"]
        for compute in ("compute=bf16", "compute=tf32", "compute=fp32", "dtype=fp32")
    }
    assert times["compute=bf16"] < times["compute=tf32"] == times["dtype=fp32"] < times["compute=fp32"]


def test_prediction_of_a_model_on_a_slow_link(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["step", "--inside", "memory", "--between", "1gbit", "--hosts", "2", "--per-host", "1"]
    argv += ["--codec", "none,int8,int2", "--model", "params=1e7,step_ms=50,dtype=bf16"]
    none, int8, int2 = plan_as_json(capsys, *argv)["model"]["rows"]
    assert none["scaling_efficiency"] < int8["scaling_efficiency"] < 1
    assert int8["speedup"] > 1.5
    assert [row["residual_bytes"] for row in (none, int8, int2)] == [0, 0, 4e7]


def test_communication_takes_time_of_the_cores_that_compute(capsys: pytest.CaptureFixture[str]) -> None:
    argv = "step --inside memory --between 10gbit --hosts 2 --per-host 2 --codec int8".split()
    argv += ["--model", "params=1e7,step_ms=500"]

    def step_ms(*more: str) -> float:
        return plan_as_json(capsys, *argv, *more)["model"]["rows"][1]["step_ms"]

    # With much computing the link is hidden, but not what communication takes of the cores.
    shared, one_each, many = step_ms("--cores", "1"), step_ms(), step_ms("--cores", "64")
    assert one_each == step_ms("--cores", "2")
    assert shared - 500 > 1.5 * (one_each - 500) > 3 * (many - 500) > 0
    plan = plan_as_json(capsys, *argv, "--cores", "8")
    assert any(
        "a rank has 4 cores for it and for computing (--cores)" in line for line in plan["assumptions"]
    )
    gpus = plan_as_json(capsys, *STEP)
    assert not any("of a core" in line for line in gpus["assumptions"])


def test_sharded_steps_wait_for_cores_too(capsys: pytest.CaptureFixture[str]) -> None:
    argv = "step fsdp --inside memory --between 10gbit --hosts 2 --per-host 1 --codec int4".split()
    argv += ["--model", "params=1e7,layers=10,step_ms=500", "--parameters", "int4"]
    one, many = (
        plan_as_json(capsys, *argv, "--cores", cores)["model"]["rows"][1]["step_ms"] for cores in ("1", "64")
    )
    assert one > many + 5


def test_systems_from_files_links_and_rank_counts(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "rack.json"
    path.write_text(
        '{"device": "b200", "inside": "nvlink5", "between": "xdr", "hosts": 3, "per_host": 4, "nics": 4}'
    )
    assert plan_as_json(capsys, "collective", "--topology", str(path))["system"]["ranks"] == 12
    for line, hosts in (
        ("--inside nvlink4 --between 400gbit --ranks 32", 4),
        ("--system a100 --ranks 64", 8),
    ):
        assert plan_as_json(capsys, "collective", *line.split())["system"]["hosts"] == hosts


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("collective --system h300", "argument --system: 'h300' is not one of a100, h100, h200, b200, v100"),
        ("collective --system H-100", "did you mean 'h100'?"),
        ("collective allreduce", "is not one of all_reduce, reduce_scatter"),
        ("collective allreduce", "did you mean 'all_reduce'?"),
        ("collective --device H10", "did you mean 'h100'?"),
        ("collective --inside 'wet string'", "--inside: 'wet string' is not one of nvlink2"),
        ("collective --inside nvlink4 --between wire", "--between: 'wire' is not one of nvlink2"),
        ("job --model gpt2 --system h100 --between wire", "--between: 'wire' is not one of"),
        ("collective --codec int8,int9", "codec: unknown codec 'int9'"),
        ("collective --inside nvlink44", "did you mean 'nvlink4'?"),
        ("collective --system h100 --inside nvlink4", "--system and --inside: give one of them"),
        ("collective --system h100 --ranks 12", "--ranks 12: does not divide into hosts of 8"),
        ("collective --between 10gbit --ranks 8", "--between 10gbit: all 8 ranks are on one host"),
        ("step --codec powersgd --model 7B,step_ms=1", "--codec powersgd: not modelled"),
        ("collective --system h100 --cores 8", "--cores 8: only valid for CPU ranks; the device is h100"),
        ("collective --algorithm rings", "'rings' is not one of auto, all"),
        ("collective --json /no/where.json", "there is no folder /no"),
        ("collective -b 2M -e 1M", "-e 1048576: less than -b 2097152"),
        ("collective -d quarter", "argument -d/--datatype: 'quarter' is not one of int8"),
        ("step", "the following arguments are required: --model"),
        (
            "step --model params=7e9",
            "give tokens=, those of a rank in a step (for example 7B,tokens=8192), or step_ms=",
        ),
        ("step --model 7B,tokens=1,step_ms=1", "got both"),
        ("step --model 7B,step_ms=1,mfu=0.3", "mfu: only valid with tokens=, not with step_ms="),
        ("step --model 7B,tokens=1,mfu=40", "mfu: expected over 0 and up to 1, got 40"),
        ("step --model 7B,tokens=8192", "tokens: no peak FLOP/s is known for the device cpu; give step_ms="),
        (
            "step --model params=x,step_ms=1",
            "params: 'x' is not a number of at least 1; valid: 8192, 350M, 70B",
        ),
        ("step --model llama-70b", "7e9; the name of a model stands alone, in `dtcomm plan job`"),
        ("step --model 7B --step_ms 3", "--step_ms: no such flag"),
        (
            "step --model 7B,step_ms=1 --paramters int8",
            "--paramters: no such flag (did you mean '--parameters'?)",
        ),
        ("step --model 70B,token=8192", "'token' is not one of params, tokens, step_ms"),
        ("step --model 70B,token=8192", "did you mean 'tokens'?"),
        ("step --model 70B,step_ms=1,dtype=bf61", "dtype: 'bf61' is not one of fp32, float, float32, bf16"),
        ("step --model layers=3", "no params="),
        ("step --model 1,2", "'2': expected KEY=VALUE"),
        ("step --model 7B,params=7B", "params: given twice"),
        ("step broadcast --model 7B,step_ms=1", "'broadcast' is not one of ddp, fsdp"),
        ("step --parameters int8 --model 7B,step_ms=1", "valid: dtcomm plan step fsdp --parameters"),
        ("step fsdp --model 7B,step_ms=1 --algorithm ring", "--algorithm: not valid with fsdp"),
        (
            "step --model 70B,step_ms=1,bucket=1K",
            "give a larger bucket=, so that there are at most 1,000,000",
        ),
        ("collective --topology /nowhere.json", "argument --topology: /nowhere.json: there is no such file"),
        ("collective --sites 2", "dtcomm plan collective: error: --sites: no such flag"),
        ("stp", "argument COMMAND: invalid choice: 'stp'"),
        ("--hosts=2", "the following arguments are required: COMMAND"),
    ],
)
def test_wrong_arguments_are_refused(argv: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(shlex.split(argv))
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_a_command_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    text = capsys.readouterr().err
    for name in COMMANDS:
        assert re.search(rf"^    {name}\s+\w.*$", text, re.MULTILINE) and f"\n  dtcomm plan {name} " in text
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    assert capsys.readouterr().out == text


@pytest.mark.parametrize("name", COMMANDS)
def test_help_is_short_and_its_examples_run(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit, match="0"):
        main([name, "--help"])
    text = capsys.readouterr().out
    assert text.count("\n") < 60
    examples = re.findall(rf"^  dtcomm plan ({name} .*)$", text, re.MULTILINE)
    assert examples
    for example in examples:
        assert plan_as_json(capsys, *example.split())["version"] == 1


def test_fsdp_keeps_residuals_of_codecs_that_do_not_converge_without_feedback(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As `dtcomm.fsdp.compress` does by default."""
    argv = ("step", "fsdp", "--system", "h100", "--hosts", "2", "--model", "7B,tokens=8192")
    plan = plan_as_json(capsys, *argv, "--codec", "int8", "--codec", "int2", "--codec", "topk")
    residuals = {row["codec"]: row["residual_bytes"] for row in plan["model"]["rows"]}
    assert residuals["none"] == residuals["int8"] == 0
    assert residuals["int2"] == residuals["topk"] == 4 * 7e9
