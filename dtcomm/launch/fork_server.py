"""Server process that has imported torch and dtcomm and forks rank processes: an import takes seconds, a fork does not.

The server has no threads, no process group and no CUDA context when it forks, so a rank starts as if it had imported
the modules itself. Only the addresses of later allocations are randomized, so that an address of one rank is not
valid in another. The server is the parent of the ranks: it reaps them on request, and they die with it, as it dies
with the process that started it.
"""

from __future__ import annotations

import atexit
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
import threading
from collections.abc import Mapping
from typing import Any

PR_SET_PDEATHSIG = 1
STARTUP_SECONDS = 120.0  # time to import torch on a busy machine; not part of a run's deadline
MODULES = [
    "torch.distributed",
    "dtcomm",
]  # imported before forking; a program that runs many ranks may extend the list
_MESSAGE_BYTES = 65536
_START = (
    "import sys; sys.path[:] = sys.argv[4:]; "
    "from dtcomm.launch.fork_server import main; main(*map(int, sys.argv[1:3]), sys.argv[3].split())"
)


class ForkServerError(RuntimeError):
    """The fork server did not start, or ended; its output is on stderr."""


class ForkServer:
    """Client of the server process. Forked ranks have the environment the server was started with."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.environment = dict(environment)
        self._control, server_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.settimeout(STARTUP_SECONDS)
        self._requests = 0
        self._lock = threading.Lock()  # several threads may run ranks
        self._ranks: set[int] = set()
        self._shutting_down = False
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-c",
                _START,
                str(server_end.fileno()),
                str(os.getpid()),
                " ".join(MODULES),
                *sys.path,
            ],
            pass_fds=[server_end.fileno()],
            stdin=subprocess.DEVNULL,
            # One thread, because threads of a loaded BLAS would not exist in the forked ranks.
            env={**self.environment, "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
        server_end.close()

    def fork(self, connection: int) -> int:
        """Fork a rank that serves ``connection`` with this process's working directory and output; return its pid."""
        pid = self._request("fork", os.getcwd(), files=[connection, 1, 2])
        if pid is None:
            raise ForkServerError("the fork server did not start, or ended; see stderr")
        self._ranks.add(pid)
        return pid

    def exitcode(self, pid: int) -> int:
        """Return the exit code of a dead rank without reaping it."""
        code = self._request("exitcode", pid)
        return -signal.SIGKILL if code is None else code  # ranks do not outlive the server

    def kill_and_reap(self, pid: int) -> int:
        """Kill what is left of the rank's process group, reap the rank and return its exit code."""
        code = self._request("kill", pid)
        self._ranks.discard(pid)
        self._shut_down_if_idle()
        return -signal.SIGKILL if code is None else code

    def shut_down_when_idle(self) -> None:
        """Stop the server as soon as no rank is left."""
        self._shutting_down = True
        self._shut_down_if_idle()

    def _shut_down_if_idle(self) -> None:
        if self._shutting_down and not self._ranks:
            self._control.close()
            self._process.kill()  # it has nothing to clean up, and may hang in an import
            self._process.wait()

    def _request(self, command: str, argument: object, files: list[int] | None = None) -> int | None:
        with self._lock:
            return self._answer(command, argument, files)

    def _answer(self, command: str, argument: object, files: list[int] | None) -> int | None:
        self._requests += 1
        try:
            message = json.dumps([self._requests, command, argument]).encode()
            socket.send_fds(self._control, [message], files or [])
            # An exception in the caller, such as a timeout, may have left the answer of an earlier request unread.
            while (reply := self._control.recv(_MESSAGE_BYTES)) and json.loads(reply)[0] != self._requests:
                pass
        except OSError:
            return None
        return int(json.loads(reply)[1]) if reply else None


def main(fd: int, parent_pid: int, modules: list[str]) -> None:
    """Entry point of the server process; in forked children, of a rank."""
    kill_when_parent_dies(parent_pid)
    atexit.register(_skip_finalization)  # called last, because registered first
    os.set_inheritable(fd, False)
    for module in modules:
        importlib.import_module(module)
    import torch

    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # the collector would touch, and so copy, all shared pages
    connection = _serve_requests(socket.socket(fileno=fd))
    if connection is not None:
        from dtcomm.launch.worker import serve

        serve(connection)
        global _has_served
        _has_served = True


_has_served = False  # this rank ends because its parent wants no more of it, and not by an error


def _skip_finalization() -> None:
    """End a rank here: to finalize all of torch's modules takes the interpreter half a second."""
    if _has_served:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def kill_when_parent_dies(parent_pid: int) -> None:
    """Let the kernel kill this process when its parent ``parent_pid`` dies."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != parent_pid:  # the parent died before the line above
        os._exit(1)


def _serve_requests(control: socket.socket) -> int | None:
    """Serve requests until the client closes the socket. In a forked rank, return the descriptor of its connection."""
    own_pid = os.getpid()
    while True:
        message, files, _, _ = socket.recv_fds(control, _MESSAGE_BYTES, 3)
        if not message:
            return None
        number, command, argument = json.loads(message)
        answer = 0
        if command == "fork":
            answer = os.fork()
            if answer == 0:
                control.close()
                os.setsid()
                kill_when_parent_dies(own_pid)
                return _set_up_rank(argument, *files)
        elif command == "exitcode":
            answer = _exit_code(os.waitid(os.P_PID, argument, os.WEXITED | os.WNOWAIT))
        elif command == "kill":
            # Before reaping: until then neither the pid nor the process group id can be reused.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(argument, signal.SIGKILL)
            os.kill(argument, signal.SIGKILL)  # a rank that does not lead its group yet
            answer = _exit_code(os.waitid(os.P_PID, argument, os.WEXITED))
        for file in files:
            os.close(file)
        control.send(json.dumps([number, answer]).encode())


def _set_up_rank(folder: str, connection: int, out: int, error: int) -> int:
    for file, target in ((out, 1), (error, 2)):
        os.dup2(file, target)
        os.close(file)
    os.chdir(folder)
    randomize_addresses()
    return connection


_address_padding: list[Any] = []


def randomize_addresses() -> None:
    """Shift the addresses of all later allocations by a random number of pages and bytes."""
    _address_padding.append(mmap.mmap(-1, mmap.PAGESIZE * random.randrange(1, 1 << 16)))
    _address_padding.append(bytes(random.randrange(1, 1 << 16)))


def _exit_code(status: os.waitid_result | None) -> int:
    assert status is not None
    return status.si_status if status.si_code == os.CLD_EXITED else -status.si_status
