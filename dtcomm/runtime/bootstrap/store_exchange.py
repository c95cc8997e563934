"""Exchange of JSON objects between the ranks of a group, through the group's store.

Nothing is sent through the group itself, so a communicator can be made between any two of the user's collectives.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

from torch.distributed.distributed_c10d import Store

from dtcomm import env
from dtcomm.errors import CollectiveMismatch, CollectiveTimeout, CommunicatorClosed, DtcommError
from dtcomm.runtime.bootstrap import peer_processes

PROTOCOL = 8  # version of what ranks exchange and of the layout of shared memory
_NO_VALUE = "-"
_MIN_POLL_S, _MAX_POLL_S = 0.5e-3, 20e-3  # pauses between two looks into the store
_MAX_POLL_S_PER_RANK = 1e-3  # a longer pause with many ranks, all of which ask one store
_MAX_ASKING_S = 2.0  # before the deadline of a rank; at most a quarter of its timeout
_LOOKS_WHILE_ASKING = 8  # in that time


def host_id() -> str:
    """A string that is equal for processes that may share memory; mapping a peer's memory is the final test."""
    chosen = env.get("DTCOMM_HOST_ID")
    if chosen:
        return chosen
    return peer_processes.machine() or f"{socket.gethostname()}/{os.getpid()}"


class Deadline:
    """The end of a call that may wait ``timeout`` from now on.

    Attributes:
        cancelled: Why another thread no longer wants the result of the call; empty as long as it does.
    """

    def __init__(self, timeout: timedelta) -> None:
        self.timeout_s = timeout.total_seconds()
        self.cancelled = ""
        self._end = time.monotonic() + self.timeout_s

    def left_s(self) -> float:
        """Seconds until the deadline; 0 once it has passed."""
        return max(0.0, self._end - time.monotonic())

    def cancel(self, reason: str) -> None:
        """End the call now."""
        self._end, self.cancelled = 0.0, reason

    def require_wanted(self) -> None:
        """CommunicatorClosed if another thread no longer wants the result of the call."""
        if self.cancelled:
            raise CommunicatorClosed(self.cancelled)


