"""The rendezvous of a group's ranks: attempts to make something together, which all ranks count alike.

Ranks exchange JSON objects through the group's store (`StoreExchange`). Nothing is sent through the group itself, so a
communicator can be made between any two of the user's collectives.

The store holds the number of the current attempt, its epoch. A rank that gives up ends the epoch for all ranks: those
that wait in it raise the error that the rank reported or, if the rank timed out, continue in the next epoch. A late
rank therefore meets the ranks that try again, and reads no keys of earlier attempts. Every rank gets an error once.

An epoch succeeds on all ranks or on none. The first rank that completes its part marks the epoch as made, and a rank
that gives up ends it, both by comparing and setting one key: whichever comes first holds. Since a rank can complete its
part only once all ranks have said all that they have to say, the others can do so after it without waiting.

Timeouts: one deadline ends all waits of a rank, through all epochs. It is the group's timeout, counted from the first
call of this rank that needs the communicator (`dtcomm.runtime.bootstrap`), so it differs from rank to rank.
Within it, each attempt to connect over TCP ends after 30 s (`tcp`) and over UCX after 30 s or the group's timeout, if
that is less (`cpu`); the ranks then agree on another runtime or raise. Operations that follow have the group's timeout
each, counted from their own start.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from torch.distributed.distributed_c10d import Store

from dtcomm import env, errors
from dtcomm.errors import CollectiveMismatch, CollectiveTimeout, CommunicatorClosed, DtcommError
from dtcomm.runtime.bootstrap import processes
from dtcomm.runtime.process_groups import Deadline

PROTOCOL = 9  # version of what ranks exchange and of the layout of shared memory
_NO_VALUE = "-"
_MIN_POLL_S, _MAX_POLL_S = 0.5e-3, 20e-3  # pauses between two looks into the store
_MAX_POLL_S_PER_RANK = 1e-3  # a longer pause with many ranks, all of which ask one store
_MAX_ASKING_S = 2.0  # before the deadline of a rank; at most a quarter of its timeout
_LOOKS_WHILE_ASKING = 8  # in that time
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
    """One rank's part in a rendezvous; ``name`` distinguishes it from others through this store, equal on all ranks.

    Attributes:
        epoch: The number of the current attempt, equal on all ranks that take part in it.
        prefix: Prefix of the keys of this attempt.
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
        self._version_key = f"dtcomm/version/{name}"  # the same in all versions
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
            processes.require_alive(self._global_ranks)
            with store_errors():
                self._require_same_version()
            self._look_at_processes = time.monotonic() + _PROCESS_POLL_S

    def _enter(self) -> None:
        self._claim_version()
        # The store counts, not the process: a restarted process or a group that is made anew continues.
        entered_key = f"{self._base}/entered/{self._rank}"
        entered = self._store.add(entered_key, 0)
        while (state := self._state()).made or state.epoch <= entered:
            self._set(state, state.following)
        self._store.add(entered_key, state.epoch - entered)
        self._raise_error_since(entered + 1)  # this rank was to take part in that epoch
        self.epoch, self.prefix = state.epoch, f"{self._base}/{state.epoch}"

    def _claim_version(self) -> None:
        """Say which version this rank has, if no other rank has said so; CollectiveMismatch if they differ."""
        rank, was_claimed = self._global_ranks[self._rank], self._store.check([self._version_key])
        claim = self._store.compare_set(self._version_key, "", f"{PROTOCOL} {rank}").decode()
        version, other = map(int, claim.split())
        if other == rank:
            if was_claimed:  # by this rank, in an earlier attempt; another rank may have answered a new claim
                self._store.delete_key(f"{self._version_key}/differs")
                self._store.set(self._version_key, f"{PROTOCOL} {rank}")
        elif version != PROTOCOL:
            versions = {f"rank {other}": f"protocol {version}", f"rank {rank}": f"protocol {PROTOCOL}"}
            error = disagreement("the version of dtcomm", versions)
            self._store.set(f"{self._version_key}/differs", str(error))
            raise error

    def _require_same_version(self) -> None:
        if text := _read(self._store, f"{self._version_key}/differs"):
            raise CollectiveMismatch(text)

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
        rank, cause = self._global_ranks[report["rank"]], f"{report['type']}: {text}".rstrip(": ")
        if isinstance(kind, type) and issubclass(kind, DtcommError):
            if re.search(r"\branks? \d", text):  # it names the ranks that it is about
                raise kind(text)
            cause = text
        raise DtcommError(f"rank {rank} could not make a communicator: {cause}")


def host_id() -> str:
    """A string that is equal for processes that may share memory; mapping a peer's memory is the final test."""
    if chosen := env.get("DTCOMM_HOST_ID"):
        return chosen
    machine = processes.machine()  # a process maps no memory of another user's
    return f"{machine}/{os.geteuid()}" if machine else f"{socket.gethostname()}, pid {os.getpid()}"


def places(host_ids: Iterable[str]) -> str:
    """Where ranks with these different ids are, as far as the ids tell."""
    ids = list(host_ids)
    parts = [
        host_id.split("/") for host_id in ids
    ]  # what the kernel says of its boot, a PID namespace and a user
    by_kernel = all(len(part) == 3 and part[1].startswith("pid:[") for part in parts)
    if not by_kernel or len({boot for boot, *_ in parts}) > 1:
        return f"on {len(ids)} hosts"
    namespaces = len({namespace for _, namespace, _ in parts})
    if namespaces > 1:
        return f"in {namespaces} PID namespaces, such as containers, of one host"
    return f"of {len(ids)} user ids on one host"


class StoreExchange:
    """A sequence of all-gathers of JSON objects between ranks.

    Ranks that wait for a rank outside the store, to connect with it, are missing as well when the deadline of a rank
    that waits in an all-gather comes. So a rank whose deadline is near asks who waits: each rank that waits anywhere
    sets a key, and the error names the ranks that did not.

    Args:
        prefix: Prefix of the keys, equal on all ranks and used by nothing else.
        rank: The position of this rank in ``global_ranks``, which errors name.
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
        """Every rank's ``info``, in rank order; CollectiveTimeout names ranks that do not come before the deadline."""
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
        """Compare what the ranks are about to do, and close. All raise CollectiveMismatch if they differ."""
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


def require_equal(
    infos: Sequence[Mapping[str, Any]], key: str, what: str, ranks: Sequence[int] | None = None
) -> None:
    """CollectiveMismatch that lists the values if ranks differ in ``key``, of mappings only the entries that differ.

    ``ranks`` are the numbers by which the ranks are called; None: their positions.
    """
    values = [info[key] for info in infos]
    if all(isinstance(value, Mapping) for value in values):
        texts = {
            name: {json.dumps(value.get(name)) for value in values} for value in values for name in value
        }
        differing = sorted(name for name, found in texts.items() if len(found) > 1)
        values = [{name: value.get(name) for name in differing} for value in values]
    alike: dict[str, list[int]] = {}
    for rank, value in zip(ranks or range(len(values)), values, strict=True):
        alike.setdefault(json.dumps(value, sort_keys=True), []).append(rank)
    if len(alike) > 1:
        raise disagreement(what, {name_ranks(members): value for value, members in alike.items()})


def disagreement(what: str, values: Mapping[str, str]) -> CollectiveMismatch:
    """The error of ranks that differ in ``what``; ``values`` are by the name of the rank."""
    listing = "; ".join(f"{name}: {value}" for name, value in values.items())
    return CollectiveMismatch(f"ranks disagree on {what}: {listing}")
