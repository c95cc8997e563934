"""The prepared plans of a communicator, bounded in number and memory; ``dtcomm.collectives`` fills it."""

from __future__ import annotations

from collections.abc import Hashable

from dtcomm.runtime import warm_calls
from dtcomm.runtime.types import Plan

# A program whose sizes always change makes a plan for every call, which must not take memory without end.
MAX_PLANS = 4096
MAX_BYTES = 64 << 20


class PlanCache(dict[Hashable, Plan]):
    """Plans by the arguments of a call. Beyond a bound all but the newest are dropped and made again.

    Attributes:
        table_bytes: The memory that the plans take, by their own count.
    """

    def __init__(self) -> None:
        super().__init__()
        self._bytes_of: dict[Hashable, int] = {}
        self.table_bytes = 0

    def keep(self, key: Hashable, plan: Plan, table_bytes: int) -> None:
        """Keep a plan that takes ``table_bytes`` of memory, in place of another one of the same key."""
        self.pop(key, None)
        self.table_bytes += table_bytes - self._bytes_of.pop(key, 0)
        if self.table_bytes > MAX_BYTES or len(self) >= MAX_PLANS:
            self.clear()
            self.table_bytes = table_bytes
        self[key] = plan
        self._bytes_of[key] = table_bytes

    def clear(self) -> None:
        """Drop all plans."""
        warm_calls.forget()
        super().clear()
        self._bytes_of.clear()
        self.table_bytes = 0
