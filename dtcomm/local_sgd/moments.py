"""Averages the moments of the inner optimizer on periods of their own.

Iacob et al. 2025, "DES-LOC: Desynced Low Communication Adaptive Optimizers" (arXiv:2505.22549).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist

from dtcomm.arguments import require_int
from dtcomm.collectives import Algorithm, all_reduce_coalesced
from dtcomm.compress.bucket import NONE, BucketLayout, build_layout
from dtcomm.compress.policy import CodecChoice
from dtcomm.compress.traffic import total_seconds
from dtcomm.local_sgd.islands import local_shard


class MomentAverager:
    """Averages the state of an optimizer over a group, each kind of state after so many steps, uncompressed.

    A parameter without the state on a rank counts as zeros there. ``periods`` has the steps between two averages by the
    key of a state tensor, such as "exp_avg"; ``layouts`` has what was sent of each kind so far.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        periods: Mapping[str, int],
        parameters: Mapping[str, torch.Tensor],
        group: dist.ProcessGroup | None,
        algorithm: Algorithm,
    ) -> None:
        for key, period in periods.items():
            require_int(f"moments[{key!r}]", period, 1)
        self._optimizer, self._periods, self._parameters = optimizer, dict(periods), parameters
        self._group, self._algorithm = group, algorithm
        self.layouts: dict[str, BucketLayout] = {}

    @torch.no_grad()
    def step(self, step: int) -> None:
        """Average what is due after a step; all ranks call it. ValueError if the optimizer has no such state."""
        for key, period in self._periods.items():
            if step % period == 0:
                self._average(key)

    def _average(self, key: str) -> None:
        states = {name: self._optimizer.state.get(p, {}).get(key) for name, p in self._parameters.items()}
        if all(state is None for state in states.values()):
            keys = {key for state in self._optimizer.state.values() for key in state}
            raise ValueError(
                f"moments: the state of {type(self._optimizer).__name__} has no {key!r}; "
                f"valid: {', '.join(sorted(keys)) or 'none before its first step'}"
            )
        shards = {name: local_shard(parameter) for name, parameter in self._parameters.items()}
        for name, state in states.items():
            if state is not None and local_shard(state).numel() != shards[name].numel():
                raise ValueError(
                    f"moments: {key!r} of {name} has {local_shard(state).numel()} elements, the parameter "
                    f"{shards[name].numel()}; only states with a value for each element can be averaged"
                )
        values = [
            torch.zeros_like(shards[name]) if state is None else local_shard(state)
            for name, state in states.items()
        ]
        buffer = torch.cat([value.flatten().float() for value in values])
        layout = self.layouts.get(key) or self.layouts.setdefault(key, self._layout(key, buffer))
        work = all_reduce_coalesced(
            [buffer],
            "avg",
            codec="none",
            algorithm=self._algorithm,
            group=self._group,
            async_op=True,
            bucket_bytes=1 << 40,
        )
        work.wait()
        layout.messages += 1
        layout.wire_bytes += work.wire_bytes
        layout.seconds = total_seconds((layout.seconds, work.seconds))
        means = torch.split(buffer, [value.numel() for value in values])
        for value, mean in zip(values, means, strict=True):
            value.copy_(mean.view_as(value))

    def _layout(self, key: str, buffer: torch.Tensor) -> BucketLayout:
        shards = {f"{name}: {key}": local_shard(p) for name, p in self._parameters.items()}
        parts = torch.split(buffer, [shard.numel() for shard in shards.values()])
        choice = CodecChoice(codec=NONE, reason="a moment of the optimizer")
        return build_layout(buffer, zip(shards, parts, strict=True), (), lambda name, part: choice)