class StoreExchange:
    """A sequence of all-gathers of JSON objects between ranks.

    Ranks that wait for a rank outside the store, to connect with it, are missing as well when the deadline of a rank
    that waits in an all-gather comes. So a rank whose deadline is near asks who waits: each rank that waits anywhere
    sets a key, and the error names the ranks that did not.

    Args:
        store: The store that all ranks reach.
        prefix: Prefix of the keys, equal on all ranks and used by nothing else.
        rank: The position of this rank in ``global_ranks``.
        global_ranks: The global ranks that take part; errors name them.
        deadline: When waiting for the other ranks ends.
        check: Called while it waits; None: nothing but the deadline ends a wait.
        end: Called before a wait fails, so that it fails on all ranks. False: all ranks have come after all.
        blame: Given the global ranks that have not come at the deadline, returns those to name; called before ``end``.
    """

    def __init__(
        self,
        store: Store,
        prefix: str,
        rank: int,
        global_ranks: Sequence[int],
        deadline: Deadline,
        check: Callable[[], None] | None = None,
        end: Callable[[], bool] = lambda: True,
        blame: Callable[[list[int]], list[int]] = lambda late: late,
    ) -> None:
        self._store = store
        self._prefix = prefix
        self._rank = rank
        self._global_ranks = global_ranks
        self._ranks = len(global_ranks)
        self._deadline = deadline
        self._check: Callable[[], None] = check or (lambda: None)
        self._end = end
        self._blame = blame
        self._rounds: list[str] = []
        self._question = f"{prefix}/who_waits"
        self._asking_s = min(_MAX_ASKING_S, deadline.timeout_s / 4)
        self._next_look = 0.0  # when, on the clock of time.monotonic
        self._has_answered = False

    def all_gather(self, info: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Every rank's ``info``, in rank order.

        Raises:
            CollectiveTimeout: If ranks do not come before the deadline; it names them.
            DtcommError: If the store fails.
        """
        prefix = f"{self._prefix}/{len(self._rounds)}"
        self._rounds.append(prefix)
        keys = [f"{prefix}/{rank}" for rank in range(self._ranks)]
        with store_errors():
            self._store.set(keys[self._rank], json.dumps(info))
            while True:
                self._wait(keys)
                texts = [_read(self._store, key) for key in keys]
                if None not in texts:  # else a rank has given up meanwhile
                    return [json.loads(text) for text in texts if text is not None]

    def early_answers(self) -> dict[int, dict[str, Any]]:
        """What ranks have already given to the next all-gather, by position."""
        prefix = f"{self._prefix}/{len(self._rounds)}"
        answers: dict[int, dict[str, Any]] = {}
        with store_errors():
            for rank in range(self._ranks):
                if self._store.check([key := f"{prefix}/{rank}"]):
                    text = _read(self._store, key)
                    answers |= {} if text is None else {rank: json.loads(text)}
        return answers

    def check(self) -> None:
        """Raise what is to end a wait for other ranks; to be called while this rank waits for any."""
        self._check()
        now = time.monotonic()
        if self._has_answered or now < self._next_look:
            return
        self._next_look = now + self._asking_s / _LOOKS_WHILE_ASKING
        with store_errors():
            if self._deadline.left_s() < self._asking_s:
                self._store.set(self._question, "")
            elif not self._store.check([self._question]):
                return
            self._store.set(self._answer_key(self._rank), "")
            self._has_answered = True

    def _answer_key(self, rank: int) -> str:
        return f"{self._question}/{rank}"

    def _wait(self, keys: list[str]) -> None:
        # Polled: TCPStore.wait keeps every other thread from the store, whatever group it serves.
        pause, longest = _MIN_POLL_S, max(_MAX_POLL_S, _MAX_POLL_S_PER_RANK * len(keys))
        while not self._store.check(keys):
            left_s = self._deadline.left_s()
            if not left_s:
                missing = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
                silent = [rank for rank in missing if not self._store.check([self._answer_key(rank)])]
                late = [self._global_ranks[rank] for rank in silent or missing]
                blamed = late if self._deadline.cancelled or not late else self._blame(late)
                if not late or not self._end():  # the last ones have come since the look before
                    return
                self._deadline.require_wanted()
                raise CollectiveTimeout(
                    f"{name_ranks(blamed)} did not come to make a communicator before the timeout of "
                    f"{self._deadline.timeout_s:g} s: every rank of the group has to call"
                )
            try:
                self.check()
            except Exception:
                if not self._end():  # all have come meanwhile, and a fast rank has moved on or ended
                    return
                raise
            time.sleep(min(pause, left_s))
            pause = min(pause * 1.25, longest)

    def require_same_operation(self, text: str, names: Sequence[str]) -> None:
        """Compare what the ranks are about to do, and close. All raise CollectiveMismatch if they differ.

        Args:
            text: What this rank does.
            names: How the error names each rank.
        """
        texts = [info["operation"] for info in self.all_gather({"operation": text})]
        self.close()
        if len(set(texts)) > 1:
            raise disagreement("what they do", dict(zip(names, texts, strict=True)))

    def close(self) -> None:
        """Leave the exchange; the last rank to leave deletes the keys."""
        left = left_key(self._prefix)
        with store_errors():
            if self._store.add(left, 1) < self._ranks:
                return
            for prefix in self._rounds:
                for rank in range(self._ranks):
                    self._store.delete_key(f"{prefix}/{rank}")
            if self._store.check([self._question]):
                self._store.delete_key(self._question)
                for rank in range(self._ranks):
                    self._store.delete_key(self._answer_key(rank))
            self._store.delete_key(left)

    def withdraw(self) -> None:
        """Leave an exchange that has failed: delete this rank's keys."""
        with store_errors():
            for prefix in self._rounds:
                self._store.delete_key(f"{prefix}/{self._rank}")
            if self._has_answered:
                self._store.delete_key(self._question)
                self._store.delete_key(self._answer_key(self._rank))


def left_key(prefix: str) -> str:
    """The key that exists while some of the ranks, but not all, have closed an exchange."""
    return f"{prefix}/left"


def _read(store: Store, key: str) -> str | None:
    """The value of a key, or None. ``Store.get`` would wait for it, and keep other threads from the store meanwhile."""
    value = store.compare_set(key, _NO_VALUE, _NO_VALUE).decode()
    return None if value == _NO_VALUE else value


@contextlib.contextmanager
def store_errors() -> Iterator[None]:
    """Report an error of the store, such as that its process has ended, as what it is."""
    try:
        yield
    except DtcommError:
        raise
    except RuntimeError as error:
        raise DtcommError(
            f"the group's store failed while the ranks made a communicator: {str(error).splitlines()[0]}"
        ) from error


def name_ranks(ranks: Sequence[int]) -> str:
    """``rank 3``, ``ranks 3 and 5`` or ``ranks 3, 5 and 7``."""
    *others, last = map(str, ranks)
    return f"ranks {', '.join(others)} and {last}" if others else f"rank {last}"


def require_equal(infos: Sequence[Mapping[str, Any]], key: str, what: str) -> None:
    """CollectiveMismatch that lists every rank's value if ranks differ in ``key``."""
    values = [json.dumps(info[key], sort_keys=True) for info in infos]
    if len(set(values)) > 1:
        raise disagreement(what, {f"rank {rank}": value for rank, value in enumerate(values)})


def disagreement(what: str, values: Mapping[str, str]) -> CollectiveMismatch:
    """The error of ranks that differ in ``what``; ``values`` are by the name of the rank."""
    listing = "; ".join(f"{name}: {value}" for name, value in values.items())
    return CollectiveMismatch(f"ranks disagree on {what}: {listing}")
