"""Who is to blame when a message does not come: ranks leave word of whom they gave up on, before they leave."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from dtcomm.errors import CollectiveTimeout, DtcommError, PeerLost
from dtcomm.runtime.torchdist.replay import TAGS

GRACE_SECONDS = 0.3  # for the word of ranks that gave up at the same time
_KINDS: dict[str, type[DtcommError]] = {"timeout": CollectiveTimeout, "lost": PeerLost}


class Blame:
    """Turns a backend's error about one peer into an error about the rank that caused it.

    A rank that waits for a rank that has given up itself is not held up by it but by whom that one waits for.
    ``names[rank]`` is how errors call a rank.
    """

    def __init__(
        self, group: dist.ProcessGroup, names: Sequence[str], timeout_s: float, store: Any = None
    ) -> None:
        self._rank = group.rank()
        self._names = names
        self._timeout_s = timeout_s
        self._store = _store_of(group) if store is None else store

    def set_timeout(self, seconds: float) -> None:
        """What errors give as the timeout."""
        self._timeout_s = seconds

    def error(self, peer: int, cause: RuntimeError, doing: str) -> DtcommError:
        """What to raise for a ``cause`` that the backend gave for a message with ``peer``."""
        kind = "timeout" if "timed out" in str(cause).lower() else "lost"
        try:
            peer, kind = self._follow(peer, kind)
        except (RuntimeError, ValueError):  # the store is gone with its rank
            pass
        reason = str(cause).splitlines()[0].rpartition("] ")[2]
        if kind == "timeout":
            why = f"did not come within {self._timeout_s:g} s"
            hint = "; all ranks must make the same calls in the same order: DTCOMM_CHECK=1 compares them"
        else:
            why, hint = "is gone", ""
        return _KINDS[kind](f"{self._names[peer]} {why} ({doing}: {reason}){hint}")

    def _follow(self, peer: int, kind: str) -> tuple[int, str]:
        store = self._store
        if store is None:
            return peer, kind
        store.set(_key(self._rank), f"{kind} {peer}")
        deadline = time.monotonic() + GRACE_SECONDS
        while True:
            at, found, seen = peer, kind, {self._rank}
            while at not in seen and store.check([_key(at)]):
                seen.add(at)
                found, _, following = store.get(_key(at)).decode().partition(" ")
                at = int(following)
            if at in seen:  # they are all there, and wait for each other
                at, found = peer, "timeout"
            if time.monotonic() >= deadline:
                return at, found
            time.sleep(0.02)


def cause_of(group: dist.ProcessGroup | None, peer: int, error: RuntimeError) -> RuntimeError:
    """What ended a wait for ``peer``, where it is more than that time ran out.

    When a connection ends Gloo fails what waits for its match, but not what it is just writing or reading: that runs
    into the timeout. The connection knows better, and tells whoever begins something on it.
    """
    if group is not None and "timed out" in str(error).lower():
        nobody = torch.empty(1, dtype=torch.uint8)  # whose tag nobody sends with
        try:
            group.recv([nobody], peer, TAGS)
        except RuntimeError as ended:
            return error if "timeout" in str(ended).lower() else ended
    return error


def _key(rank: int) -> str:
    return f"dtcomm/gave_up/{rank}"


def _store_of(group: dist.ProcessGroup) -> Any:
    try:
        return group.get_group_store()
    except (AttributeError, RuntimeError):  # a backend by itself, or a torch that does not tell
        return None
