"""An exchange whose last rank comes at the deadline."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from dtcomm.runtime.bootstrap.store_exchange import Deadline, StoreExchange


class LateStore(dist.HashStore):  # type: ignore[misc, name-defined]
    """A store in which rank 1's key appears after the first look for all keys."""

    def check(self, keys: list[str]) -> bool:
        present: bool = super().check(keys)
        if len(keys) > 1:
            self.set("prefix/0/1", '{"value": 1}')
        return present


def test_a_rank_that_comes_at_the_deadline_is_not_late() -> None:
    exchange = StoreExchange(LateStore(), "prefix", 0, [4, 5], Deadline(timedelta(0)))
    assert exchange.all_gather({"value": 0}) == [{"value": 0}, {"value": 1}]
