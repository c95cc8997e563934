"""The rendezvous of a group's ranks: attempts to make something together, which all ranks count alike.

The store holds the number of the current attempt, its epoch. A rank that gives up ends the epoch for all ranks: those
that wait in it raise the error that the rank reported or, if the rank timed out, continue in the next epoch. A late
rank therefore meets the ranks that try again, and reads no keys of earlier attempts. Every rank gets an error once.

An epoch succeeds on all ranks or on none. The first rank that completes its part marks the epoch as made, and a rank
that gives up ends it, both by comparing and setting one key: whichever comes first holds. Since a rank can complete its
part only once all ranks have said all that they have to say, the others can do so after it without waiting.
"""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from torch.distributed.distributed_c10d import Store

from dtcomm import errors
from dtcomm.errors import CollectiveTimeout, CommunicatorClosed, DtcommError
from dtcomm.runtime.bootstrap import peer_processes
from dtcomm.runtime.bootstrap.store_exchange import (
    PROTOCOL,
    Deadline,
    StoreExchange,
    left_key,
    store_errors,
)

Result = TypeVar("Result")
_PROCESS_POLL_S = 0.25


class EpochEnded(Exception):
    """Another rank has ended the epoch without an error: it timed out, or it makes a new communicator."""


class _State(int):
    """What the store holds under "epoch": twice the number of the epoch, and one more once that has been made."""

    @property
    def epoch(self) -> int:
        return self // 2

    @property
    def made(self) -> bool:
        return self % 2 == 1

    @property
    def following(self) -> _State:
        """The state in which the next epoch has begun."""
        return _State(2 * (self // 2) + 2)


class Rendezvous:
    """One rank's part in a rendezvous.

    Attributes:
        epoch: The number of the current attempt, equal on all ranks that take part in it.
        prefix: Prefix of the keys of this attempt.

    Args:
        store: The store that all ranks reach.
        name: Distinguishes it from other rendezvous through this store; equal on all ranks.
        rank: The position of this rank in ``global_ranks``.
        global_ranks: The global ranks that take part.
        deadline: When waiting for the other ranks ends.
    """

    def __init__(
        self, store: Store, name: str, rank: int, global_ranks: Sequence[int], deadline: Deadline
    ) -> None:
        self.epoch = 0
        self._look_at_processes = 0.0  # when, on the clock of time.monotonic
        self.prefix = ""
        self._store = store
        self._rank = rank
        self._global_ranks = global_ranks
        self._deadline = deadline
        self._base = f"dtcomm/{PROTOCOL}/{name}"
        self._epoch_key = f"{self._base}/epoch"
        self._error_key = f"{self._base}/error"
        self._late_key = f"{self._base}/late"
        self._first_epoch = 0  # of this call

    def run(
        self,
        attempt: Callable[[StoreExchange], Result],
        discard: Callable[[Result], None] = lambda result: None,
    ) -> Result:
        """What ``attempt`` returns.

        Args:
            attempt: All ranks call it with an exchange of their own, perhaps more than once.
            discard: Releases what ``attempt`` returned where another rank had given up.

        Raises:
            CollectiveTimeout: If ranks do not come before the deadline.
            PeerLost: If the process of a rank is known to have ended.
            CommunicatorClosed: If the deadline is cancelled.
            DtcommError: If another rank failed; it has the type of that rank's error if that is dtcomm's own.
        """
        while True:
            with store_errors():
                self._enter()
            self._first_epoch = self._first_epoch or self.epoch
            exchange = StoreExchange(
                self._store,
                self.prefix,
                self._rank,
                self._global_ranks,
                self._deadline,
                self.check,
                self._end,
                self._blame,
            )
            try:
                result = attempt(exchange)
                try:
                    self._complete()
                except BaseException:
                    discard(result)
                    raise
            except EpochEnded:
                exchange.withdraw()
            except BaseException as error:
                with contextlib.suppress(RuntimeError):  # the store may be what failed
                    self._give_up(error)
                    exchange.withdraw()
                raise
            else:
                # A rank that has finished may have taken the store with it.
                with contextlib.suppress(DtcommError):
                    exchange.close()
                return result

    def check(self) -> None:
        """Raise if another rank has ended the epoch: its error, or EpochEnded. PeerLost if a rank has died.

        CommunicatorClosed if the rendezvous was cancelled.
        """
        self._deadline.require_wanted()
        with store_errors():
            state = self._state()
            if self._has_made(state):  # nothing is left to wait for
                return
            if state.epoch > self.epoch:
                self._raise_error_since(self.epoch)
                raise EpochEnded
        if time.monotonic() >= self._look_at_processes:
            peer_processes.require_alive(self._global_ranks)
            self._look_at_processes = time.monotonic() + _PROCESS_POLL_S

    def _enter(self) -> None:
        # The store counts, not the process: a restarted process or a group that is made anew continues.
        entered_key = f"{self._base}/entered/{self._rank}"
        entered = self._store.add(entered_key, 0)
        while (state := self._state()).made or state.epoch <= entered:
            self._set(state, state.following)
        self._store.add(entered_key, state.epoch - entered)
        self._raise_error_since(entered + 1)  # this rank was to take part in that epoch
        self.epoch, self.prefix = state.epoch, f"{self._base}/{state.epoch}"

    def _state(self) -> _State:
        return _State(self._store.add(self._epoch_key, 0))

    def _set(self, state: _State, following: _State) -> _State:
        """Replace a state by the one that follows, unless that has happened; returns what holds now."""
        return _State(self._store.compare_set(self._epoch_key, str(state), str(following)))

    def _has_made(self, state: _State) -> bool:
        """Whether this rank's epoch has been made, by the present state."""
        if state.epoch == self.epoch:
            return state.made
        # A rank that makes the group again ends the epoch; it has left the exchange before.
        return state.epoch > self.epoch and self._store.check([left_key(self.prefix)])

    def _complete(self) -> None:
        """Mark the epoch as made. Raise if another rank has given up: its error, or EpochEnded."""
        with store_errors():
            if not self._has_made(self._set(_State(2 * self.epoch), _State(2 * self.epoch + 1))):
                self._raise_error_since(self.epoch)
                raise EpochEnded

    def _end(self) -> bool:
        """End this rank's epoch, unless it has ended. Returns False if it has been made."""
        state = _State(2 * self.epoch)
        return not self._has_made(self._set(state, state.following))

    def _give_up(self, error: BaseException) -> None:
        if isinstance(error, CollectiveTimeout | CommunicatorClosed):
            self._end()
            return
        while True:
            state = self._state()
            reported = self._error()
            if reported is not None and reported["epoch"] >= self.epoch and reported["rank"] != self._rank:
                return  # all ranks raise that one
            report = {
                "epoch": state.epoch,
                "rank": self._rank,
                "type": type(error).__name__,
                "text": str(error),
            }
            self._store.set(self._error_key, json.dumps(report))
            # Ranks look for an error when the epoch ends. Had another rank ended it, they might have looked too early.
            # Should it be made just now, the sum marks the next epoch as made, which is over then as well.
            if self._store.add(self._epoch_key, state.following - state) == state.following:
                return

    def _blame(self, late: list[int]) -> list[int]:
        """Of ranks that have not come, those that another rank has waited for; if there are none, all, and report them.

        A rank that waited in vain and has left is missing then, but not to blame.
        """
        if self._store.check([self._late_key]):
            report: dict[str, Any] = json.loads(self._store.get(self._late_key))
            if report["epoch"] >= self._first_epoch:
                return [rank for rank in late if rank in report["ranks"]] or late
        self._store.set(self._late_key, json.dumps({"epoch": self.epoch, "ranks": late}))
        return late

    def _error(self) -> dict[str, Any] | None:
        """The last error that a rank reported."""
        if not self._store.check([self._error_key]):
            return None
        report: dict[str, Any] = json.loads(self._store.get(self._error_key))
        return report

    def _raise_error_since(self, epoch: int) -> None:
        """Raise the last error of another rank in ``epoch`` or later."""
        report = self._error()
        if report is None or report["epoch"] < epoch or report["rank"] == self._rank:
            return
        kind, text = getattr(errors, report["type"], None), report["text"]
        rank, cause = self._global_ranks[report["rank"]], f"{report['type']}: {text}"
        if isinstance(kind, type) and issubclass(kind, DtcommError):
            if re.search(r"\branks? \d", text):  # it names the ranks that it is about
                raise kind(text)
            cause = text
        raise DtcommError(f"rank {rank} could not make a communicator: {cause}")
