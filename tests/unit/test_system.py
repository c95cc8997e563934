"""Files are written whole, to new names and not through links; waits have limits; no other code does otherwise."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import dtcomm
from dtcomm.system import write_file

ROOT = Path(dtcomm.__file__).parent


def test_files_are_new_and_never_written_through_links(tmp_path: Path) -> None:
    theirs, target = tmp_path / "theirs", tmp_path / "ours.prom"
    theirs.write_text("untouched")
    for link in (target, tmp_path / f".ours.prom.{os.getpid()}", tmp_path / "ours.prom.new"):
        link.symlink_to(theirs)
    write_file(target, "content")
    assert theirs.read_text() == "untouched" and not target.is_symlink() and target.read_text() == "content"
    write_file(target, b"private", mode=0o600)
    assert target.read_bytes() == b"private" and target.stat().st_mode & 0o777 == 0o600
    write_file("/dev/null", "a device is written to")
    with pytest.raises(OSError):
        write_file(tmp_path, "a folder")
    assert len(list(tmp_path.iterdir())) == 4  # no draft is left


def test_no_other_code_writes_files() -> None:
    # What processes of `dtcomm.launch` write lies in a folder of their own, which no other user may enter.
    own_folder = {"system.py", "launch/worker.py", "launch/ranks.py"}
    writes = re.compile(r"""\.write_(text|bytes)\(|\.savefig\(|\bopen\([^)\n]*, "[wax]|os\.O_CREAT""")
    places = [path for path in ROOT.rglob("*.py") if writes.search(path.read_text(encoding="utf-8"))]
    remote = {"frameworks/attached.py"}  # files.open of fsspec: not on this machine
    assert {str(path.relative_to(ROOT)) for path in places} - own_folder - remote == set()


# --- waits: none is without a limit, or without an ear for Ctrl-C

_WAITS = {"wait", "join", "get", "acquire", "result", "select", "recv", "recv_into", "accept", "communicate"}
# Handles of operations, which end at the group's timeout and hear interrupts (`NativeWork`, `QueuedWork`).
_HANDLE = re.compile(
    r"(?:^|[._])(?:work|works\[-1\]|pending|part|receipt|sending|decoded|_native|self|collectives"
    r"|backend|group|do|dtcomm)$|(?:pop\(0\)|pending\(.*\)|submit\(.*\)|_started\(\))$"
)
_ENDS = {  # what is left: why it ends
    "cli/perf/libraries.py": {"wait": "waits for a handle"},
    "compress/stage_scheduler.py": {"buckets.get": "a thread without a task"},
    "ddp/observers.py": {
        "fetched.get": "a copy",
        "(stats.on_host or AsyncHostCopy(stats.mean)).get": "a copy",
    },
    "ddp/reducer.py": {"bucket.finished.wait": "completed once the handle is, which was waited for"},
    "extensions/elastic/coordinator.py": {
        "coordinator.wait": "the command's own task",
        "self._thread.join": "the same, and Ctrl-C ends it",
        "self._stop.wait": "within asyncio.wait_for",
    },
    "extensions/elastic/local_sgd.py": {"self._member.join": "a request to the coordinator"},
    "extensions/elastic/member.py": {"self.socket.recv": "the socket has a timeout"},
    "extensions/weights/store.py": {
        "requests.get": "a coroutine; the end of the connection is queued",
        "self._socket.recv_into": "the socket has a timeout",
        "job.done.get": "threads put their end, and their sockets have a timeout; hears Ctrl-C",
        "result.get": "the same",
        "self._changed.wait": "within asyncio.wait_for",
    },
    "extensions/weights/transport.py": {
        "self._listener.accept": "does not block",
        "connection.recv_into": "the socket has a timeout; at the other end, a thread without a task",
    },
    "launch/fork_server.py": {"self._process.wait": "it was killed", "self._control.recv": "EOF if it dies"},
    "launch/process_pool.py": {"self.connection.recv": "polled before"},
    "launch/worker.py": {"_parent.recv": "a rank without a task"},
    "runtime/bootstrap/processes.py": {"result.result": "it is done"},
    "runtime/bootstrap/reconnect.py": {
        "self._listener.accept": "does not block",
        "self.connection.recv": "does not block",
    },
    "runtime/bootstrap/tcp.py": {
        "self._socket.accept": "does not block",
        "self.connection.recv": "does not block",
        "connection.recv": "the socket has a timeout",
    },
    "runtime/communicator.py": {"bootstrap.join": "ends at its deadline", "connection.wait": "the same"},
    "runtime/emulated_link.py": {
        "server.accept": "the caller has connected",
        "receiver.recv_into": "timeout",
    },
    "runtime/native/python_codecs.py": {"self._queue.get": "a thread without a task"},
    "runtime/torchdist/faults.py": {"answer.result": "it is done"},
    "runtime/torchdist/runtime.py": {"self._queue.get": "a thread without a task"},
    "collectives/planning.py": {"self._connection.wait": "ends at its deadline"},
    "work/completion.py": {"wait": "wait_for itself", "_detached.get": "a thread without a task"},
}
_CXX_WAIT = re.compile(
    r"\b\w+[.]wait\(|\bp?poll\(|epoll_wait\(|FUTEX_WAIT\b|\b(?:nano|u)?sleep\(|\bpause\(\)"
)
_CXX_ENDS = {  # the first words of the line: why it ends
    "condition_.wait(": "Condition itself",
    "changed_.wait(lock, [&] { return finished(); })": "the operation is about to be finished",
    "changed_.wait(lock, [&] { return stopped_": "a thread without a task",
    "became_free_.wait(": "a driver looks every 20 ms whether the queue is closed",
    "while (stopping_) stopped_.wait(": "the progress thread looks every 20 ms",
    "idle_.wait(": "a thread without a task",
    "recorder_.wait(": "notes a wait",
    "wakeup.wait(seen, max_sleep_ns_)": "20 ms",
    "if (!finished()) done_.wait(seen, kSleepNs)": "20 ms",
    "if (!has_parts_for(index)": "a thread without a task",
    "futex.wait(seen, timeout_ns)": "PeerSet::sleep, 20 ms",
    "syscall(SYS_futex, &counter, FUTEX_WAIT, seen, &timeout": "its limit",
    "nanosleep(&moment": "1 ms",
    "const int found = epoll_wait(": "does not block",
    "ppoll(fds, count, &timeout": "its limit",
    "return poll(&process, 1, wait_ms)": "its limit",
    "peers.sleep(wakeup, seen,": "spin_yield_sleep, the loop in which the engine waits",
    "void sleep(": "a declaration",
    "void PeerSet::sleep(": "a definition",
    "for (;;) pause();": "the process ends",
}


def waits_without_limit(text: str) -> Iterator[str]:
    """Calls of Python code that may wait for a thread or a process for ever."""
    for call in (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)):
        name = call.func.attr if isinstance(call.func, ast.Attribute) else ast.unparse(call.func)
        receiver = ast.unparse(call.func.value) if isinstance(call.func, ast.Attribute) else ""
        if name not in _WAITS or _HANDLE.search(receiver) or (not receiver and name != "wait"):
            continue
        limits = [argument for argument in call.args if ast.unparse(argument) != "None"]
        needed = 4 if receiver == "select" else 2 if not receiver else 1
        reads = name in ("recv", "recv_into")  # what it is given is no limit
        if reads or (len(limits) < needed and not any(word.arg == "timeout" for word in call.keywords)):
            yield ast.unparse(call.func)


