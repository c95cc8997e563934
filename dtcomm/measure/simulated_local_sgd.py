"""Local SGD, DiLoCo and Streaming DiLoCo of several workers simulated in one thread, bit for bit.

The reference for `dtcomm.local_sgd.LocalSGD`, with its arithmetic and ``algorithm="one_shot"``. Used by tests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from dtcomm.compress.feedback import Feedback
from dtcomm.measure.simulated_ranks import SimulatedRanks


@dataclass
class _Average:
    """The mean of a fragment's differences, which is applied after the step ``due``."""

    fragment: int
    due: int
    means: list[torch.Tensor]


class SimulatedLocalSGD:
    """Averages the replicas of a model; call `step` after each of them has made an optimizer step.

    Args:
        replicas: The model of each worker, with the same weights.
        every: As for `dtcomm.local_sgd.LocalSGD`, as for the others.
        spec: What the differences are compressed with.
        fragments: The names of the parameters of each fragment. Default: one fragment with all of them.
        outer: Makes the outer optimizer.
        delay: The number of steps from the start of an average until it is applied.
        mixing: The weight of the common weights when an average is applied.
        feedback: Error feedback.

    Attributes:
        common: The common weights by name.
        steps: The number of steps.
        sent: The bytes of one worker's payloads in each step.
    """

    def __init__(
        self,
        replicas: Sequence[torch.nn.Module],
        every: int,
        spec: str,
        *,
        fragments: Sequence[Sequence[str]] = (),
        outer: Callable[[list[torch.Tensor]], torch.optim.Optimizer] | None = None,
        delay: int = 0,
        mixing: float = 1.0,
        feedback: bool | str | Feedback = True,
    ) -> None:
        self._replicas = [dict(replica.named_parameters()) for replica in replicas]
        self.common = {name: weight.detach().clone() for name, weight in self._replicas[0].items()}
        self.steps = 0
        self.sent: list[int] = []
        self._every, self._delay, self._mixing = every, delay, mixing
        self._fragments = [list(names) for names in fragments] or [list(self.common)]
        self._outer = None if outer is None else outer(list(self.common.values()))
        self._runs = [
            SimulatedRanks(
                spec, len(replicas), [(name, self.common[name]) for name in names], feedback=feedback
            )
            for names in self._fragments
        ]
        self._in_flight: list[_Average] = []

    @torch.no_grad()
    def step(self) -> None:
        """Start and apply the averages that are due after this step."""
        self.steps += 1
        before = self._payload_bytes()
        for fragment in range(len(self._fragments)):
            first = (fragment + 1) * self._every // len(self._fragments)
            if self.steps >= first and (self.steps - first) % self._every == 0:
                self._in_flight.append(_Average(fragment, self.steps + self._delay, self._average(fragment)))
        while self._in_flight and self._in_flight[0].due <= self.steps:
            self._apply(self._in_flight.pop(0), self._mixing)
        self.sent.append(self._payload_bytes() - before)

    @torch.no_grad()
    def sync(self) -> None:
        """Apply what is in flight, then average all fragments at once."""
        before = self._payload_bytes()
        while self._in_flight:
            self._apply(self._in_flight.pop(0), self._mixing)
        for fragment in range(len(self._fragments)):
            self._apply(_Average(fragment, self.steps, self._average(fragment)), 1.0)
        self.sent.append(self._payload_bytes() - before)

    def _average(self, fragment: int) -> list[torch.Tensor]:
        """Return the mean over workers of common - own."""
        names = self._fragments[fragment]
        return self._runs[fragment].average(
            [[self.common[name] - replica[name] for name in names] for replica in self._replicas]
        )

    def _apply(self, average: _Average, mixing: float) -> None:
        names = self._fragments[average.fragment]
        for name, mean in zip(names, average.means, strict=True):
            if self._outer is None:
                self.common[name] -= mean
            else:
                self.common[name].grad = mean.clone()
        if self._outer is not None:
            self._outer.step()
            self._outer.zero_grad()
        for replica in self._replicas:
            for name in names:
                replica[name].copy_(torch.lerp(replica[name], self.common[name], mixing))

    def _payload_bytes(self) -> int:
        return sum(run.all_reduce.payload_bytes for run in self._runs)
