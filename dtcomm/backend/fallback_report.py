"""The report of the backend: what its process groups did natively, and what fell back to other backends."""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

_log = logging.getLogger("dtcomm.backend")


@dataclass
class FallbackCounts:
    """Counts the operations of one group that other backends carried out.

    Attributes:
        name: Name of the group.
        counts: (operation, backend, reason) → number of calls.
    """

    name: str
    counts: Counter[tuple[str, str, str]] = field(default_factory=Counter)

    def record(self, operation: str, backend: str, reason: str) -> None:
        """Count one operation; the first of its kind is also logged."""
        entry = (operation, backend, reason)
        if entry not in self.counts:
            _log.debug("group %s: %s falls back to %s: %s", self.name, operation, backend, reason)
        self.counts[entry] += 1


@dataclass(frozen=True)
class Report:
    """The state of the backend's groups at the time of the call of `report`; ``str()`` gives lines of text.

    Attributes:
        groups: One dict of plain values for each live group, with the keys ``name``, ``ranks`` (global), ``runtime``
            (``"native"``, ``"process_group"``, or ``"none"`` before the first operation), ``why`` (the reason for that
            runtime), ``operations`` and ``wire_bytes`` (of the runtime, on this rank), and ``fallbacks``: dicts with
            ``operation``, ``backend``, ``why`` and ``count``.
    """

    groups: tuple[dict[str, Any], ...]

    def __str__(self) -> str:
        lines = []
        for group in self.groups:
            ranks = ", ".join(map(str, group["ranks"][:16])) + (", ..." if len(group["ranks"]) > 16 else "")
            lines.append(f"group {group['name']} (ranks {ranks}): {group['runtime']}: {group['why']}")
            lines.append(f"  {group['operations']} operations, {group['wire_bytes']} bytes sent by this rank")
            for fallback in group["fallbacks"]:
                lines.append(
                    f"  fallback to {fallback['backend']}: {fallback['operation']}, {fallback['count']} times: "
                    f"{fallback['why']}"
                )
        return "\n".join(lines) if lines else "no group of the backend dtcomm"


_groups: weakref.WeakSet[Any] = weakref.WeakSet()


def register_group(group: Any) -> None:
    """Include the group in reports as long as it lives."""
    _groups.add(group)


def report(group: Any = None) -> Report:
    """Return what the groups of the backend ``"dtcomm"`` did natively and what fell back to other backends.

    Args:
        group: A process group of this backend. Default: all live groups.

    Returns:
        The report of this rank.

    Example::

        dist.init_process_group("dtcomm")
        ...
        print(dtcomm.backend.report())
    """
    groups = [known for known in _groups if not known.closed] if group is None else [group]
    entries = (known.report_entry() for known in groups)
    return Report(tuple(sorted(entries, key=lambda entry: str(entry["name"]))))
