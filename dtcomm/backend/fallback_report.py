"""What the backend did itself and what it handed on, by name."""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

_log = logging.getLogger("dtcomm.backend")


@dataclass
class Ledger:
    """The account of one group: what was handed on, to whom and why."""

    name: str
    handed: Counter[tuple[str, str, str]] = field(default_factory=Counter)

    def hand(self, what: str, to: str, why: str) -> None:
        """Write down one operation that somebody else carries out; the first of its kind is also logged."""
        entry = (what, to, why)
        if entry not in self.handed:
            _log.debug("group %s: %s goes to %s: %s", self.name, what, to, why)
        self.handed[entry] += 1


@dataclass(frozen=True)
class Report:
    """One entry a live group, made at the time of the call.

    ``groups`` are plain values (JSON can take them): name, ranks, runtime ("native", "process_group", or "none"
    where nothing was moved yet), why, operations and bytes of the runtime, and ``handed``: what, to, why, times.
    """

    groups: tuple[dict[str, Any], ...]

    def __str__(self) -> str:
        lines = []
        for group in self.groups:
            ranks = ", ".join(map(str, group["ranks"][:16])) + (", ..." if len(group["ranks"]) > 16 else "")
            lines.append(f"group {group['name']} (ranks {ranks}): {group['runtime']}: {group['why']}")
            lines.append(f"  {group['operations']} operations, {group['wire_bytes']} bytes sent by this rank")
            for handed in group["handed"]:
                lines.append(
                    f"  handed to {handed['to']}: {handed['what']}, {handed['times']} times: {handed['why']}"
                )
        return "\n".join(lines) if lines else "no group of the backend dtcomm"


_groups: weakref.WeakSet[Any] = weakref.WeakSet()


def add(group: Any) -> None:
    """Have the group stand in reports as long as it lives."""
    _groups.add(group)


def report(group: Any = None) -> Report:
    """What the groups of this backend did natively and what they handed on; ``group``: that one alone."""
    chosen = [each for each in _groups if not each.over] if group is None else [group]
    return Report(tuple(sorted((each.account() for each in chosen), key=lambda entry: str(entry["name"]))))
