"""Exit of programs whose daemon threads use dtcomm: the exit status is the program's own, and nothing hangs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

# Forks the ranks of each run from a process that has imported torch, and prints their exit codes.
PROGRAM = """
import os, pathlib, signal, sys, threading, time
import torch, torch.distributed as dist
import dtcomm, dtcomm._C

def begin(function, *args):
    threading.Thread(target=function, args=args, daemon=True).start()

def wait(began):  # in the engine, for a call that rank 1 does not make
    tensor = torch.ones(10)
    began.set()
    try:
        dtcomm.all_reduce(tensor)
    except dtcomm.errors.DtcommError as error:
        print(type(error).__name__, file=sys.stderr)

def call(began, group, async_op):  # until the process ends
    tensor = torch.ones(numel)
    began.set()
    while True:
        try:
            work = dtcomm.all_reduce(tensor, group=group, async_op=async_op)
            if async_op:
                work.wait()
        except RuntimeError:
            pass

def make(began, group):  # a communicator, with a rank that does not come
    tensor = torch.ones(10)
    began.set()
    dtcomm.all_reduce(tensor, group=group)

def compute(began):  # in native code at any time
    memory = torch.ones(1 << 22)
    address, size = memory.data_ptr(), memory.nbytes
    began.set()
    while True:
        dtcomm._C.crc32c(address, size, hardware=False)

def run(what, rank, store):
    dist.init_process_group("gloo", rank=rank, world_size=2, init_method=f"file://{store}")
    groups = [dist.new_group([0, 1]) for _ in range(2)]
    dtcomm.all_reduce(torch.ones(10))
    began = [threading.Event() for _ in groups]
    if what == "calls":
        for group in groups:
            dtcomm.all_reduce(torch.ones(10), group=group)
        begin(call, began[0], groups[0], False)
        begin(call, began[1], groups[1], True)
    elif what == "computes":
        for event in began:
            begin(compute, event)
    elif rank == 0:
        begin(wait, began[0])
        begin(make, began[1], groups[0]) if what == "makes" else began[1].set()
    else:
        signal.pause()
    for event in began:
        event.wait()
    time.sleep(0.1)  # until the threads are in the midst of their calls, wherever that is
    sys.exit(3)

def exit_code(pid, deadline):
    while time.monotonic() < deadline:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return "hangs"

what, runs, folder, numel = sys.argv[1], int(sys.argv[2]), pathlib.Path(sys.argv[3]), int(sys.argv[4])
for number in range(runs):
    pids = []
    for rank in range(2):
        pid = os.fork()
        if pid == 0:
            run(what, rank, folder / str(number))
        pids.append(pid)
    codes = [exit_code(pids[0], time.monotonic() + 30)]
    if what in ("calls", "computes"):
        codes.append(exit_code(pids[1], time.monotonic() + 30))
    else:
        os.kill(pids[1], signal.SIGKILL)
        os.waitpid(pids[1], 0)
    print(*codes, flush=True)
"""


def exit_codes(what: str, runs: int, folder: Path, numel: int = 100) -> tuple[list[str], str]:
    """The exit codes of every run, whose calls have ``numel`` elements, and what was written to stderr."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, what, str(runs), str(folder), str(numel)],
        capture_output=True,
        text=True,
        check=True,
        timeout=600,
    )
    return done.stdout.split(), done.stderr


def test_while_a_thread_waits_in_a_collective(tmp_path: Path) -> None:
    codes, errors = exit_codes("waits", 2, tmp_path)
    assert codes == ["3"] * 2, errors
    assert set(errors.split()) <= {"CommunicatorClosed"}, "an error that users catch as a DtcommError"


@pytest.mark.parametrize(("what", "runs"), [("calls", 3), ("computes", 1), ("makes", 1)])
def test_while_threads_call(what: str, runs: int, tmp_path: Path) -> None:
    codes, errors = exit_codes(what, runs, tmp_path)
    assert codes and set(codes) == {"3"}, errors


def test_while_helper_threads_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DTCOMM_THREADS", "3")
    codes, errors = exit_codes("calls", 1, tmp_path, 200_000)
    assert codes and set(codes) == {"3"}, errors
