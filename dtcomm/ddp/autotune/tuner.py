"""The autotuner, for ``compress(model, "auto")``: it measures, tries, chooses, and checks its choice during training.

1. The first steps go uncompressed and are timed (`Measurements`).
2. What the model of `compress.autotune_model` finds promising is tried on real steps, and plain DDP beside it
   (`Trials`). The assignment with the best step time stays.
3. Every ``check_every`` steps the link is probed. If it has changed, or if steps have become slow, all of it begins
   again. At the first check the candidates that came near the choice are tried once more beside it.

Every decision is made by all ranks in the same step, from the largest of their measurements.
"""

from __future__ import annotations

import logging
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from dtcomm.compress.autotune_model import (
    BASELINE,
    NAME,
    NONE,
    AutoConfig,
    CodecAssignment,
    pick,
    propose_candidates,
)
from dtcomm.compress.guard import Event
from dtcomm.compress.policy import CodecChoice, default_policy
from dtcomm.compress.powersgd import PowerSGD
from dtcomm.compress.spec import Scheme, parse_scheme
from dtcomm.ddp.autotune.measure import BucketTiming, Consensus, Measurements

FIRST_SKIPPED = (
    3  # steps before measuring counts: DDP rebuilds its buckets, memory is touched for the first time
)
SKIPPED = 1  # the same after every change
COUNTED = 3  # steps that count in every turn of a candidate
LINK_CHANGE = 1.5  # times a link must have become faster or slower
STEP_SLOWDOWN = 1.25  # times a step must have become longer
NEAR = 1.2  # times the best step; steps of a busy machine vary as much
MAX_ROUNDS = 3  # of trials

_log = logging.getLogger("dtcomm")


@dataclass(frozen=True, kw_only=True)
class Decision(Event):
    """A choice of "auto".

    Attributes:
        action: What was chosen.
        value: The seconds of a step's communication with it.
        limit: The seconds with plain DDP.
        reason: What else was tried.
    """

    reason: str

    def __str__(self) -> str:
        times = f"{self.value * 1e3:.1f} ms (plain DDP {self.limit * 1e3:.1f}); " if self.limit else ""
        return f"step {self.step}: auto: {self.action}; {times}{self.reason}"


@dataclass
class Trials:
    """The trials of several candidates on real steps, in turn.

    A few steps of each tell candidates apart that differ by much. Those near the best are tried again in the opposite
    order, so that a drift of the machine or of the training does not favour the same ones; all steps of a candidate
    count.

    Attributes:
        candidates: In the order of the first round.
        seconds: This rank's step times, by candidate.
        round: The number of rounds that are over.
    """

    candidates: Sequence[CodecAssignment]
    seconds: list[list[float]] = field(default_factory=list)
    round: int = 0
    _remaining: list[int] = field(default_factory=list)  # indices of the candidates of this round

    def __post_init__(self) -> None:
        self.seconds = self.seconds or [[] for _ in self.candidates]
        self._remaining = [index for index, seconds in enumerate(self.seconds) if not seconds]

    @property
    def current(self) -> CodecAssignment:
        """The candidate to try now."""
        return self.candidates[self._remaining[0]]

    @property
    def running(self) -> bool:
        """Whether a candidate remains in this round."""
        return bool(self._remaining)

    def add_steps(self, seconds: Sequence[float]) -> None:
        """Add the step times of the current candidate, and go to the next one."""
        self.seconds[self._remaining.pop(0)] += seconds

    def step_seconds(self, consensus: Consensus) -> list[float]:
        """Return the step time of each candidate: the median on the slowest rank."""
        medians = [statistics.median(seconds) for seconds in self.seconds]
        return consensus.max(medians) if medians else []

    def start_next_round(self, step_seconds: Sequence[float]) -> bool:
        """Start a round of the candidates near the best, the same on all ranks; return whether there is one."""
        self.round += 1
        near = [index for index, seconds in enumerate(step_seconds) if seconds <= NEAR * min(step_seconds)]
        if self.round < MAX_ROUNDS and len(near) > 1:
            self._remaining = near[::-1] if self.round % 2 else near
        return self.running


