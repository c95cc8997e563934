"""The trials of "auto": candidates take turns on real steps with uncompressed DDP, and one may replace it.

Step times of a shared machine vary by 10 to 20 %, drift, and come in bursts. So times are compared only within a block,
in which the baseline and every candidate take one turn each, in random order:

1. **Selection** by sequential halving (Karnin, Koren and Somekh, "Almost Optimal Exploration in Multi-Armed Bandits",
   ICML 2013): a few blocks with all candidates, then with the better half of them, until one is left.
2. **Confirmation** on new blocks of that one and the baseline, by a sequential sign test (Wald, "Sequential Tests of
   Statistical Hypotheses", 1945). A block counts as won or lost, whatever the times. Since the order is random, a
   candidate that is no faster wins every second block at most on average, however times vary, and the test accepts it
   with the probability ``risk`` at most.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Sequence

from dtcomm.compress.autotune_model import CodecAssignment

SELECTION_TURNS = 20  # of a round, about; rounds with fewer candidates have more blocks
MIN_BLOCKS = 3  # of a round; one slow step does not change a median of three
NEAR = 1.2  # times the best candidate; those behind it are dropped at the end of a round
SAME = 1.02  # times the best candidate; of these, if faster than the baseline, the one with the least error stays
LOSSY_GAIN = 1.03  # by which a lossy candidate must be faster than the baseline
WIN_RATE = 0.8  # of a candidate that is worth accepting
MISSED = 0.05  # of the candidates that win so often may be rejected
MAX_PAIRS = 100  # of a confirmation; nothing is accepted if it has not ended by then


class Trials:
    """One selection and one confirmation.

    Call `add_turn` with the step time of `current` until `running` is False; then `chosen` is the result.

    Args:
        candidates: What may replace the baseline.
        baseline: What stays if no candidate is faster.
        risk: The probability with which a candidate that is no faster may be accepted.
        seed: The seed of the order of turns, the same on all ranks.
        agree: Returns the largest of all ranks' values, element by element.

    Attributes:
        seconds: The step times on the slowest rank, by candidate; those of the baseline are the last.
        won: The blocks of the confirmation in which the candidate was faster.
        lost: The others.
        chosen: The result; None while it runs.
        confirmed: The step time of the chosen candidate as a fraction of the baseline's, the median over the blocks of
            the confirmation; 1.0 if the baseline was chosen.
    """

    def __init__(
        self,
        candidates: Sequence[CodecAssignment],
        baseline: CodecAssignment,
        *,
        risk: float,
        seed: int,
        agree: Callable[[Sequence[float]], list[float]],
    ) -> None:
        self.candidates, self.baseline = list(candidates), baseline
        self.seconds: list[list[float]] = [[] for _ in range(len(candidates) + 1)]
        self.won = self.lost = 0
        self.chosen: CodecAssignment | None = None
        self.confirmed = 1.0
        self._risk, self._random, self._agree = risk, random.Random(seed), agree
        self._left = list(range(len(candidates)))  # candidates that have not been dropped
        self._log_ratios: list[list[float]] = [[] for _ in candidates]  # to the baseline of the same block
        self._blocks_left = 0  # of this round of the selection
        self._turns: list[int] = []  # of this block
        self._block: dict[int, float] = {}  # this rank's times in this block
        if candidates:
            self._begin_round()
        else:
            self.chosen = baseline

    @property
    def running(self) -> bool:
        """Whether a turn is to come."""
        return self.chosen is None

    @property
    def current(self) -> CodecAssignment:
        """What the next turn is of."""
        index = self._turns[0]
        return self.baseline if index == len(self.candidates) else self.candidates[index]

    def __str__(self) -> str:
        """Say what the result rests on."""
        pairs = self.won + self.lost
        if not pairs:
            return f"no candidate was faster than {self.baseline}" if self.candidates else "no candidate"
        finalist = self.candidates[self._left[0]]
        text = f"{finalist} was faster than {self.baseline} in {self.won} of {pairs} pairs of steps"
        if self.chosen is not self.baseline:
            return text
        too_small = self._ratio() < 1 and self._likelihood() > 0
        return (
            f"{text}, by less than {LOSSY_GAIN - 1:.0%}" if too_small else f"{text}: not shown to be faster"
        )

    def step_seconds(self) -> list[float]:
        """Return the median step time of each candidate, and of the baseline."""
        return [statistics.median(seconds) if seconds else 0.0 for seconds in self.seconds]

    def add_turn(self, seconds: float) -> None:
        """Add this rank's step time in the turn of `current`."""
        self._block[self._turns.pop(0)] = seconds
        if self._turns:
            return
        indices = sorted(self._block)
        times = self._agree([self._block[index] for index in indices])
        for index, time in zip(indices, times, strict=True):
            self.seconds[index].append(time)
        ratios = [math.log(max(time, 1e-9) / max(times[-1], 1e-9)) for time in times[:-1]]
        for index, ratio in zip(indices, ratios, strict=False):
            self._log_ratios[index].append(ratio)
        if len(self._left) > 1:
            self._end_selection_block()
        else:
            self._end_pair(ratios[0])

    def _begin_round(self) -> None:
        if len(self._left) == 1:
            self._log_ratios[self._left[0]] = []  # the confirmation counts new blocks only
        self._blocks_left = max(MIN_BLOCKS, SELECTION_TURNS // (len(self._left) + 1))
        self._begin_block()

    def _begin_block(self) -> None:
        self._block = {}
        self._turns = [*self._left, len(self.candidates)]
        self._random.shuffle(self._turns)

    def _end_selection_block(self) -> None:
        self._blocks_left -= 1
        if self._blocks_left:
            self._begin_block()
            return
        scores = {index: self._score(index) for index in self._left}
        best = min(scores.values())
        ranked = sorted(self._left, key=scores.__getitem__)
        if len(ranked) == 2:
            same = [index for index in ranked if scores[index] <= best + math.log(SAME) and scores[index] < 0]
            self._left = [min(same or ranked[:1], key=lambda index: self.candidates[index].error)]
        else:
            near = [index for index in ranked if scores[index] <= best + math.log(NEAR)]
            self._left = sorted(near[: (len(ranked) + 1) // 2])
        if len(self._left) == 1 and scores[self._left[0]] >= 0:
            self.chosen = self.baseline
        else:
            self._begin_round()

    def _score(self, index: int) -> float:
        """Return the median logarithm of the ratio to the baseline; below 0 is faster by as much as is asked."""
        gain = 1.0 if self.candidates[index].lossless else LOSSY_GAIN
        return statistics.median(self._log_ratios[index]) + math.log(gain)

    def _end_pair(self, log_ratio: float) -> None:
        if log_ratio < 0:
            self.won += 1
        else:
            self.lost += 1
        likelihood = self._likelihood()
        if likelihood >= -math.log(self._risk):
            finalist, ratio = self.candidates[self._left[0]], self._ratio()
            fast_enough = finalist.lossless or ratio * LOSSY_GAIN <= 1
            self.chosen, self.confirmed = (finalist, ratio) if fast_enough else (self.baseline, 1.0)
        elif likelihood <= math.log(MISSED) or self.won + self.lost >= MAX_PAIRS:
            self.chosen = self.baseline
        else:
            self._begin_block()

    def _likelihood(self) -> float:
        """Return the log-likelihood of a candidate that wins with WIN_RATE, minus that of one that wins with 1/2."""
        return self.won * math.log(2 * WIN_RATE) + self.lost * math.log(2 * (1 - WIN_RATE))

    def _ratio(self) -> float:
        """Return the median ratio of the finalist's step times to the baseline's."""
        return math.exp(statistics.median(self._log_ratios[self._left[0]]))
