"""The configuration of hosted continuous integration calls what exists, for the versions that are supported."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).parents[2]
TARGETS = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))


@pytest.fixture(scope="module")
def jobs() -> dict[str, Any]:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8"))
    result: dict[str, Any] = workflow["jobs"]
    return result


def commands(jobs: dict[str, Any]) -> list[list[str]]:
    """The words of every command line of every job; + joins targets that run at the same time."""
    lines = [
        line for job in jobs.values() for step in job["steps"] for line in step.get("run", "").split("\n")
    ]
    return [line.replace("+", " ").split() for line in lines if line]


def test_every_target_exists(jobs: dict[str, Any]) -> None:
    called = {word for command in commands(jobs) if command[0] in (".ci/run", "make") for word in command[1:]}
    assert called - TARGETS == set()
    assert {"lint", "docs", "test", "wheels"} <= called
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


def test_every_target_of_a_full_run_is_called(jobs: dict[str, Any]) -> None:
    (default,) = re.findall(
        r"^  set -- (.*)$", (ROOT / ".ci" / "run").read_text(encoding="utf-8"), re.MULTILINE
    )
    called = {word for command in commands(jobs) for word in command[1:] if command[0] == ".ci/run"}
    assert set(default.replace("+", " ").split()) - called <= {"cuda"}, "hosted machines have no nvcc"


def test_the_matrix_is_what_is_supported(jobs: dict[str, Any]) -> None:
    matrix = jobs["tests"]["strategy"]["matrix"]
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert matrix["python"] == re.findall(r'"Programming Language :: Python :: (3\.\d+)"', project)
    assert f'"torch>={matrix["torch"][0]}"' in project
    assert jobs["tests"]["env"]["TORCH"] == "${{ matrix.torch }}"


def test_run_refuses_what_fails() -> None:
    done = subprocess.run(
        [ROOT / ".ci" / "run", "no-such-target"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode != 0 and "no-such-target" in done.stderr


def test_a_version_of_torch_replaces_the_pinned_one(tmp_path: Path) -> None:
    command = ["make", "-n", f"VENV={tmp_path}", "TORCH=2.11", f"{tmp_path}/.requirements.stamp"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    (pins,) = [line for line in done.stdout.replace("\\\n", "").splitlines() if "sed -i" in line]
    subprocess.run(["sh", "-c", pins], cwd=ROOT, check=True)
    text = (tmp_path / "pins" / "requirements.txt").read_text(encoding="utf-8")
    assert "torch==2.11.*\n" in text and text.count("torch==") == 1