def runners_up(
    tried: Sequence[tuple[CodecAssignment, float]], chosen: CodecAssignment, limit: int = 2
) -> list[CodecAssignment]:
    """Return the candidates near the choice: the best lossless one, then the best others."""
    chosen_seconds = next(seconds for candidate, seconds in tried if candidate is chosen)
    near = [
        (seconds, candidate)
        for candidate, seconds in tried
        if candidate is not chosen and seconds <= NEAR * chosen_seconds
    ]
    near.sort(key=lambda pair: pair[0])
    lossless = [candidate for _, candidate in near if candidate.lossless][:1]
    return [*lossless, *(candidate for _, candidate in near if candidate not in lossless)][:limit]


class Tuner:
    """A `Chooser` that measures; `TunerObserver` attaches it to the reducer.

    Args:
        config: What it may choose from.
        consensus: Agreement with the other ranks.
    """

    def __init__(self, config: AutoConfig, consensus: Consensus) -> None:
        self.config, self._consensus = config, consensus
        self.revision = 0
        self.bypass = False
        self.decisions: list[Decision] = []
        self.rows: list[dict[str, Any]] = []
        self._scheme_of: dict[str, Scheme] = {}
        self._changed: list[str] = []
        self._uncompressed: list[str] = []
        self._measuring = True
        # Steps from the first one count; at the second one `begin_step` acts. -1: not known yet.
        self._count_from = self._act_at = -1
        self._step_seconds: deque[float] = deque(maxlen=20)
        self._measurements = Measurements()
        self._trials: Trials | None = None
        self._runners_up: list[CodecAssignment] = []  # until they have been tried beside the choice once more
        self._chosen: CodecAssignment | None = None
        self._chosen_seconds = 0.0  # of a step, when the choice was made
        self._probe_per_byte = 0.0  # of the link, when the choice was made
        self._disabled = False  # there is no link worth saving
        self._over_budget: list[str] = []
        self._gbit_per_s = 0.0

    @property
    def settled(self) -> bool:
        """Whether a choice is in force and nothing is being tried."""
        return not self._measuring and self._trials is None

    @property
    def schemes(self) -> tuple[Scheme, ...]:
        """See `Chooser.schemes`."""
        return self.config.schemes

    def __str__(self) -> str:
        return NAME

    @property
    def in_stages(self) -> bool:
        """See `Chooser.in_stages`."""
        return any(isinstance(scheme, PowerSGD) for scheme in self._scheme_of.values())

    def choose(self, name: str, gradient: torch.Tensor) -> CodecChoice:
        """See `Chooser.choose`."""
        scheme = self._scheme_of.get(name, NONE)
        if scheme != NONE:
            return default_policy(scheme).choose(name, gradient)
        reason = "auto: measuring" if self._measuring else f"auto: {BASELINE}" if self.bypass else "auto"
        return CodecChoice(codec=NONE, reason=reason)

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
        return 0 <= self._act_at <= step and self._consensus.ranks > 1 and not self._disabled

    def begin_step(self, step: int) -> None:
        """Begin a step, on all ranks: act, if a measurement, a turn of a candidate or an interval is over."""
        if self._act_at < 0:
            self._count_from, self._act_at = step + FIRST_SKIPPED, step + FIRST_SKIPPED + COUNTED
            if self._consensus.ranks > 1 and self._consensus.in_memory():
                self._disable(step)
        if not self.reads_clock(step):
            return
        if self._measuring:
            self._start_trials(step)
        elif self._trials is not None:
            self._end_turn(step, self._trials)
        else:
            self._check(step)

    def needs_sample(self, step: int) -> bool:
        """Return whether `sample_bucket` is to be called for the buckets of this step."""
        return self._measuring and step == self._act_at - 1

    def sample_bucket(self, index: int, names: Sequence[str], gradients: Sequence[torch.Tensor]) -> None:
        """Record what a bucket contains, before it is reduced."""
        self._measurements.sample_bucket(index, names, gradients)

    def end_step(self, step: int, seconds: float, buckets: Sequence[BucketTiming]) -> None:
        """Record a step: the seconds from its first bucket until the last one was the mean, and its buckets."""
        if step < self._count_from:
            return
        self._step_seconds.append(seconds)
        if self._measuring:
            self._measurements.add_step(buckets)

    def state_dict(self) -> dict[str, Any]:
        """Return the choice in force and the step of the next check; empty if there is no choice."""
        if not self.settled:
            return {}
        return {
            "chosen": {name: str(scheme) for name, scheme in self._scheme_of.items()},
            "own": self.bypass,
            "until": self._act_at,
            "usual": self._chosen_seconds,
            "link": self._probe_per_byte,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with a saved choice; if there is none, measure."""
        if not state:
            self._measure_again(-1)
            return
        self._disabled = False
        self._scheme_of = {name: parse_scheme(spec) for name, spec in state["chosen"].items()}
        self._measuring, self._trials, self._runners_up = False, None, []
        self._count_from, self._act_at = 0, state["until"]
        self._chosen_seconds, self._probe_per_byte = state["usual"], state["link"]
        self.bypass = state["own"]
        self._step_seconds.clear()
        self.revision += 1

    def _measure_again(self, step: int) -> None:
        """Measure from this step on; -1: from the next one."""
        self._measuring, self._trials, self._runners_up = True, None, []
        self._count_from, self._act_at = (step + SKIPPED, step + SKIPPED + COUNTED) if step >= 0 else (-1, -1)
        self._step_seconds.clear()
        self._measurements = Measurements()
        self._scheme_of, self.bypass, self._chosen = {}, False, None
        self.revision += 1

    def _start_trials(self, step: int) -> None:
        """Agree on what the first steps measured, and on the candidates to try."""
        measured = self._measurements.agree(self._consensus, self.config.schemes, self._median())
        self._probe_per_byte, self._chosen_seconds = measured.probe_per_byte, measured.uncompressed_seconds
        self._measuring = False
        limit = self.config.error_limit
        candidates = (
            propose_candidates(measured.costs, measured.buckets, measured.errors, limit)
            if measured.buckets
            else []
        )
        if self._consensus.emulated():
            candidates = [candidate for candidate in candidates if not candidate.bypass]
        self._over_budget = [
            f"{scheme} (error {error:.2g})" for scheme, error in measured.errors.items() if error > limit
        ]
        self._gbit_per_s = 8e-9 / measured.costs.per_byte if measured.costs.per_byte else 0.0
        # The last candidate is uncompressed and has been measured.
        untried: list[list[float]] = [[] for _ in candidates[:-1]]
        self._run(step, Trials(candidates, [*untried, list(self._step_seconds)] if candidates else []))

    def _run(self, step: int, trials: Trials) -> None:
        """Start the next turn; choose if none is left."""
        if trials.running:
            self._trials = trials
            self._install(trials.current)
            self._step_seconds.clear()
            self._count_from, self._act_at = step + SKIPPED, step + SKIPPED + COUNTED
        else:
            tried = list(zip(trials.candidates, trials.step_seconds(self._consensus), strict=True))
            self._decide(step, tried)

    def _end_turn(self, step: int, trials: Trials) -> None:
        trials.add_steps(self._step_seconds)
        if not trials.running:
            trials.start_next_round(trials.step_seconds(self._consensus))
        self._run(step, trials)

    def _decide(self, step: int, tried: list[tuple[CodecAssignment, float]]) -> None:
        if tried:
            chosen = pick(tried)
        else:
            chosen = CodecAssignment(schemes=(), seconds=self._chosen_seconds, error=0.0)
        confirmed = self._chosen is chosen
        baseline = next((seconds for candidate, seconds in tried if candidate.bypass), self._chosen_seconds)
        self._chosen_seconds = next(
            (seconds for candidate, seconds in tried if candidate is chosen), baseline
        )
        self._runners_up = [] if self._chosen is not None or not tried else runners_up(tried, chosen)
        self._chosen, self._trials = chosen, None
        if not confirmed:
            self._report(step, chosen, tried, baseline)
        self._install(chosen)
        self._uncompressed = [name for name, scheme in self._scheme_of.items() if scheme == NONE]
        self._step_seconds.clear()
        self._count_from, self._act_at = step + SKIPPED, step + self.config.every

    def _report(
        self,
        step: int,
        chosen: CodecAssignment,
        tried: Sequence[tuple[CodecAssignment, float]],
        baseline: float,
    ) -> None:
        self.rows = [
            {
                "plan": str(candidate),
                "predicted_ms": round(candidate.seconds * 1e3, 3),
                "measured_ms": round(seconds * 1e3, 3),
                "error": round(candidate.error, 6),
                "chosen": candidate is chosen,
            }
            for candidate, seconds in tried
        ]
        others = [
            f"{candidate} {seconds * 1e3:.1f} ms" for candidate, seconds in tried if candidate is not chosen
        ]
        reason = f"{self._gbit_per_s:.3g} Gbit/s a rank; tried {', '.join(others) or 'nothing else'}"
        if self._over_budget:
            reason += f"; over the budget: {', '.join(self._over_budget)}"
        text = str(chosen) if chosen.schemes else str(NONE)
        self._add_decision(step, text, reason, self._chosen_seconds, baseline)

    def _add_decision(
        self, step: int, action: str, reason: str, value: float = 0.0, limit: float = 0.0
    ) -> None:
        decision = Decision(
            step=step, kind="auto", name="", value=value, limit=limit, action=action, reason=reason
        )
        _log.info("%s", decision)
        self.decisions.append(decision)

    def _disable(self, step: int) -> None:
        self._disabled, self._measuring = True, False
        self._uncompressed, self._scheme_of, self.bypass = list(self._scheme_of), {}, False
        reason = "all ranks share this host's memory, where bytes cost less than encoding them"
        self._add_decision(step, str(NONE), reason)
        self.revision += 1

    def _check(self, step: int) -> None:
        """Check whether link and steps are as fast as when the choice was made."""
        if self._consensus.in_memory():  # a choice that was loaded comes from a job with a link
            self._disable(step)
            return
        _, probe_per_byte, seconds = self._consensus.max([*self._consensus.probe(), self._median()])
        self._act_at = step + self.config.every
        link_speedup = 1.0
        if probe_per_byte > 0 and self._probe_per_byte > 0:
            link_speedup = self._probe_per_byte / probe_per_byte
        slowdown = seconds / self._chosen_seconds if self._chosen_seconds > 0 else 1.0
        if not 1 / LINK_CHANGE < link_speedup < LINK_CHANGE:
            reason = f"the link is {link_speedup:.2g} times as fast as it was"
        elif slowdown >= STEP_SLOWDOWN:
            reason = f"steps take {slowdown:.2g} times as long"
        else:
            if self._runners_up and self._chosen is not None:
                self._run(step, Trials([*self._runners_up, self._chosen]))
            self._step_seconds.clear()
            return
        self._add_decision(step, "measure again", reason, seconds, self._chosen_seconds)
        self._measure_again(step)

    def _install(self, assignment: CodecAssignment) -> None:
        before = self._scheme_of
        self._scheme_of = {
            name: scheme
            for names, scheme in zip(self._measurements.names(), assignment.schemes, strict=False)
            for name in names
        }
        self.bypass = assignment.bypass
        self._changed += [
            name for name, scheme in self._scheme_of.items() if before.get(name, NONE) != scheme
        ]
        self.revision += 1

    def _median(self) -> float:
        return statistics.median(self._step_seconds) if self._step_seconds else 0.0
