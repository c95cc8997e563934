"""Processes that are killed: an engine, a trainer while it publishes, a command while it writes a checkpoint."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import torch

from dtcomm.extensions.weights import Publisher, Subscriber, diff

ROOT = Path(__file__).parents[4]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}

# The process kills itself when a function is called for the nth time.
KILL_AT = """
import os, sys, torch
from dtcomm.extensions.weights import Publisher, Subscriber, patch, store
def kill_at(owner, name, count):
    original, calls = getattr(owner, name), iter(range(10**6))
    def call(*arguments, **options):
        if next(calls) == count:
            os.kill(os.getpid(), 9)
        return original(*arguments, **options)
    setattr(owner, name, call)
"""


def run_killed(program: str, *arguments: str) -> None:
    command = [sys.executable, "-c", KILL_AT + program, *arguments]
    done = subprocess.run(command, env=ENVIRONMENT, timeout=120, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr


def weights(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {f"layer{i}": torch.randn(100, 100, generator=generator).bfloat16() for i in range(4)}


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in other)


def test_the_example_follows_to_the_bit() -> None:
    command = [sys.executable, "examples/rl_weight_sync.py", "--steps", "3", "--width", "32"]
    done = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, timeout=240, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_publisher_that_is_killed_leaves_the_last_version(tmp_path: Path) -> None:
    program = """
w = {f"layer{i}": torch.ones(100, 100).bfloat16() for i in range(4)}
publisher = Publisher(w, sys.argv[1], part_bytes=1)
publisher.publish()
for tensor in w.values():
    tensor += 1
kill_at(store.DirectoryStore, "put", int(sys.argv[2]))
publisher.publish()
"""
    for count in (0, 2, 4):  # before the first patch, between two patches, before the index
        folder = tmp_path / str(count)
        run_killed(program, str(folder), str(count))
        engine = weights(0)
        follower = Subscriber(engine, folder)
        assert follower.update() == 0
        assert all(bool((tensor == 1).all()) for tensor in engine.values())
        assert Publisher(weights(3), folder).publish() == 1 == follower.update()
        assert equal(engine, weights(3))


def test_an_engine_that_is_killed_in_a_commit_catches_up(tmp_path: Path) -> None:
    trainer = Publisher(tensors := weights(0), tmp_path)
    trainer.publish()
    for tensor in tensors.values():
        tensor += 1
    trainer.publish()
    program = """
w = {f"layer{i}": torch.zeros(100, 100).bfloat16() for i in range(4)}
kill_at(patch.Weights, "_write", 2)
Subscriber(w, sys.argv[1]).update()
"""
    run_killed(program, str(tmp_path))
    engine = weights(7)
    assert Subscriber(engine, tmp_path).update() == 1
    assert equal(engine, tensors)


def test_a_command_that_is_killed_leaves_the_old_file(tmp_path: Path) -> None:
    old, new = weights(0), weights(1)
    checkpoint, patch = tmp_path / "old.pt", tmp_path / "patch"
    torch.save(old, checkpoint)
    patch.write_bytes(diff(old, new))
    program = """
from dtcomm.extensions.weights import command
kill_at(*((patch.Weights, "_write", 2) if sys.argv[3] == "apply" else (command.Path, "replace", 0)))
command.main(["apply", sys.argv[1], sys.argv[2]])
"""
    for where in ("apply", "rename"):
        run_killed(program, str(checkpoint), str(patch), where)
        assert equal(torch.load(checkpoint), old)
    done = [sys.executable, "-m", "dtcomm", "weights", "apply", str(checkpoint), str(patch)]
    subprocess.run(done, env=ENVIRONMENT, timeout=120, check=True, capture_output=True)
    assert equal(torch.load(checkpoint), new)
