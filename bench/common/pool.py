"""Rank processes that block until they are asked to measure, so that contestants can take turns.

A contestant is a class whose objects live in the rank processes; ``Pool.call`` runs one of its methods on all ranks at
once and returns their results.
"""

from __future__ import annotations

import multiprocessing
import os
import time
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing_extensions import Self


class RankFailed(RuntimeError):
    """A rank raised, died or did not answer; the message carries its rank and traceback."""


def pin(rank: int) -> None:
    """Bind the calling thread, and threads that it starts later, to one of the process's CPUs."""
    cpus = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cpus[rank % len(cpus)]})


def _serve(connection: Connection, contestant: type, rank: int, ranks: int, kwargs: dict[str, Any]) -> None:
    try:
        rank_object = contestant(rank, ranks, **kwargs)
        connection.send((True, None))
        while True:
            call = connection.recv()
            if call is None:
                break
            name, arguments = call
            connection.send((True, getattr(rank_object, name)(**arguments)))
        rank_object.close()
        connection.send((True, None))
    except (EOFError, KeyboardInterrupt):
        pass
    except Exception:  # the pool raises it again, with the rank
        connection.send((False, traceback.format_exc()))


def collect(connections: Sequence[Connection], method: str, timeout: float) -> list[Any]:
    """Return the ranks' answers to a call, in rank order.

    Raises:
        RankFailed: A rank raised, died or did not answer within ``timeout`` seconds.
    """
    deadline = time.monotonic() + timeout
    waiting: dict[Any, int] = {connection: rank for rank, connection in enumerate(connections)}
    results: list[Any] = [None] * len(waiting)
    while waiting:
        ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise RankFailed(f"{method}: no answer in {timeout:g} s from rank {sorted(waiting.values())}")
        for connection in ready:
            assert isinstance(connection, Connection)
            rank = waiting.pop(connection)
            try:
                succeeded, value = connection.recv()
            except (EOFError, ConnectionError):
                raise RankFailed(f"{method}: rank {rank} died") from None
            if not succeeded:
                raise RankFailed(f"{method}: rank {rank} raised\n{value}")
            results[rank] = value
    return results


class Pool:
    """``ranks`` processes, each with an object ``contestant(rank, ranks, **kwargs)``."""

    def __init__(self, contestant: type, ranks: int, *, timeout: float = 120, **kwargs: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self.timeout = timeout
        self._connections: list[Connection] = []
        self._processes = []
        for rank in range(ranks):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(theirs, contestant, rank, ranks, kwargs), daemon=True
            )
            process.start()
            theirs.close()
            self._connections.append(ours)
            self._processes.append(process)
        try:
            collect(self._connections, "start", timeout)
        except BaseException:
            self._kill()
            raise

    def call(self, method: str, **arguments: Any) -> list[Any]:
        """Return the method's results on all ranks, in rank order.

        Raises:
            RankFailed: A rank raised, died or did not answer in time.
        """
        for connection in self._connections:
            connection.send((method, arguments))
        try:
            return collect(self._connections, method, self.timeout)
        except BaseException:
            self._kill()
            raise

    def close(self) -> None:
        """Close the contestant of every rank, then end the processes."""
        try:
            for connection in self._connections:
                connection.send(None)
            collect(self._connections, "close", self.timeout)
        except (OSError, RankFailed):
            pass
        self._kill()

    def _kill(self) -> None:
        for process in self._processes:
            process.join(timeout=0.5)
            if process.is_alive():
                process.kill()
                process.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
