"""A process that has torch and dtcomm imported and forks into ranks: importing takes seconds, forking milliseconds.

It has no threads, no group and no CUDA context while it forks, so a rank begins as if it had imported all by itself;
only what lies where in memory is shaken up, for an address of one rank must mean nothing in another. The nursery is
the ranks' parent: it waits for them where the test asks, and they die with it, as it does with the test.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import mmap
import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

PR_SET_PDEATHSIG = 1
STARTUP_SECONDS = 120.0  # importing torch on a busy machine; not part of anyone's deadline
MODULES = ["torch.distributed", "dtcomm"]  # what it imports; a program that runs many ranks may add to them
_MESSAGE_BYTES = 65536
_START = (
    "import sys; sys.path[:] = sys.argv[4:]; "
    "from dtcomm.launch.fork_server import main; main(*map(int, sys.argv[1:3]), sys.argv[3].split())"
)


class NurseryError(RuntimeError):
    """The nursery did not start, or ended; what it wrote is on stderr."""


class Nursery:
    """The nursery as the test sees it. Its processes' environment is the one it was started with."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.environment = dict(environment)
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.settimeout(STARTUP_SECONDS)
        self._asked = 0
        self._ranks: set[int] = set()
        self._retired = False
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-c",
                _START,
                str(theirs.fileno()),
                str(os.getpid()),
                " ".join(MODULES),
                *sys.path,
            ],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            # One thread: those of a BLAS that is loaded would not be in the ranks.
            env={**self.environment, "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
        theirs.close()

    def fork(self, connection: int) -> int:
        """The pid of a new rank, which serves ``connection`` and has this process's directory and output."""
        pid = self._ask("fork", os.getcwd(), files=[connection, 1, 2])
        if pid is None:
            raise NurseryError("the process that ranks are forked from did not start, or ended: see stderr")
        self._ranks.add(pid)
        return pid

    def exitcode(self, pid: int) -> int:
        """The exit code of a rank that is dead, which stays unreaped: its children may be wanted alive."""
        code = self._ask("exitcode", pid)
        return -signal.SIGKILL if code is None else code  # ranks do not outlive the nursery

    def end(self, pid: int) -> int:
        """Kill what is left of the rank's process group, reap it, and return its exit code."""
        code = self._ask("end", pid)
        self._ranks.discard(pid)
        self._leave()
        return -signal.SIGKILL if code is None else code

    def retire(self) -> None:
        """End as soon as no rank is left."""
        self._retired = True
        self._leave()

    def _leave(self) -> None:
        if self._retired and not self._ranks:
            self._control.close()
            self._process.kill()  # it has nothing to tidy, and may hang in an import
            self._process.wait()

    def _ask(self, what: str, argument: object, files: list[int] | None = None) -> int | None:
        self._asked += 1
        try:
            message = json.dumps([self._asked, what, argument]).encode()
            socket.send_fds(self._control, [message], files or [])
            # An exception, say of a timeout of the test, may have come between a question and its answer.
            while (said := self._control.recv(_MESSAGE_BYTES)) and json.loads(said)[0] != self._asked:
                pass
        except OSError:
            return None
        return int(json.loads(said)[1]) if said else None


def main(fd: int, parent_pid: int, modules: list[str]) -> None:
    """The life of a nursery, and in its children that of a rank."""
    die_with_the_parent(parent_pid)
    os.set_inheritable(fd, False)
    for module in modules:
        importlib.import_module(module)
    import torch

    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # what is never looked at is never copied
    connection = _breed(socket.socket(fileno=fd))
    if connection is not None:
        from dtcomm.launch.worker import serve

        serve(connection)


def die_with_the_parent(parent_pid: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != parent_pid:  # the parent died before the line above
        os._exit(1)


def _breed(control: socket.socket) -> int | None:
    """Answer until nobody asks any more; in a forked rank, its connection."""
    own_pid = os.getpid()
    while True:
        message, files, _, _ = socket.recv_fds(control, _MESSAGE_BYTES, 3)
        if not message:
            return None
        number, what, argument = json.loads(message)
        answer = 0
        if what == "fork":
            answer = os.fork()
            if answer == 0:
                control.close()
                os.setsid()
                die_with_the_parent(own_pid)
                return _settle(argument, *files)
        elif what == "exitcode":
            answer = _code(os.waitid(os.P_PID, argument, os.WEXITED | os.WNOWAIT))
        elif what == "end":
            # Before reaping: until then neither the pid nor the group's number can belong to somebody else.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(argument, signal.SIGKILL)
            os.kill(argument, signal.SIGKILL)  # one that leads no group yet
            answer = _code(os.waitid(os.P_PID, argument, os.WEXITED))
        for file in files:
            os.close(file)
        control.send(json.dumps([number, answer]).encode())


def _settle(folder: str, connection: int, out: int, error: int) -> int:
    for file, place in ((out, 1), (error, 2)):
        os.dup2(file, place)
        os.close(file)
    os.chdir(folder)
    shake()
    return connection


_kept: list[Any] = []


def shake() -> None:
    """Move the place of everything that is allocated from now on by an odd number of pages and bytes."""
    _kept.append(mmap.mmap(-1, mmap.PAGESIZE * random.randrange(1, 1 << 16)))
    _kept.append(bytes(random.randrange(1, 1 << 16)))


def _code(status: os.waitid_result | None) -> int:
    assert status is not None
    return status.si_status if status.si_code == os.CLD_EXITED else -status.si_status
