"""``compress(model, "auto")``: tries candidates on the first training steps, and keeps what is shown to be faster.

1. A few steps go uncompressed, until DDP has built its buckets. Ranks that share memory stay so.
2. The candidates take turns on real steps with plain DDP, which stays unless one of them is shown to be faster
   (`Trials`).
3. The choice is logged with its reason and kept. `DDPState.retune` begins again, and so does a checkpoint without a
   choice or of a job with another number of ranks.

Every decision is made by all ranks in the same step, from the largest of their step times. On a GPU a candidate is not
tried further if the host takes as long to launch its kernels and calls as a step takes with plain DDP.

Step times of a shared machine vary by 10 to 20 %, drift, and come in bursts. So `Trials` compares times only within a
block, in which the baseline and every candidate take one turn each, in random order:

1. **Selection** by sequential halving (Karnin, Koren and Somekh, "Almost Optimal Exploration in Multi-Armed Bandits",
   ICML 2013): a few blocks with all candidates, then with the better half of them, until one is left.
2. **Confirmation** on new blocks of that one and the baseline, by a sequential sign test (Wald, "Sequential Tests of
   Statistical Hypotheses", 1945). A block counts as won or lost, whatever the times. Since the order is random, a
   candidate that is no faster wins every second block at most on average, however times vary, and the test accepts it
   with the probability ``risk`` at most.
"""

from __future__ import annotations

import logging
import math
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from dtcomm import env
from dtcomm.codecs import codec
from dtcomm.collectives import all_reduce, info
from dtcomm.compress.checkpoint import rank_and_size
from dtcomm.compress.feedback import DGC
from dtcomm.compress.guard import Event
from dtcomm.compress.payoff import FIRST_SKIPPED, TURN_STEPS, StepPairs
from dtcomm.compress.policy import CodecChoice, Policy, default_policy
from dtcomm.compress.powersgd import PowerSGD
from dtcomm.compress.spec import AUTO, LevelCodecs, Scheme, gaussian_error, parse_scheme
from dtcomm.ddp.layouts import Chooser
from dtcomm.planner.select_algorithm import DEVICE_OVERHEAD

CANDIDATES = ("bf16:round=stochastic", "int8", "int4")
NONE = codec("none")
BASELINE = "plain DDP"
SCOPE = "a step from its first bucket to its last"

RISK = 0.01  # of all trials of a run, to accept a candidate that is no faster; every trial takes half of what is left

SELECTION_TURNS = 20  # of a round, about; rounds with fewer candidates have more blocks
MIN_BLOCKS = 3  # of a round; one slow step does not change a median of three
NEAR = 1.2  # times the best candidate; those behind it are dropped at the end of a round
SAME = 1.02  # times the best candidate; of these, if faster than the baseline, the one with the least error stays
LOSSY_GAIN = 1.03  # by which a lossy candidate must be faster than the baseline
WIN_RATE = 0.8  # of a candidate that is worth accepting
MISSED = 0.05  # of the candidates that win so often may be rejected
MAX_PAIRS = 100  # of a confirmation; nothing is accepted if it has not ended by then

_log = logging.getLogger("dtcomm")


@dataclass(frozen=True)
class Plan:
    """What all gradients are compressed with; parameters that `default_policy` leaves out stay uncompressed.

    With ``bypass`` they are sent uncompressed, by the group's own backend, as DDP does it without a hook.
    """

    scheme: Scheme
    bypass: bool = False

    @property
    def lossless(self) -> bool:
        """Whether nothing is lost."""
        return self.scheme == NONE

    @property
    def error(self) -> float:
        """The relative error of one encoding of Gaussian numbers; 1 for a compressor, which depends on the data."""
        if isinstance(self.scheme, LevelCodecs):
            return max(gaussian_error(self.scheme.inside), gaussian_error(self.scheme.between))
        return 1.0 if isinstance(self.scheme, PowerSGD | DGC) else gaussian_error(self.scheme)

    def __str__(self) -> str:
        return BASELINE if self.bypass else str(self.scheme)


UNCOMPRESSED = Plan(NONE)
PLAIN_DDP = Plan(NONE, bypass=True)


