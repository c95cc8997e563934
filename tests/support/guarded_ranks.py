"""Simulated ranks with a guard each, in one process: what the DDP hook does, without processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from dtcomm.compress.bucket import Segment
from dtcomm.compress.error_state import PendingGradient
from dtcomm.compress.feedback import common_momentum
from dtcomm.compress.guard import Guard
from dtcomm.compress.measurements import ErrorSample, l2_norm
from dtcomm.compress.monitor import Monitor
from tests.support.simulated_ranks import SimulatedRanks


class GuardedRanks(SimulatedRanks):
    """`SimulatedRanks` whose guards measure every average and exchange their statistics.

    Args:
        spec, ranks, parameters, options: As for `SimulatedRanks`.
        guard: The limits.
        sample_every: Steps from one measurement of encoding errors to the next; 0: never.
        held_to_error: Whether `Guard.error` applies, as in FSDP without feedback.
        spoil: What is done, in place, to each step's averages before guards and caller see them.
    """

    def __init__(
        self,
        spec: Any,
        ranks: int,
        parameters: Sequence[tuple[str, torch.Tensor]],
        guard: Guard | None = None,
        sample_every: int = 0,
        held_to_error: bool = False,
        spoil: Callable[[Sequence[torch.Tensor]], None] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(spec, ranks, parameters, **options)
        guard = guard or Guard()
        momentum = common_momentum(rule.codec for rule in self.policy.rules)
        self.monitors = [Monitor(guard, ranks=(rank, ranks), momentum=momentum) for rank in range(ranks)]
        self._stats: list[torch.Tensor] = []
        self._sample_every, self._held_to_error, self._spoil = sample_every, held_to_error, spoil
        self._samples: list[list[ErrorSample]] = [[] for _ in range(ranks)]

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
        for monitor, error_state, buffer in zip(self.monitors, self.error_states, buffers, strict=True):
            monitor.begin_step(step)
            for name in monitor.pop_resets():
                error_state.reset(name)
            measurements.append(monitor.measure_gradient(layout, buffer))
        self._stats = [monitor.stats_tensor() for monitor in self.monitors]
        means = super().average(gradients)
        if self._spoil is not None:
            self._spoil(means)
        result = torch.cat([mean.flatten() for mean in means])
        for monitor, measurement in zip(self.monitors, measurements, strict=True):
            monitor.record_mean(measurement, layout, result)
        return means

    def _prepare(self, rank: int, segment: Segment, gradient: torch.Tensor) -> PendingGradient:
        sampled = self._sample_every > 0 and (self.steps - 1) % self._sample_every == 0
        norm = l2_norm(gradient) if sampled else 0.0
        prepared = self.error_states[rank].prepare(segment, gradient, self.all_reduce.ranks, sampled=sampled)
        if sampled:
            sample = ErrorSample.take(segment.name, segment.codec, norm, prepared.sent, prepared.residual)
            self.monitors[rank].register_sample(sample.name, sample.scheme, self._held_to_error)
            self._samples[rank].append(sample)
        return prepared

    def _record_errors(self, rank: int, pending: Sequence[PendingGradient]) -> None:
        for sample, prepared in zip(self._samples[rank], pending):
            if prepared.residual is not None:
                self.monitors[rank].record_error(sample, prepared.residual)
        self._samples[rank].clear()


def _evaluate(monitor: Monitor, step: int, mean: torch.Tensor) -> Exception | None:
    try:
        monitor.evaluate(step, mean)
    except Exception as error:
        return error
    return None
