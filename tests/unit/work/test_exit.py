"""Threads that run native code when the interpreter exits."""

from __future__ import annotations

import subprocess
import sys

import pytest

# atexit calls first what was registered last: `exiting` is set when dtcomm has ended its threads.
PROGRAM = """
import atexit, threading, time

exiting = threading.Event()

def last():
    exiting.set()
    time.sleep(0.3)

atexit.register(last)
from dtcomm.runtime import communicator
from dtcomm.work import completion
from dtcomm.runtime.torchdist import faults

{thread}
print("main ends", flush=True)
"""
AFTER_THE_END = """
def run():
    exiting.wait()
    with completion.running_native():
        print("native code", flush=True)

threading.Thread(target=run, daemon=True).start()
"""
WITHIN_A_BLOCK = """
begun = threading.Event()

def run():
    with completion.running_native():
        begun.set()
        time.sleep(0.3)
        with completion.running_native():
            print("native code", flush=True)

threading.Thread(target=run, daemon=True).start()
begun.wait()
"""
STARTED = """
def run():
    time.sleep(0.3)
    with completion.running_native():
        print("native code", flush=True)

completion.start_thread(run, "started")
"""
LOOKS = """
class Busy:
    def busy(self):
        return True

    def look(self):
        if exiting.is_set():
            print("native code", flush=True)

faults.LOOK_S = 0.01
faults.watch(Busy())
time.sleep(0.1)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("thread", "expected"),
    [
        (AFTER_THE_END, ["main ends"]),
        (WITHIN_A_BLOCK, ["main ends", "native code"]),
        (STARTED, ["main ends", "native code"]),
        (LOOKS, ["main ends"]),
    ],
    ids=["after-the-end", "within-a-block", "started", "looks"],
)
def test_no_thread_begins_native_code_once_the_interpreter_has_waited(
    thread: str, expected: list[str]
) -> None:
    """A thread that returned from it while the interpreter is finalized would abort the process."""
    program = [sys.executable, "-c", PROGRAM.format(thread=thread)]
    ended = subprocess.run(program, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout.splitlines()) == (0, expected), ended.stderr
