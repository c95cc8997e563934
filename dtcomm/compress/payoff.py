"""Whether compression pays: steps with it and without it are timed in turn, and only that is claimed."""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from dtcomm.collectives import all_reduce

#: Times that differ by less than this factor count as equal.
EQUAL_TIMES = 1.03
#: How often chance alone may win as many pairs as are asked of a claim.
CHANCE = 0.05
TURN_STEPS = 2  # the first step of a turn changes codecs, and the second is timed
FIRST_SKIPPED = (
    3  # steps before the first turn: DDP rebuilds its buckets, memory is touched for the first time
)


VERIFY = "verify=20 measures it in the first steps"
COMPARE = "compare the time of a step with that of a run with DTCOMM_DISABLE=1"


@dataclass(frozen=True, kw_only=True)
class Payoff:
    """The measured times of steps with and without compression; ``str()`` says whether compression paid.

    Attributes:
        compressed_ms: Milliseconds with compression.
        uncompressed_ms: Milliseconds without.
        scope: What the milliseconds are.
        baseline: What communicates without compression.
        pairs: The pairs of steps that were compared; 0: a decision of "auto", which has a test of its own.
        won: The pairs in which compression was faster.
    """

    compressed_ms: float
    uncompressed_ms: float
    scope: str
    baseline: str = "codec none"
    pairs: int = 0
    won: int = 0

    @property
    def verdict(self) -> str:
        """``"paid"``, ``"did not pay"`` or ``"made no difference"``, which pairs that chance can explain do not."""
        faster = max(self.won, self.pairs - self.won)
        tail = sum(math.comb(self.pairs, won) for won in range(faster, self.pairs + 1)) / 2**self.pairs
        if not self.pairs or tail <= CHANCE:
            gain = self.uncompressed_ms / self.compressed_ms if self.compressed_ms else 1.0
            if gain > EQUAL_TIMES and (not self.pairs or 2 * self.won > self.pairs):
                return "paid"
            if gain < 1 / EQUAL_TIMES and (not self.pairs or 2 * self.won < self.pairs):
                return "did not pay"
        return "made no difference"

    def __str__(self) -> str:
        pairs = f", faster in {self.won} of {self.pairs} pairs of steps" if self.pairs else ""
        saved, verdict = self.uncompressed_ms - self.compressed_ms, self.verdict
        gain = "" if verdict.endswith("difference") else f": {abs(saved):.3g} ms per step"
        return (
            f"{verdict}{gain and gain + (' saved' if saved > 0 else ' lost')} ({self.compressed_ms:.3g} ms of "
            f"{self.scope}, {self.uncompressed_ms:.3g} ms with {self.baseline}{pairs})"
            + ("" if verdict == "paid" else "; remove it")
        )


class StepPairs:
    """Lets steps with and without compression take turns, in random order within a pair, and compares their times.

    Call `begin_step` on all ranks with each step; ``compresses`` then says whether it is one with compression.

    Args:
        wanted: The number of pairs.
        scope: What is timed.
        baseline: What communicates without compression.
        agree: Returns the largest of all ranks' values, element by element.
    """

    def __init__(
        self, wanted: int, scope: str, baseline: str, agree: Callable[[Sequence[float]], list[float]]
    ) -> None:
        self.compresses = True
        self._wanted, self._scope, self._baseline, self._agree = wanted, scope, baseline, agree
        self._random = random.Random(wanted)
        self._turns: list[bool] = []  # of this pair that are not over, the current one included
        self._own: dict[bool, float] = {}  # this rank's seconds in this pair, by whether it compressed
        self._pairs: list[
            tuple[float, float]
        ] = []  # seconds on the slowest rank, uncompressed and compressed
        self._act_at: int | None = None

    @property
    def running(self) -> bool:
        """Whether pairs are still to be measured."""
        return len(self._pairs) < self._wanted

    def reads_clock(self, step: int) -> bool:
        """Return whether `begin_step` needs the time of the step before."""
        return self.running and self._act_at is not None and step >= self._act_at

    def begin_step(self, step: int, warmup: int, seconds: float) -> bool:
        """Begin a step on all ranks, after one that took ``seconds`` on this rank; return whether a turn ended.

        ``warmup`` is the first step in which there is compression.
        """
        if self._act_at is None:
            self._act_at = max(step, warmup) + FIRST_SKIPPED
        if not self.reads_clock(step):
            return False
        if self._turns:
            self._own[self._turns.pop(0)] = seconds
            if not self._turns:
                uncompressed, compressed = self._agree([self._own[False], self._own[True]])
                self._pairs.append((uncompressed, compressed))
        if not self._turns and self.running:
            self._turns = [False, True]
            self._random.shuffle(self._turns)
        self.compresses = self._turns[0] if self._turns else True
        self._act_at = step + TURN_STEPS
        return True

    @property
    def payoff(self) -> Payoff | None:
        """The result; None before the last pair."""
        if self.running:
            return None
        uncompressed, compressed = (statistics.median(times) for times in zip(*self._pairs, strict=True))
        return Payoff(
            compressed_ms=compressed * 1e3,
            uncompressed_ms=uncompressed * 1e3,
            scope=self._scope,
            baseline=self._baseline,
            pairs=self._wanted,
            won=sum(with_it < without for without, with_it in self._pairs),
        )

    def __str__(self) -> str:
        return f"being measured: {len(self._pairs)} of {self._wanted} pairs of steps are over"


class ForwardPairs(StepPairs):
    """`StepPairs` whose steps last from one call of `begin` to the next, alike on all ranks of some groups.

    Args:
        wanted: The number of pairs.
        scope: What is timed.
        groups: Returns the groups whose slowest rank counts.
    """

    def __init__(
        self, wanted: int, scope: str, groups: Callable[[], Iterable[dist.ProcessGroup | None]]
    ) -> None:
        def largest(values: Sequence[float]) -> list[float]:
            tensor = torch.tensor(values, dtype=torch.float64)
            for group in groups():
                all_reduce(tensor, "max", group=group)
            return [float(value) for value in tensor]

        super().__init__(wanted, scope, "codec none", largest)
        self._steps, self._began_at = 0, 0.0

    def begin(self) -> None:
        """Begin a step."""
        if not self.running:
            return
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # the host may be steps ahead
        self.begin_step(self._steps, 0, time.perf_counter() - self._began_at)
        self._steps, self._began_at = self._steps + 1, time.perf_counter()


def unmeasured(pairs: StepPairs | None = None, remedy: str = COMPARE) -> str:
    """Return what a report says where nothing was measured yet; ``remedy`` says how it is measured."""
    return f"not measured: {remedy}" if pairs is None else str(pairs)