def parse_candidates(candidates: Sequence[str | Scheme] | None) -> tuple[Scheme, ...]:
    """Return the schemes that "auto" may choose from, by default `CANDIDATES`; "none" is always the first of them.

    ValueError if ``candidates`` is not a list, or contains DGC.
    """
    candidates = CANDIDATES if candidates is None else candidates
    if isinstance(candidates, str) or not candidates:
        raise ValueError(f"candidates={candidates!r}: expected a list of specs, such as {list(CANDIDATES)}")
    schemes = tuple(dict.fromkeys((NONE, *(parse_scheme(spec, "candidates") for spec in candidates))))
    if any(isinstance(scheme, DGC) for scheme in schemes):
        raise ValueError("candidates: dgc replaces the optimizer's momentum and cannot come and go")
    return schemes


class ProcessGroupConsensus:
    """What "auto" asks about all ranks; calls are made on all ranks in the same order.

    Attributes:
        device: The device of the gradients; None for the CPU.
        agreeing_groups: Other groups whose ranks choose the same, such as those of tensor parallelism. Default: none.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self.ranks = rank_and_size(group)[1]
        self.device: torch.device | None = None
        self.agreeing_groups: Sequence[dist.ProcessGroup] = ()

    def max(self, values: Sequence[float]) -> list[float]:
        """Return the largest of all ranks' values, element by element."""
        tensor = torch.tensor(values, dtype=torch.float64)
        for group in (self._group, *self.agreeing_groups):
            all_reduce(tensor, "max", group=group)
        largest: list[float] = tensor.tolist()
        return largest

    def in_memory(self) -> bool:
        """Return whether all ranks share one host's memory."""
        in_memory = self._own_link_is_memory()
        if self.agreeing_groups:
            in_memory = not self.max([float(not in_memory)])[0]
        return in_memory

    def _own_link_is_memory(self) -> bool:
        if self.device is not None:  # the links between devices are not the host's memory
            return False
        transport = info(self._group)
        return not self.emulated() and transport["runtime"] == "native" and transport["hosts"] == 1

    def emulated(self) -> bool:
        """Return whether DTCOMM_EMULATE_LINK slows dtcomm's messages: the group's own backend then tells nothing."""
        return bool(env.get("DTCOMM_EMULATE_LINK"))


@dataclass(frozen=True, kw_only=True)
class Decision(Event):
    """A choice of "auto": ``value`` is the seconds of a step's communication with it, ``limit`` those with plain DDP.

    ``reason`` says what else was tried.
    """

    reason: str

    def __str__(self) -> str:
        times = f"{self.value * 1e3:.1f} ms (plain DDP {self.limit * 1e3:.1f}); " if self.limit else ""
        return f"step {self.step}: auto: {self.action}; {times}{self.reason}"


