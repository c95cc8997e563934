"""``compress(model, "auto")`` while training goes on: measure, try, choose, and look again.

The first steps go uncompressed and are timed. What `compress.auto` then finds promising is tried, and plain DDP beside
it, since what a step really takes is the only proof, and what was best stays. Every so many steps the link is probed:
where it has changed, or steps have become slow, all of it begins again. At the first of these looks what had come near
the choice is tried once more beside it.

Whatever decides is agreed upon by all ranks first, in the same step, as the largest of their figures.
"""

from __future__ import annotations

import logging
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dtcomm.compress.autotune_model import BASELINE, NAME, NONE, AutoConfig, Plan, pick, plans
from dtcomm.compress.guard import Event
from dtcomm.compress.policy import CodecChoice, default_policy
from dtcomm.compress.powersgd import PowerSGD
from dtcomm.compress.spec import Scheme, parse_scheme
from dtcomm.ddp.autotune.measure import BucketTiming, Measurements
from dtcomm.ddp.autotune.trials import Trials, rivals
from dtcomm.ddp.rank_agreement import Consensus

FIRST = 3  # steps before measuring counts: DDP makes its buckets anew, memory is touched for the first time
AGAIN = 1  # the same after every change
COUNTED = 3  # steps that count, at every turn of a plan
CHANGED = 1.5  # times a link must have become faster or slower
SLOWER = 1.25  # times a step must have become longer

_log = logging.getLogger("dtcomm")


@dataclass(frozen=True, kw_only=True)
class Decision(Event):
    """The choice ``action`` of "auto": a step's communication then takes ``value`` seconds where plain DDP's
    takes ``limit``; ``why`` names what else was tried."""

    why: str

    def __str__(self) -> str:
        times = f"{self.value * 1e3:.1f} ms (plain DDP {self.limit * 1e3:.1f}); " if self.limit else ""
        return f"step {self.step}: auto: {self.action}; {times}{self.why}"


