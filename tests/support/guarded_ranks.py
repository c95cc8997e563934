"""Simulated ranks with a guard each, in one process: what the DDP hook does, without processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dtcomm.compress.feedback import common_momentum
from dtcomm.compress.guard import Guard
from dtcomm.compress.monitor import GuardMonitor
from tests.support.simulated_ranks import SimulatedRanks


class GuardedRanks(SimulatedRanks):
    """`SimulatedRanks` whose guards measure every average and exchange their statistics.

    Args:
        spec, ranks, parameters, options: As for `SimulatedRanks`.
        guard: The limits.
    """

    def __init__(
        self,
        spec: Any,
        ranks: int,
        parameters: Sequence[tuple[str, torch.Tensor]],
        guard: Guard | None = None,
        **options: Any,
    ) -> None:
        super().__init__(spec, ranks, parameters, **options)
        guard = guard or Guard()
        momentum = common_momentum(rule.codec for rule in self.policy.rules)
        self.monitors = [GuardMonitor(guard, ranks=(rank, ranks), momentum=momentum) for rank in range(ranks)]
        self._stats: list[torch.Tensor] = []

    def average(self, gradients: Sequence[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
        """Return the averaged gradients; raises what a guard raises, on the ranks that must do so alike."""
        step = self.steps
        if self._stats:
            mean = torch.stack(self._stats).mean(dim=0)
            raised = [_evaluate(monitor, step, mean) for monitor in self.monitors]
            if raised[0] is not None:
                assert all(str(error) == str(raised[0]) for error in raised)
                raise raised[0]
        buffers = [torch.cat([gradient.flatten() for gradient in own]) for own in gradients]
        layout = self._layout(buffers[0], step)
        measurements = []
        for monitor, buffer in zip(self.monitors, buffers, strict=True):
            monitor.begin_step(step)
            measurements.append(monitor.measure_gradient(layout, buffer))
        self._stats = [monitor.stats_tensor() for monitor in self.monitors]
        means = super().average(gradients)
        result = torch.cat([mean.flatten() for mean in means])
        for monitor, measurement in zip(self.monitors, measurements, strict=True):
            monitor.record_mean(measurement, layout, result)
        return means


def _evaluate(monitor: GuardMonitor, step: int, mean: torch.Tensor) -> Exception | None:
    try:
        monitor.evaluate(step, mean)
    except Exception as error:
        return error
    return None
