"""What a rank process of :mod:`dtcomm.launch.ranks` does: wait for a task, run it, report, repeat.

Bulk (function, arguments, results) goes through files in the task's directory; the socket to the parent
carries only words. So a rank that is stopped or killed half way through a large result cannot block the
parent in a read.
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
    """What all ranks of one run have in common; ``payload`` is the pickled (function, arguments)."""

    world_size: int
    backend: str | None
    group_timeout: float
    environment: dict[str, str]
    path: list[str]
    module: str
    module_file: str | None
    payload: bytes


@dataclass(frozen=True, kw_only=True)
class Report:
    """How a task ended in one rank: ``value`` is the pickled result, or exception if it can be pickled."""

    ok: bool
    value: bytes | None
    traceback: str = ""


def tell(message: object) -> None:
    """Called in a rank: hand ``message`` (small, picklable) to the parent's ``Ranks.hear``."""
    if _parent is None:
        raise RuntimeError("tell() is for functions that run as a rank")
    _parent.send(("tell", message))


def serve(fd: int) -> None:
    """The life of a rank process: socket ``fd`` to the test, until it closes or asks for the end."""
    global _parent
    faulthandler.enable()  # a rank that crashes says where
    _parent = Connection(fd)
    _parent.send(("ready", None))
    while True:
        try:
            directory, rank = _parent.recv()
        except EOFError:
            return
        report = _run(Path(directory), rank)
        _write(Path(directory) / f"result.{rank}", pickle.dumps(report))
        _parent.send(("done", None))
        # Peers may still be inside a collective: nobody takes the group down before all have reported.
        try:
            reuse = _parent.recv()
        except EOFError:
            return
        if not report.ok:
            os._exit(1)
        _reset()
        if not reuse:
            return
        _parent.send(("ready", None))


def _run(directory: Path, rank: int) -> Report:
    task: Task = pickle.loads((directory / "task").read_bytes())
    # Stays open as long as the process: the handler writes to the descriptor whenever the signal comes.
    faulthandler.register(STACK_SIGNAL, file=open(directory / f"stack.{rank}", "w"), all_threads=True)
    try:
        function, args = _prepare(task)
        if task.backend is not None:
            _join_group(task, directory, rank)
        return Report(ok=True, value=pickle.dumps(function(rank, task.world_size, *args)))
    except SystemExit:
        raise  # a rank that exits does exit, with its code
    except BaseException as error:
        return Report(ok=False, value=_pickled(error), traceback=traceback.format_exc())


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
    """Make module ``name`` importable here even where the parent loaded it by path, or ran it as a script."""
    if name != "__main__":
        try:
            found = getattr(importlib.import_module(name), "__file__", None)
            if file is None or (found is not None and os.path.samefile(found, file)):
                return
        except ImportError:
            if file is None:
                raise
    if file is None:
        raise ValueError("ranks import the function from a file; this one was defined interactively")
    alias = "__mp_main__" if name == "__main__" else name
    if getattr(sys.modules.get(name), "__file__", None) == file:
        return
    spec = importlib.util.spec_from_file_location(alias, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = sys.modules[alias] = module
    spec.loader.exec_module(module)


def _join_group(task: Task, directory: Path, rank: int) -> None:
    import torch.distributed as dist

    # A file outlives any rank; a TCPStore would die with its host rank, and hide what a fault test looks at.
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

    from dtcomm.runtime import communicator

    if dist.is_initialized():
        dist.destroy_process_group()
    gc.collect()
    communicator.sweep()  # of groups that something still refers to
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float32)


def _pickled(error: BaseException) -> bytes | None:
    try:
        data = pickle.dumps(error)
        pickle.loads(data)  # an exception with a constructor of its own may pickle and not come back
        return data
    except Exception:
        return None


def _write(path: Path, data: bytes) -> None:
    with open(path, "wb") as file:
        file.write(data)