class Tuner(Chooser):
    """A `Chooser` that tries its candidates; `TunerObserver` attaches it to the reducer.

    ``excluded`` has the rules of what stays uncompressed whatever it chooses. ``plan`` is in force, and the choice once
    ``settled``. ``buckets`` are those of the last step.
    """

    def __init__(
        self,
        candidates: Sequence[str | Scheme] | None,
        consensus: ProcessGroupConsensus,
        excluded: Policy | None = None,
    ) -> None:
        self.schemes = parse_candidates(candidates)
        self.plan = UNCOMPRESSED
        self.settled = False
        self.buckets = 0
        self.decisions: list[Decision] = []
        self.rows: list[dict[str, Any]] = []
        self._consensus = consensus
        self._excluded = excluded or Policy(rules=())
        self._begins = True  # with the next step: to try, or to continue with a choice that was loaded
        self._in_memory = False
        self._act_at = 0  # the step in which trials begin or a turn ends
        self._seconds = 0.0  # of the last step
        self._trials: Trials | None = None
        self._trials_begun = 0
        self._names: dict[str, None] = {}  # of the parameters seen
        self._changed: list[str] = []
        self._uncompressed: list[str] = []

    def __str__(self) -> str:
        return AUTO

    def choose(self, name: str, gradient: torch.Tensor) -> CodecChoice:
        self._names[name] = None
        if self.plan.scheme != NONE:
            return (self._excluded | default_policy(self.plan.scheme)).choose(name, gradient)
        reason = "auto" if self.settled else "auto: trying"
        return CodecChoice(codec=NONE, reason=f"auto: {BASELINE}" if self.bypass else reason)

    def pop_changes(self) -> list[str]:
        """Return the parameters whose scheme changes in this step, once."""
        popped, self._changed = self._changed, []
        return popped

    def pop_uncompressed(self) -> list[str]:
        """Return the parameters that a choice left uncompressed, whose residuals are to be repaid, once."""
        popped, self._uncompressed = self._uncompressed, []
        return popped

    def set_device(self, device: torch.device) -> None:
        """Tell the tuner where gradients are."""
        self._consensus.device = None if device.type == "cpu" else device

    def reads_clock(self, step: int) -> bool:
        """Return whether `begin_step` of this step needs the times of all steps before it."""
        return not self.settled and not self._begins and step >= self._act_at and self._consensus.ranks > 1

    def begin_step(self, step: int) -> None:
        """Begin a step, on all ranks: act, if the first steps or a turn of a candidate are over."""
        if self._begins:
            self._begins, self._act_at = False, step + FIRST_SKIPPED
            if self._consensus.ranks > 1 and self._consensus.in_memory():
                self._settle_in_memory(step)
        if not self.reads_clock(step):
            return
        if self._trials is None:
            self._trials = self._new_trials()
        else:
            self._trials.add_turn(self._seconds)
        if self._trials.running:
            self._install(self._trials.current)
            self._act_at = step + TURN_STEPS
        else:
            self._decide(step, self._trials)

    def end_step(self, step: int, seconds: float) -> None:
        """Record a step: the seconds from its first bucket until the last one was the mean."""
        self._seconds = seconds

    def retune(self) -> None:
        """Try the candidates again, from the next step on."""
        self._begins, self.settled, self._in_memory, self._trials = True, False, False, None
        self._install(UNCOMPRESSED)

    def state_dict(self) -> dict[str, Any]:
        """Return the choice in force; empty if there is none, or if it says only that ranks share memory."""
        if not self.settled or self._in_memory:
            return {}
        return {"chosen": str(self.plan.scheme), "bypass": self.bypass}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with a saved choice; if there is none, try."""
        self.retune()
        if state:
            self._install(Plan(parse_scheme(state["chosen"]), state["bypass"]))
            self.settled, self._changed = True, []  # the factors come from the same checkpoint

    def _new_trials(self) -> Trials:
        plans = [PLAIN_DDP, *map(Plan, self.schemes)]
        if self._consensus.emulated():
            plans.remove(PLAIN_DDP)
        self._trials_begun += 1
        return Trials(
            plans[1:],
            plans[0],
            risk=RISK * 0.5**self._trials_begun,
            seed=self._trials_begun,
            agree=self._consensus.max,
            host_seconds=self._host_seconds(),
        )

    def _host_seconds(self) -> float:
        """Return what launching the kernels and calls of codecs takes of the host in a step, at least."""
        return 0.0 if self._consensus.device is None else self.buckets * DEVICE_OVERHEAD

    def _decide(self, step: int, trials: Trials) -> None:
        chosen = trials.chosen
        assert chosen is not None
        tried = list(zip((*trials.candidates, trials.baseline), trials.step_seconds(), strict=True))
        self.rows = [
            {"plan": str(plan), "measured_ms": round(seconds * 1e3, 3), "chosen": plan is chosen}
            for plan, seconds in tried
        ]
        others = [f"{plan} {seconds * 1e3:.1f} ms" for plan, seconds in tried if plan is not chosen]
        reason = f"{trials}; tried {', '.join(others) or 'nothing else'}"
        if host_seconds := self._host_seconds():
            reason += (
                f"; the host takes {host_seconds * 1e3:.1f} ms or more to launch a codec's kernels and calls"
            )
        if chosen.bypass:
            reason += (
                "; a hook costs DDP a pass over the gradients: without `compress` steps are shorter still"
            )
        chosen_seconds = next(seconds for plan, seconds in tried if plan is chosen)
        self._settle(step, chosen, reason, chosen_seconds, tried[-1][1])

    def _settle_in_memory(self, step: int) -> None:
        self._in_memory = True
        reason = "all ranks share this host's memory, where bytes cost less than encoding them"
        self._settle(step, UNCOMPRESSED, reason)

    def _settle(self, step: int, plan: Plan, reason: str, value: float = 0.0, limit: float = 0.0) -> None:
        self._install(plan)
        self.settled, self._trials = True, None
        if plan.scheme == NONE:
            self._uncompressed = list(self._names)
        decision = Decision(
            step=step, kind=AUTO, name="", value=value, limit=limit, action=str(plan), reason=reason
        )
        _log.info("%s", decision)
        self.decisions.append(decision)

    def _install(self, plan: Plan) -> None:
        if plan.scheme != self.plan.scheme:
            self._changed = list(self._names)
        self.plan, self.bypass, self.in_stages = plan, plan.bypass, isinstance(plan.scheme, PowerSGD)
        self.revision += 1


class Verifier(Chooser):
    """A `Chooser` of a policy that takes turns with plain DDP for ``wanted`` pairs of steps; residuals are kept.

    Attributes:
        pairs: What was measured.
    """

    COMPRESSES = 1  # the revision of the steps with compression

    def __init__(self, policy: Policy, wanted: int, warmup: int, consensus: ProcessGroupConsensus) -> None:
        super().__init__(policy)
        self._warmup, self._consensus, self._seconds = warmup, consensus, 0.0
        baseline = f"codec {NONE}" if consensus.emulated() else BASELINE
        self.pairs = StepPairs(wanted, SCOPE, baseline, consensus.max)

    def choose(self, name: str, gradient: torch.Tensor) -> CodecChoice:
        if self.pairs.compresses:
            return super().choose(name, gradient)
        return CodecChoice(codec=NONE, reason="verify: a step without compression")

    def reads_clock(self, step: int) -> bool:
        """Return whether `begin_step` needs the time of the step before."""
        return self.pairs.reads_clock(step)

    def begin_step(self, step: int) -> None:
        """Begin a step, on all ranks, perhaps with another turn."""
        self.pairs.begin_step(step, self._warmup, self._seconds)
        self.bypass = not self.pairs.compresses and not self._consensus.emulated()
        self.revision = self.COMPRESSES if self.pairs.compresses else 0

    def end_step(self, step: int, seconds: float) -> None:
        """Record a step: the seconds from its first bucket until the last one was the mean."""
        self._seconds = seconds


class Trials:
    """One selection and one confirmation.

    Call `add_turn` with the step time of `current` until `running` is False; then `chosen` is the result.

    Args:
        risk: The probability with which a candidate that is no faster may be accepted.
        seed: The seed of the order of turns, the same on all ranks.
        agree: Returns the largest of all ranks' values, element by element.
        host_seconds: What every candidate takes of the host in a step, at least. All are dropped once a step of the
            baseline takes no longer.

    Attributes:
        seconds: The step times on the slowest rank, by candidate; those of the baseline are the last.
        won: The blocks of the confirmation in which the candidate was faster.
        lost: The others.
    """

    def __init__(
        self,
        candidates: Sequence[Plan],
        baseline: Plan,
        *,
        risk: float,
        seed: int,
        agree: Callable[[Sequence[float]], list[float]],
        host_seconds: float = 0.0,
    ) -> None:
        self.candidates, self.baseline = list(candidates), baseline
        self.seconds: list[list[float]] = [[] for _ in range(len(candidates) + 1)]
        self.won = self.lost = 0
        self.chosen: Plan | None = None
        self._risk, self._random, self._agree = risk, random.Random(seed), agree
        self._host_seconds = host_seconds
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
    def current(self) -> Plan:
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
        if self._host_seconds >= times[-1] > 0:
            self.chosen = self.baseline
        elif len(self._left) > 1:
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
            finalist = self.candidates[self._left[0]]
            fast_enough = finalist.lossless or self._ratio() * LOSSY_GAIN <= 1
            self.chosen = finalist if fast_enough else self.baseline
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
