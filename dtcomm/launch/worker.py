"""Main loop of a rank process of `dtcomm.launch.ranks`: wait for a task, run it, report, repeat.

Functions, arguments and results go through files in the task's directory; the socket to the parent carries only short
messages. A rank that is stopped or killed while it writes a large result therefore cannot block the parent in a read.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import importlib.util
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

STACK_SIGNAL = signal.SIGUSR2

_parent: Connection | None = None


@dataclass(frozen=True, kw_only=True)
class Task:
    """A task, equal for all ranks of a run; ``payload`` is the pickled (function, arguments)."""

    world_size: int
    backend: str | None
    group_timeout: float
    environment: dict[str, str]
    path: list[str]
    module: str
    module_file: str | None
    payload: bytes


@dataclass(frozen=True, kw_only=True)
class TaskResult:
    """How a task ended on one rank; ``value`` is the pickled result, or the exception if it can be pickled."""

    ok: bool
    value: bytes | None
    traceback: str = ""


def send_to_parent(message: object) -> None:
    """Send a message from a rank to the parent, which gets it from `RunningRanks.receive`.

    Args:
        message: A small picklable object.

    Raises:
        RuntimeError: This process is not a rank.
    """
    if _parent is None:
        raise RuntimeError("send_to_parent() works only in a function that runs as a rank")
    _parent.send(("message", message))


def serve(fd: int) -> None:
    """Serve tasks from socket ``fd`` until it closes or the parent asks this process to exit."""
    global _parent
    faulthandler.enable()  # a crash prints the stack
    _parent = Connection(fd)
    _parent.send(("ready", None))
    while True:
        try:
            directory, rank = _parent.recv()
        except EOFError:
            return
        result = _run_task(Path(directory), rank)
        _write(Path(directory) / f"result.{rank}", pickle.dumps(result))
        _parent.send(("done", None))
        # Peers may still be inside a collective, so the group is destroyed only after all ranks have reported.
        try:
            reuse = _parent.recv()
        except EOFError:
            return
        if not result.ok:
            os._exit(1)
        _reset()
        if not reuse:
            return
        _parent.send(("ready", None))


def _run_task(directory: Path, rank: int) -> TaskResult:
    task: Task = pickle.loads((directory / "task").read_bytes())
    # The file stays open: the handler writes to its descriptor whenever the signal arrives.
    faulthandler.register(STACK_SIGNAL, file=open(directory / f"stack.{rank}", "w"), all_threads=True)
    try:
        function, args = _prepare(task)
        if task.backend is not None:
            _init_process_group(task, directory, rank)
        return TaskResult(ok=True, value=pickle.dumps(function(rank, task.world_size, *args)))
    except SystemExit:
        raise  # sys.exit in a rank ends the process with that code
    except BaseException as error:
        return TaskResult(ok=False, value=_pickle_or_none(error), traceback=traceback.format_exc())


def _prepare(task: Task) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    import torch

    for name in os.environ.keys() - task.environment.keys():
        del os.environ[name]
    os.environ.update(task.environment)
    sys.path[:] = task.path
    torch.manual_seed(0)
    _import(task.module, task.module_file)
    function, args = pickle.loads(task.payload)
    return function, args


def _import(name: str, file: str | None) -> None:
    """Make module ``name`` importable even if the parent loaded it by path or ran it as a script."""
    if name != "__main__":
        try:
            imported = getattr(importlib.import_module(name), "__file__", None)
            if file is None or (imported is not None and os.path.samefile(imported, file)):
                return
        except ImportError:
            if file is None:
                raise
    if file is None:
        raise ValueError("fn: was defined interactively; ranks can only import functions from a file")
    alias = "__mp_main__" if name == "__main__" else name
    if getattr(sys.modules.get(name), "__file__", None) == file:
        return
    spec = importlib.util.spec_from_file_location(alias, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = sys.modules[alias] = module
    spec.loader.exec_module(module)


def _init_process_group(task: Task, directory: Path, rank: int) -> None:
    import torch.distributed as dist

    # A file outlives any rank; a TCPStore would die with the rank that hosts it, which fault tests must not see.
    dist.init_process_group(
        task.backend,
        store=dist.FileStore(str(directory / "store"), task.world_size),  # type: ignore[attr-defined]
        rank=rank,
        world_size=task.world_size,
        timeout=timedelta(seconds=task.group_timeout),
    )


def _reset() -> None:
    import torch
    import torch.distributed as dist

    from dtcomm.runtime.communicator import sweep

    if dist.is_initialized():
        dist.destroy_process_group()
    gc.collect()
    sweep()  # of groups that are still referenced
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float32)


def _pickle_or_none(error: BaseException) -> bytes | None:
    try:
        data = pickle.dumps(error)
        pickle.loads(data)  # an exception with its own constructor may pickle but not unpickle
        return data
    except Exception:
        return None


def _write(path: Path, data: bytes) -> None:
    with open(path, "wb") as file:
        file.write(data)
