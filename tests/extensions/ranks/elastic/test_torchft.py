"""torchft's manager, LocalSGD and DiLoCo over dtcomm's process group; skipped where torchft is not installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip(
    "torchft",
    reason="torchft is not installed: pip install --no-deps torchft, and opentelemetry-api, opentelemetry-sdk and "
    "opentelemetry-exporter-otlp-proto-http",
)
pytestmark = pytest.mark.slow

PARAMETERS = 64 * 64 + 64 + 64 + 1


@pytest.fixture
def lighthouse(request: pytest.FixtureRequest) -> Iterator[str]:
    from torchft.coordination import LighthouseServer

    server = LighthouseServer(bind="127.0.0.1:0", min_replicas=request.param, join_timeout_ms=2000)
    yield server.address()
    server.shutdown()


def run(lighthouse: str, folder: Path, method: str, codec: str, leaves: int = -1) -> list[dict]:
    """The results of two replicas, of which one may leave after two averages."""
    folder = folder / codec
    folder.mkdir()
    files = [folder / f"{rank}.json" for rank in range(2)]
    replicas = []
    for rank, file in enumerate(files):
        command = [
            sys.executable,
            "-m",
            "tests.extensions.ranks.elastic.torchft_replica",
            "--rank",
            str(rank),
        ]
        command += ["--lighthouse", lighthouse, "--method", method, "--codec", codec, "--out", str(file)]
        if rank == leaves:
            command += ["--leave-after", "2"]
        replicas.append(subprocess.Popen(command, env={**os.environ, "DTCOMM_TRANSPORT": "sockets"}))
    for replica in replicas:
        try:
            assert replica.wait(120) == 0
        finally:
            replica.kill()
    return [json.loads(file.read_text()) for file in files]


@pytest.mark.parametrize("lighthouse", [2], indirect=True)
@pytest.mark.parametrize("method", ["localsgd", "diloco"])
def test_replicas_have_the_same_weights_and_send_compressed_bytes(
    lighthouse: str, tmp_path: Path, method: str
) -> None:
    results = {codec: run(lighthouse, tmp_path, method, codec) for codec in ("none", "int8")}
    for first, second in results.values():
        assert first["weights"] == second["weights"] and first["steps"] == second["steps"] >= 3
    exact, compressed = (results[codec][0] for codec in ("none", "int8"))
    assert compressed["wire_bytes"] < 0.4 * exact["wire_bytes"]
    pairs = zip(exact["weights"], compressed["weights"], strict=True)
    assert 0 < max(abs(a - b) for a, b in pairs) < 0.05


@pytest.mark.parametrize("lighthouse", [1], indirect=True)
def test_a_replica_that_leaves_is_left_out(lighthouse: str, tmp_path: Path) -> None:
    stays, leaves = run(lighthouse, tmp_path, "allreduce", "int8", leaves=1)
    assert stays["sums"][:2] == leaves["sums"] == pytest.approx([5.5, 5.5], rel=0.01)  # in int8
    assert stays["sums"][-1] == pytest.approx(1.0, rel=0.01) and stays["sizes"][-1] == 1
