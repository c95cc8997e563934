"""``dtcomm plan job`` and ``dtcomm plan sites``: whole jobs."""

from pathlib import Path

import pytest

from dtcomm.extensions.jobs.command import main
from dtcomm.extensions.jobs.search import FAMILIES
from tests.extensions.unit.jobs.test_command import plan_as_json

MODEL = "--model llama-8b --system H100 --hosts 2 --batch 64"
JOB = f"job {MODEL}"
SITES = f"sites {MODEL} --wan 1gbit"


def test_json_of_a_job(capsys: pytest.CaptureFixture[str]) -> None:
    plan = plan_as_json(capsys, *JOB.split())
    winner = plan["winner"]
    assert plan["model"]["parameters"] == 8_030_261_248 and (plan["batch"], plan["seq"]) == (64, 8192)
    families = [row.pop("family") for row in plan["candidates"]]
    assert winner == plan["candidates"][0] and winner["fits"]
    assert len(families) == len(set(families)) > 2 and set(families) <= set(FAMILIES)
    layout = winner["layout"]
    assert layout["dp"] * layout["tp"] * layout["pp"] * layout["cp"] == 16
    parts = sum(winner[f"{part}_ms"] for part in ("compute", "bubble", "optimizer"))
    parts += sum(winner["exposed_ms"].values())
    assert winner["step_ms"] == pytest.approx(parts, rel=1e-4)
    assert set(winner["exposed_ms"]) == {"dp", "params", "tp", "pp", "cp", "ep"}
    memory = winner["memory"]
    names = ("parameters", "gradients", "optimizer", "residuals", "activations", "buffers")
    assert memory["total"] == pytest.approx(sum(memory[name] for name in names), rel=1e-6)
    assert memory["activations_full"] < memory["activations_kept"]
    assert plan["across_sites"] is None and plan["verdict"].startswith(f"{families[0]}: ")


def test_printed_tables(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(JOB.split()) == 0
    text = capsys.readouterr().out
    for expected in ("winner (*) first", "* ", "communication of the winner", "memory of a rank"):
        assert expected in text
    assert text.count("verdict:") == 1 and "assumed, not measured" in text


def test_fixed_parts_and_a_size_instead_of_a_name(capsys: pytest.CaptureFixture[str]) -> None:
    fixed = "--tp 4 --pp 2 --schedule GPipe --stage zero-1 --recompute full --micro-batch 2 --seq 4096"
    layout = plan_as_json(capsys, *f"{JOB} {fixed}".split())["winner"]["layout"]
    assert (layout["tp"], layout["pp"], layout["dp"], layout["micro_batch"]) == (4, 2, 2, 2)
    assert (layout["schedule"], layout["stage"], layout["recompute"]) == ("gpipe", "zero-1", "full")
    for text in ("params=7B", "7B"):
        plan = plan_as_json(capsys, "job", "--model", text, "--system", "a100", "--hosts", "1")
        assert plan["model"]["parameters"] == pytest.approx(7e9, rel=0.05)


def test_topologies(capsys: pytest.CaptureFixture[str]) -> None:
    wide = (
        "job --model llama-8b --system h100 --hosts 16 --batch 128 --tp 1 --pp 1 --stage ddp --recompute full"
    )
    wide += " --cp 1 --codec none --device b200"
    free, crowded = (
        plan_as_json(capsys, *wide.split(), *more.split())["winner"]["communication_ms"]["dp"]
        for more in ("", "--leaf-hosts 4 --oversubscription 4")
    )
    assert crowded > 2 * free
    pcie = plan_as_json(capsys, *"job --model gpt2-xl --system v100-pcie --hosts 2 --batch 64".split())
    assert pcie["dtype"] == "float16" and pcie["system"]["nics"] == 2


def test_sites(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    argv = f"{SITES} --sites 2 --rtt 100 --every 50".split()
    sites = plan_as_json(capsys, *argv)["across_sites"]
    assert (sites["sites"], sites["rtt_ms"], sites["every"]) == (2, 100, 50)
    assert {method["method"] for method in sites["methods"]} == {"DDP", "DiLoCo", "Streaming DiLoCo"}
    assert {method["codec"] for method in sites["methods"]} == {"none", "int8", "int4"}
    times = [method["step_ms"] for method in sites["methods"]]
    assert times == sorted(times)
    assert main(argv) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert text.index(f"verdict across sites: {sites['verdict']}") < text.index("inside a site: ")
    assert (
        sites["verdict"].startswith(f"{sites['methods'][0]['method']} with ") and text.count("verdict") == 1
    )


def test_a_job_that_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["job", "--model", "llama-405b", "--system", "a100"]) == 1
    text = capsys.readouterr().out
    assert "does not fit: FSDP needs at least" in text and "verdict: no layout fits in 79 GiB of a100" in text


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("job --model lama-70b", "(did you mean 'llama-70b'?), or params=70B for any other size"),
        ("job --model llama-70b", "no peak FLOP/s is known for the device cpu"),
        ("job --model params=10 --system h100", "params: expected at least 1M"),
        (
            "job --model 7B,tokens=8192",
            "tokens=: a key of `dtcomm plan step`; valid for a job: params, layers",
        ),
        ("job --system h100", "the following arguments are required: --model"),
        (f"{JOB} all_reduce", "unrecognized arguments: all_reduce"),
        (f"{JOB} --dtype bf61", "--dtype: 'bf61' is not one of fp32"),
        (f"{JOB} --stage zero-3", "--stage: 'zero-3' is not one of ddp, zero-1, zero-2, fsdp"),
        (f"{JOB} --schedule 1f1", "did you mean '1f1b'?"),
        (f"{JOB} --tp 3", "no layout is possible (fixed: tp=3)"),
        (f"{JOB} --oversubscription 4", "--oversubscription 4: only valid with --leaf-hosts"),
        (f"{JOB} --leaf-hosts 4 --oversubscription 0.5", "--oversubscription: must be at least 1"),
        ("job --model gpt2 --system a100 --seq 2048", "gpt2 has positions for 1024 tokens"),
        ("job --model gpt2 --system v100 --dtype bf16", "'bf16' is not one of fp32, fp16"),
        (f"sites {MODEL}", "the following arguments are required: --wan"),
        (f"{SITES} --sites 3", "--batch 64: does not divide among 3 sites"),
    ],
)
def test_wrong_arguments_are_refused(argv: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(argv.split())
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
