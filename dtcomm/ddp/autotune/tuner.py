"""The autotuner, for ``compress(model, "auto")``: it measures, tries, chooses, and checks its choice during training.

1. The first steps go uncompressed and are timed (`Measurements`).
2. What the model of `compress.autotune_model` finds promising is tried on real steps beside plain DDP, which stays
   unless a candidate is shown to be faster (`Trials`).
3. Every ``check_every`` steps the link is probed. If it has changed, or if steps have become slow, all of it begins
   again. So it does if plain DDP, which is tried again beside a choice that was not much faster, is shown to be faster.

Every decision is made by all ranks in the same step, from the largest of their measurements.
"""

from __future__ import annotations

import logging
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dtcomm.compress.autotune_model import (
    BASELINE,
    NAME,
    NONE,
    AutoConfig,
    CodecAssignment,
    propose_candidates,
)
from dtcomm.compress.guard import Event
from dtcomm.compress.policy import CodecChoice, Policy, default_policy
from dtcomm.compress.powersgd import PowerSGD
from dtcomm.compress.spec import Scheme, parse_scheme
from dtcomm.ddp.autotune.measure import BucketTiming, Consensus, Measurements
from dtcomm.ddp.autotune.trials import NEAR, Trials

FIRST_SKIPPED = (
    3  # steps before measuring counts: DDP rebuilds its buckets, memory is touched for the first time
)
SKIPPED = 1  # the same after every change
MEASURED = 3  # uncompressed steps that are measured before the trials
COUNTED = 1  # steps that count in every turn of a candidate
LINK_CHANGE = 1.5  # times a link must have become faster or slower
STEP_SLOWDOWN = 1.25  # times a step must have become longer
RISK = 0.01  # of all trials of a run, to accept a candidate that is no faster; every trial takes half of what is left
MEASURE_AGAIN = "measure again"  # the action of a decision that ends a choice

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


class Tuner:
    """A `Chooser` that measures; `TunerObserver` attaches it to the reducer.

    Args:
        config: What it may choose from.
        consensus: Agreement with the other ranks.
        excluded: The rules of what stays uncompressed whatever it chooses; None: none.
    """

    def __init__(self, config: AutoConfig, consensus: Consensus, excluded: Policy | None = None) -> None:
        self.config, self._consensus = config, consensus
        self._excluded = excluded or Policy(rules=())
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
        self._trials_begun = 0
        self._baseline: CodecAssignment | None = None
        self._chosen: CodecAssignment | None = None
        self._confirmed = 1.0  # the choice's step time, as a fraction of the baseline's
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
            return (self._excluded | default_policy(scheme)).choose(name, gradient)
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
            self._count_from, self._act_at = step + FIRST_SKIPPED, step + FIRST_SKIPPED + MEASURED
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
        self._measuring, self._trials, self._chosen = False, None, None
        self._count_from, self._act_at = 0, state["until"]
        self._chosen_seconds, self._probe_per_byte = state["usual"], state["link"]
        self.bypass = state["own"]
        self._step_seconds.clear()
        self.revision += 1

    def _measure_again(self, step: int) -> None:
        """Measure from this step on; -1: from the next one."""
        self._measuring, self._trials = True, None
        self._count_from, self._act_at = (
            (step + SKIPPED, step + SKIPPED + MEASURED) if step >= 0 else (-1, -1)
        )
        self._step_seconds.clear()
        self._measurements = Measurements()
        self._scheme_of, self.bypass, self._chosen, self._baseline = {}, False, None, None
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
        if candidates:
            # The last two are plain DDP and our uncompressed all-reduce.
            self._baseline = next((candidate for candidate in candidates if candidate.bypass), candidates[-1])
        else:  # no bucket was seen
            self._baseline = CodecAssignment(schemes=(), seconds=self._chosen_seconds, error=0.0)
        others = [candidate for candidate in candidates if candidate is not self._baseline]
        self._run(step, self._new_trials(others, self._baseline))

    def _new_trials(self, candidates: Sequence[CodecAssignment], baseline: CodecAssignment) -> Trials:
        self._trials_begun += 1
        return Trials(
            candidates,
            baseline,
            risk=RISK * 0.5**self._trials_begun,
            seed=self._trials_begun,
            agree=self._consensus.max,
        )

    def _run(self, step: int, trials: Trials) -> None:
        """Start the next turn; choose if none is left."""
        self._trials = trials if trials.running else None
        if trials.running:
            self._install(trials.current)
            self._step_seconds.clear()
            self._count_from, self._act_at = step + SKIPPED, step + SKIPPED + COUNTED
        elif self._chosen is None:
            self._decide(step, trials)
        else:
            self._end_recheck(step, trials)

    def _end_turn(self, step: int, trials: Trials) -> None:
        trials.add_turn(self._median())
        self._run(step, trials)

    def _decide(self, step: int, trials: Trials) -> None:
        assert trials.chosen is not None
        chosen, self._confirmed = trials.chosen, trials.confirmed
        times = trials.step_seconds()
        tried = [*zip(trials.candidates, times, strict=False), (trials.baseline, times[-1])]
        baseline_seconds = times[-1] or self._chosen_seconds
        self._chosen_seconds = next(seconds for candidate, seconds in tried if candidate is chosen)
        self._chosen_seconds = self._chosen_seconds or baseline_seconds
        self._chosen = chosen
        self._report(step, trials, tried, baseline_seconds)
        self._use_choice(step, chosen)

    def _use_choice(self, step: int, chosen: CodecAssignment) -> None:
        self._install(chosen)
        self._uncompressed = [name for name, scheme in self._scheme_of.items() if scheme == NONE]
        self._step_seconds.clear()
        self._count_from, self._act_at = step + SKIPPED, step + self.config.every

    def _end_recheck(self, step: int, trials: Trials) -> None:
        """Keep the choice, or measure again if the baseline was shown to be faster."""
        assert self._chosen is not None
        if trials.chosen is self._chosen:
            self._use_choice(step, self._chosen)
            return
        baseline_seconds, chosen_seconds = trials.step_seconds()
        self._add_decision(step, MEASURE_AGAIN, str(trials), chosen_seconds, baseline_seconds)
        self._measure_again(step)

    def _report(
        self,
        step: int,
        trials: Trials,
        tried: Sequence[tuple[CodecAssignment, float]],
        baseline_seconds: float,
    ) -> None:
        chosen = trials.chosen
        assert chosen is not None
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
        reason = (
            f"{self._gbit_per_s:.3g} Gbit/s a rank; {trials}; tried {', '.join(others) or 'nothing else'}"
        )
        if self._over_budget:
            reason += f"; over the budget: {', '.join(self._over_budget)}"
        if chosen.bypass:
            reason += (
                "; a hook costs DDP a pass over the gradients: without `compress` steps are shorter still"
            )
        text = str(chosen) if chosen.schemes else str(NONE)
        self._add_decision(step, text, reason, self._chosen_seconds, baseline_seconds)

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
            self._step_seconds.clear()
            if self._chosen is not None and self._baseline is not None and 1 / NEAR < self._confirmed < 1:
                self._run(step, self._new_trials([self._baseline], self._chosen))
            return
        self._add_decision(step, MEASURE_AGAIN, reason, seconds, self._chosen_seconds)
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
