"""Every script of examples/ is short, runs on two ranks, and prints what it promises.

torchrun starts one of them on one host, and one on two; the others run in forked processes, which have imported torch.
The notebook's cells run in order, in one process that starts ranks.
"""

from __future__ import annotations

import json
import os
import re
import runpy
import socket
import subprocess
import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest

from dtcomm.launch.ranks import run_ranks

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node"]

#: Scripts with 80 lines and more, and why.
LONG = {
    "moe": "a layer to be copied, with router and losses",
    "tp_blocks": "two blocks to be copied",
    "train_gpt_mesh": "all kinds of parallelism on one mesh",
    "rl_weight_sync": "a trainer, a server and engines in one program",
}
#: Scripts that other tests run: tests/ranks/tp, tests/ranks/mesh and tests/extensions/ranks/weights.
ELSEWHERE = {"tp_blocks", "train_gpt_mesh", "rl_weight_sync"}
NAMES = sorted(path.stem for path in EXAMPLES.glob("*.py"))
LOSS = re.compile(r"\bloss\b[': ]+(\d+\.\d+)")


def start(command: list[str], **environment: str) -> subprocess.Popen[str]:
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return subprocess.Popen(
        command,
        env={**os.environ, "PYTHONPATH": path, **environment},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def outputs(*processes: subprocess.Popen[str]) -> list[str]:
    """Wait for the processes and return what they printed."""
    try:
        printed = [process.communicate(timeout=300) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (_, errors) in zip(processes, printed):
        assert process.returncode == 0, errors
    return [out for out, _ in printed]


def free_port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def torchrun(name: str) -> str:
    return outputs(start([*TORCHRUN, "2", "--standalone", f"examples/{name}.py"]))[0]


def run_script(rank: int, ranks: int, name: str, arguments: tuple[str, ...]) -> str:
    """Run a script as a rank that torchrun has started; return what it printed."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    sys.argv = [str(EXAMPLES / f"{name}.py"), *arguments]
    with redirect_stdout(StringIO()) as printed:
        runpy.run_path(sys.argv[0], run_name="__main__")
    return printed.getvalue()


def on_ranks(name: str, *arguments: str) -> str:
    place = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": free_port(),
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
    }
    printed = run_ranks(run_script, 2, name, arguments, backend=None, fresh=True, env=place, timeout=300)
    return "".join(printed)


def on_two_hosts(name: str) -> str:
    """Run the script as its docstring says: an agent for each emulated host."""
    place = ["--master-addr", "127.0.0.1", "--master-port", free_port()]
    link = "inside=400gbit,2us;between=200mbit,50us"
    agents = [
        start(
            [*TORCHRUN, "1", "--nnodes", "2", "--node-rank", str(host), *place, f"examples/{name}.py"],
            DTCOMM_HOST_ID=f"host{host}",
            DTCOMM_EMULATE_LINK=link,
            OMP_NUM_THREADS="1",
        )
        for host in range(2)
    ]
    return "".join(outputs(*agents))


def losses(printed: str) -> list[float]:
    return [float(loss) for loss in LOSS.findall(printed)]


@pytest.mark.parametrize("name", NAMES)
def test_an_example_is_short_and_can_be_copied_alone(name: str) -> None:
    text = (EXAMPLES / f"{name}.py").read_text(encoding="utf-8")
    assert (len(text.splitlines()) < 80) == (name not in LONG)
    code = text.split('"""', 2)[2]
    assert name in LONG or not re.search(r"^\s*(?:from|import) (?:examples|tests|dtcomm\.cli)\b", code, re.M)
    assert text.startswith('"""') and ("torchrun" in text or name in ELSEWHERE)
    assert f"({name}.py)" in (EXAMPLES / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "name", [name for name in NAMES if name not in {*ELSEWHERE, "backend", "tensor_parallel"}]
)
def test_the_loss_falls_and_the_report_has_a_verdict(name: str) -> None:
    if name.startswith("hf_"):
        pytest.importorskip(name.replace("hf_trainer", "transformers").removeprefix("hf_"))
    printed = {"ddp": torchrun, "two_hosts": on_two_hosts}.get(name, on_ranks)(name)
    course = losses(printed)
    assert len(course) >= 4 and course[-1] < 0.8 * course[0], printed
    assert name == "moe" or printed.count("\n  verdict ") == 1, printed
    assert name != "two_hosts" or "left this host" in printed


def test_tensor_parallelism_generates_the_tokens_of_the_whole_model() -> None:
    pytest.importorskip("transformers")
    printed = on_ranks("tensor_parallel")
    error, ours, theirs = re.search(
        r"differ by ([\d.]+)%; tokens \[(.*)\], uncompressed \[(.*)\]", printed
    ).groups()  # type: ignore[union-attr]
    assert 0 < float(error) < 5 and ours == theirs and "\n  verdict " in printed


def test_the_backend_gives_the_losses_of_gloo() -> None:
    ours, theirs = (on_ranks("backend", backend) for backend in ("dtcomm", "gloo"))
    assert losses(ours) == pytest.approx(losses(theirs), rel=1e-4) and len(losses(ours)) == 4
    assert "native" in ours


def test_the_cells_of_the_notebook_run() -> None:
    cells = json.loads((EXAMPLES / "dtcomm.ipynb").read_text(encoding="utf-8"))["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    program = "import json, sys\nfor cell in json.loads(sys.argv[1]): exec(compile(cell, 'cell', 'exec'), globals())"
    printed = outputs(start([sys.executable, "-c", program, json.dumps(code)], MPLBACKEND="agg"))[0]
    encoded = {name: float(error) for name, error in re.findall(r"^(\w+) .* error ([\d.]+)%$", printed, re.M)}
    assert encoded["bf16"] < encoded["int8"] < encoded["int4"] < encoded["int3"]
    trained = dict(re.findall(r"^(\w+) .* ms per step, loss ([\d.]+)$", printed, re.M))
    assert trained.keys() == {"none", "int8", "int4"} and all(float(loss) < 2.5 for loss in trained.values())
    assert "\n  verdict " in printed