class Tuner:
    """What "auto" has measured and chosen. `begin` opens a step, `end` closes it; `look` sees each bucket between."""

    timed = True

    def __init__(self, auto: AutoConfig, consensus: Consensus) -> None:
        self.auto, self._consensus = auto, consensus
        self.revision = 0
        self.decisions: list[Decision] = []
        self.rows: list[dict[str, Any]] = []  # of the last choice: what was predicted and what it took
        self.own = False  # the group's own backend reduces, as without a hook
        self._by_name: dict[str, Scheme] = {}
        self._changed: list[str] = []
        self._plain: list[str] = []
        self._measuring = True
        self._start = self._until = -1  # of the steps that count; -1: not begun
        self._times: deque[float] = deque(maxlen=20)
        self._measurements = Measurements()
        self._trials: Trials | None = None
        self._rivals: list[Plan] = []  # of the choice, until they have been tried beside it once more
        self._chosen: Plan | None = None
        self._usual = 0.0  # a step with the choice, when it was made
        self._link = 0.0  # seconds a byte of the probe then
        self._alone = False  # there is no link to save
        self._refused: list[str] = []
        self._speed = 0.0  # Gbit/s

    @property
    def settled(self) -> bool:
        """A choice is in force and nothing is being tried."""
        return not self._measuring and self._trials is None

    @property
    def schemes(self) -> tuple[Scheme, ...]:
        """All that may be asked for."""
        return self.auto.schemes

    def __str__(self) -> str:
        return NAME

    @property
    def in_stages(self) -> bool:
        """Whether PowerSGD is in force."""
        return any(isinstance(each, PowerSGD) for each in self._by_name.values())

    def choose(self, name: str, gradient: torch.Tensor) -> CodecChoice:
        """What a parameter gets now."""
        chosen = self._by_name.get(name, NONE)
        if chosen != NONE:
            return default_policy(chosen).choose(name, gradient)
        return CodecChoice(
            codec=NONE,
            why="auto: measuring" if self._measuring else f"auto: {BASELINE}" if self.own else "auto",
        )

    def pop_changes(self) -> list[str]:
        """Parameters that get something else from now on."""
        taken, self._changed = self._changed, []
        return taken

    def pop_uncompressed(self) -> list[str]:
        """Parameters that a choice has left uncompressed: what is owed to them is due."""
        taken, self._plain = self._plain, []
        return taken

    def on(self, device: torch.device) -> None:
        """Gradients are on a device."""
        self._consensus.device = device

    def decides(self, step: int) -> bool:
        """Whether `begin` of this step looks at times: of a device's, the host waits for those then."""
        return 0 <= self._until <= step and self._consensus.ranks > 1 and not self._alone

    def begin(self, step: int) -> None:
        """A step begins, on all ranks."""
        if self._until < 0:
            self._start, self._until = step + FIRST, step + FIRST + COUNTED
            if self._consensus.ranks > 1 and self._consensus.in_memory():
                self._disable(step)
        if not self.decides(step):
            return
        if self._measuring:
            self._predict(step)
        elif self._trials is not None:
            self._next(step, self._trials)
        else:
            self._check(step)

    def wants(self, step: int) -> bool:
        """Whether `look` is to be called for the buckets of this step."""
        return self._measuring and step == self._until - 1

    def look(self, index: int, names: Sequence[str], gradients: Sequence[torch.Tensor]) -> None:
        """A bucket before it is reduced."""
        self._measurements.look(index, names, gradients)

    def end(self, step: int, seconds: float, buckets: Sequence[BucketTiming]) -> None:
        """A step is over: seconds from its first bucket to the last one's arrival."""
        if step < self._start:
            return
        self._times.append(seconds)
        if self._measuring:
            self._measurements.add(buckets)

    def state_dict(self) -> dict[str, Any]:
        """The choice in force, and when it is looked at again; nothing while there is none."""
        if not self.settled:
            return {}
        chosen = {name: str(each) for name, each in self._by_name.items()}
        times = {"until": self._until, "usual": self._usual, "link": self._link}
        return {"chosen": chosen, "own": self.own, **times}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with a saved choice; without one, with measuring."""
        if not state:
            self._again(-1)
            return
        self._alone = False
        self._by_name = {name: parse_scheme(spec) for name, spec in state["chosen"].items()}
        self._measuring, self._trials, self._rivals = False, None, []
        self._start, self._until = 0, state["until"]
        self._usual, self._link, self.own = state["usual"], state["link"], state["own"]
        self._times.clear()
        self.revision += 1

    def _again(self, step: int) -> None:
        """Measure from this step on; -1: from the next one."""
        self._measuring, self._trials, self._rivals = True, None, []
        self._start, self._until = (step + AGAIN, step + AGAIN + COUNTED) if step >= 0 else (-1, -1)
        self._times.clear()
        self._measurements = Measurements()
        self._by_name, self.own, self._chosen = {}, False, None
        self.revision += 1

    def _predict(self, step: int) -> None:
        """The first steps are over: agree on their figures, and on what to try."""
        found = self._measurements.agree(self._consensus, self.auto.schemes, self._median())
        self._link, self._usual = found.link, found.plain
        self._measuring = False
        worth = plans(found.costs, found.loads, found.errors, self.auto.limit) if found.loads else []
        if self._consensus.emulated():
            worth = [plan for plan in worth if not plan.own]
        limit = self.auto.limit
        self._refused = [
            f"{each} (error {error:.2g})" for each, error in found.errors.items() if error > limit
        ]
        self._speed = 8e-9 / found.costs.per_byte if found.costs.per_byte else 0.0
        # Ours uncompressed is the last one, and has been measured.
        untried: list[list[float]] = [[] for _ in worth[:-1]]
        self._try(step, Trials(worth, [*untried, list(self._times)] if worth else []))

    def _try(self, step: int, trials: Trials) -> None:
        """The next turn, or the choice where none is left."""
        if trials.running:
            self._trials = trials
            self._install(trials.now)
            self._times.clear()
            self._start, self._until = step + AGAIN, step + AGAIN + COUNTED
        else:
            self._decide(step, list(zip(trials.plans, trials.agreed(self._consensus), strict=True)))

    def _next(self, step: int, trials: Trials) -> None:
        """A turn of one plan is over."""
        trials.took(self._times)
        if not trials.running:
            trials.again(trials.agreed(self._consensus))
        self._try(step, trials)

    def _decide(self, step: int, tried: list[tuple[Plan, float]]) -> None:
        chosen = pick(tried) if tried else Plan(schemes=(), seconds=self._usual, error=0.0)
        once_more = self._chosen is chosen
        plain = next((seconds for plan, seconds in tried if plan.own), self._usual)
        self._usual = next((seconds for plan, seconds in tried if plan is chosen), plain)
        self._rivals = [] if self._chosen is not None or not tried else rivals(tried, chosen)
        self._chosen, self._trials = chosen, None
        if not once_more:
            self._tell(step, chosen, tried, plain)
        self._install(chosen)
        self._plain = [name for name, each in self._by_name.items() if each == NONE]
        self._times.clear()
        self._start, self._until = step + AGAIN, step + self.auto.every

    def _tell(self, step: int, chosen: Plan, tried: Sequence[tuple[Plan, float]], plain: float) -> None:
        self.rows = [
            {
                "plan": str(plan),
                "predicted_ms": round(plan.seconds * 1e3, 3),
                "measured_ms": round(seconds * 1e3, 3),
                "error": round(plan.error, 6),
                "chosen": plan is chosen,
            }
            for plan, seconds in tried
        ]
        others = [f"{plan} {seconds * 1e3:.1f} ms" for plan, seconds in tried if plan is not chosen]
        why = f"{self._speed:.3g} Gbit/s a rank; tried {', '.join(others) or 'nothing else'}"
        if self._refused:
            why += f"; over the budget: {', '.join(self._refused)}"
        text = str(chosen) if chosen.schemes else str(NONE)
        self._note(step, text, why, self._usual, plain)

    def _note(self, step: int, action: str, why: str, value: float = 0.0, limit: float = 0.0) -> None:
        made = Decision(step=step, kind="auto", name="", value=value, limit=limit, action=action, why=why)
        _log.info("%s", made)
        self.decisions.append(made)

    def _disable(self, step: int) -> None:
        self._alone, self._measuring = True, False
        self._plain, self._by_name, self.own = list(self._by_name), {}, False
        why = "all ranks share this host's memory, where bytes cost less than encoding them"
        self._note(step, str(NONE), why)
        self.revision += 1

    def _check(self, step: int) -> None:
        """Whether link and steps are what they were."""
        if self._consensus.in_memory():  # a choice that was loaded comes from a job with a link
            self._disable(step)
            return
        _, alone, mine = self._consensus.agree([*self._consensus.probe(), self._median()])
        self._until = step + self.auto.every
        changed = self._link / alone if alone > 0 and self._link > 0 else 1.0
        slower = mine / self._usual if self._usual > 0 else 1.0
        if not 1 / CHANGED < changed < CHANGED:
            why = f"the link is {changed:.2g} times as fast as it was"
        elif slower >= SLOWER:
            why = f"steps take {slower:.2g} times as long"
        else:
            if self._rivals and self._chosen is not None:
                self._try(step, Trials([*self._rivals, self._chosen]))
            self._times.clear()
            return
        self._note(step, "measure again", why, mine, self._usual)
        self._again(step)

    def _install(self, plan: Plan) -> None:
        before = self._by_name
        self._by_name = {
            name: each
            for names, each in zip(self._measurements.names(), plan.schemes, strict=False)
            for name in names
        }
        self.own = plan.own
        self._changed += [name for name, each in self._by_name.items() if before.get(name, NONE) != each]
        self.revision += 1

    def _median(self) -> float:
        return statistics.median(self._times) if self._times else 0.0