def cxx_waits_without_limit(text: str) -> Iterator[str]:
    lines = (line.partition("//")[0].strip() for line in text.splitlines())
    return (line for line in lines if _CXX_WAIT.search(line) and not line.startswith(tuple(_CXX_ENDS)))


def test_no_wait_is_without_a_limit() -> None:
    found = {
        f"{path}: {wait}"
        for path in (path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*.py"))
        for wait in waits_without_limit((ROOT / path).read_text(encoding="utf-8"))
    }
    assert found == {f"{path}: {wait}" for path, waits in _ENDS.items() for wait in waits}, (
        "completion.wait_for"
    )
    for folder in ("engine", "net", "python", "core"):
        for path in (ROOT.parent / "csrc" / folder).glob("*.*"):
            assert not list(cxx_waits_without_limit(path.read_text(encoding="utf-8"))), path


def test_planted_waits_without_a_limit_are_reported() -> None:
    planted = (
        "event.wait()", "condition.wait(None)", "thread.join()", "tasks.get()", "lock.acquire()", "selector.select()",
        "select.select(a, b, c)", "connection.recv(8)", "server.accept()", "process.communicate()", "wait([future])",
    )  # fmt: skip
    for text in planted:
        assert list(waits_without_limit(f"with x:\n    {text}")), text
    for text in (
        "event.wait(1.0)",
        "work.wait()",
        "', '.join(names)",
        "wait([f], 1)",
        "completion.wait_for(e.wait)",
    ):
        assert not list(waits_without_limit(text)), text
    for text in ("ready_.wait(lock);", "if (poll(fds, 1, -1) > 0) {", "sleep(1);"):
        assert list(cxx_waits_without_limit(f"  {text}")), text
