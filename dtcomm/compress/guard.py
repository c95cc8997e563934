"""When compression starts to hurt: what is watched, what counts as too much, and what is done then.

All ranks must act alike, so what a rank measures in one step travels with the last bucket of the next one, as a few
floats, and the mean over ranks is judged when the step after that begins.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from dtcomm.codecs import Integer, codec
from dtcomm.compress.dgc import DGC
from dtcomm.compress.error_sample import SAMPLES, Sample
from dtcomm.compress.powersgd import PowerSGD
from dtcomm.compress.running_stats import Usual
from dtcomm.compress.spec import Scheme
from dtcomm.device.streams import copy_to_device
from dtcomm.errors import DtcommError

ACTIONS = ("ignore", "warn", "raise", "none", "reset", "stop")
LASTING = 2  # steps in a row for which a loss must be out of line

_log = logging.getLogger("dtcomm")


class CompressionHarmful(DtcommError):
    """A guard whose action is "stop" found compression harmful; the message says what it saw."""


@dataclass(frozen=True, kw_only=True)
class Guard:
    """Limits, and what happens beyond them.

    error: the share of the 90 % smallest elements that does not arrive in one encoding: 1 less their projection on what
        does. Near 1 a few outliers rule every block. Schemes that send only a part of the elements are not held to it.
    residual: |residual| over |gradient|; None: 10, for schemes that keep most elements waiting what they are bound
        to reach.
    spike: |gradient| over its running mean. loss: what `State.observe` was told, over its running mean, in two steps
        in a row. Both means are geometric, and what varies much is allowed four times its usual deviation.
    nonfinite: steps in a row whose gradients had NaN or Inf.
    on_*: "ignore"; "warn"; "raise" the precision of the parameter, a step each time; "none": send everything
        uncompressed for `steps` steps; "reset" the parameter's residual; "stop" with `CompressionHarmful`.
    """

    error: float = 0.9
    residual: float | None = None
    spike: float = 20.0
    loss: float = 2.0
    nonfinite: int = 25
    on_error: str = "raise"
    on_residual: str = "reset"
    on_spike: str = "warn"
    on_loss: str = "none"
    on_nonfinite: str = "stop"
    steps: int = 100

    def __post_init__(self) -> None:
        for kind in ("error", "residual", "spike", "loss", "nonfinite"):
            action = getattr(self, f"on_{kind}")
            if action not in ACTIONS:
                raise ValueError(f"guard: on_{kind} is {action!r}; valid: {', '.join(ACTIONS)}")
            limit = getattr(self, kind)
            if limit is not None and not limit > 0:
                raise ValueError(f"guard: {kind} is {limit!r}; valid: a number above 0")
        if self.steps < 1:
            raise ValueError(f"guard: steps is {self.steps!r}; valid: 1 or more")


@dataclass(frozen=True, kw_only=True)
class Event:
    """`kind` was `value` where `limit` is the limit, at a step; `name`: of the parameter, or empty for all."""

    step: int
    kind: str
    name: str
    value: float
    limit: float
    action: str

    def __str__(self) -> str:
        where = f" of {self.name}" if self.name else ""
        return (
            f"step {self.step}: {self.kind}{where} is {self.value:.3g}, limit {self.limit:g}: {self.action}"
        )


@dataclass
class Watch:
    """What one rank has measured, and what all of them have decided."""

    guard: Guard
    events: list[Event] = field(default_factory=list)
    revision: int = 0  # changes whenever what a parameter is compressed with may have changed
    _resets: list[str] = field(default_factory=list)
    _finer: dict[str, int] = field(default_factory=dict)  # steps up the ladder
    _plain_until: int = 0
    _changed: list[str] = field(default_factory=list)
    _order: list[str] = field(default_factory=list)  # of the parameters sampled in this step
    _told: list[str] = field(default_factory=list)  # of those that `vector` tells of
    _asked: deque[list[str]] = field(default_factory=deque)  # of those that vectors not judged yet tell of
    _schemes: dict[str, Scheme] = field(default_factory=dict)
    _measured: dict[str, tuple[float, float]] = field(default_factory=dict)
    # The same of tensors on a device: typical error, |lost| / |gradient|, |gradient|^2.
    _measured_there: dict[str, torch.Tensor] = field(default_factory=dict)
    _loss: float | torch.Tensor = math.nan
    _square: float = 0.0  # of the gradients' norm
    _bad: float = 0.0
    _bad_there: torch.Tensor | None = None  # the same of means on a device, where it is
    _usual: dict[str, Usual] = field(default_factory=dict)
    _bad_steps: int = 0

    def observe(self, loss: float | torch.Tensor) -> None:
        """This step's loss on this rank; one on a device stays there until it is told."""
        if isinstance(loss, torch.Tensor) and not loss.is_cpu:
            self._loss = loss.detach().reshape(1).float()
        else:
            self._loss = float(loss)

    def sampled(self, name: str, scheme: Scheme) -> None:
        """A parameter is sampled in this step, on every rank."""
        self._order.append(name)
        self._schemes[name] = scheme

    def measured(self, sample: Sample, lost: torch.Tensor) -> None:
        """What was lost of a sample."""
        if not lost.is_cpu:
            self._measured_there[sample.name] = sample.measure_there(lost)
            return
        self._square += float(sample.gradient) ** 2
        self._measured[sample.name] = sample.measure(lost)

    def arrived(self, mean: torch.Tensor) -> None:
        """A bucket's mean, some of whose elements are searched for NaN and Inf."""
        finite = torch.isfinite(mean[:: max(1, mean.numel() // SAMPLES)]).all()
        if not mean.is_cpu:  # nobody waits for the device to say: it stays there until it is told
            self.bad(~finite)
        elif not finite:
            self.bad()

    def bad(self, there: torch.Tensor | None = None) -> None:
        """This step's gradients had NaN or Inf; ``there``: a bool of a device says whether."""
        if there is None:
            self._bad = 1.0
        else:
            self._bad_there = there if self._bad_there is None else self._bad_there | there

    def vector(self, device: torch.device | None = None) -> torch.Tensor:
        """What this rank has to tell: fp32, of the same length on all ranks, on the device (None: the CPU)."""
        loss = self._loss if isinstance(self._loss, float) else math.nan
        told = [0.0 if math.isfinite(loss) else 1.0, loss, self._bad, self._square]
        told += [value for name in self._told for value in self._measured.get(name, (0.0, 0.0))]
        said = torch.nan_to_num(torch.tensor(told, dtype=torch.float32), nan=0.0, posinf=3e38, neginf=-3e38)
        if device is not None and device.type != "cpu":
            said = self._with_what_is_there(copy_to_device(said, device))
        self._loss, self._bad, self._square, self._bad_there = math.nan, 0.0, 0.0, None
        self._measured, self._measured_there = {}, {}
        self._asked.append(self._told)
        return said

    def _with_what_is_there(self, said: torch.Tensor) -> torch.Tensor:
        if isinstance(self._loss, torch.Tensor):
            loss = self._loss.to(said.device)
            finite = torch.isfinite(loss)
            said[:1] = (~finite).float()
            said[1:2] = torch.where(finite, loss, 0.0)
        if self._bad_there is not None:
            said[2:3] = torch.maximum(said[2:3], self._bad_there.to(said.device, torch.float32))
        for at, name in enumerate(self._told):
            if (found := self._measured_there.get(name)) is not None:
                said[4 + 2 * at : 6 + 2 * at] = found[:2]
                said[3:4] += found[2:]
        return torch.nan_to_num(said, nan=0.0, posinf=3e38, neginf=-3e38)

    def judge(self, step: int, mean: torch.Tensor) -> None:
        """Compare the mean over ranks of the first `vector` not judged yet with the limits.

        CompressionHarmful where one says stop.
        """
        names = self._asked.popleft() if self._asked else self._told
        untold, loss, bad, square, *rest = mean.tolist()
        self._bad_steps = self._bad_steps + 1 if bad > 0 else 0
        if self._bad_steps >= self.guard.nonfinite:
            self._act(step, "nonfinite", "", self._bad_steps, self.guard.nonfinite)
        if untold < 1:
            self._compare(step, "loss", loss / (1 - untold), self.guard.loss, LASTING)
        if square > 0:
            self._compare(step, "spike", math.sqrt(square), self.guard.spike)
        for name, error, kept in zip(names, rest[::2], rest[1::2], strict=True):
            scheme = self._schemes[name]
            if _sends_most(scheme) and error > self.guard.error:
                self._act(step, "error", name, error, self.guard.error)
            limit = residual_limit(scheme) if self.guard.residual is None else self.guard.residual
            if kept > limit:
                self._act(step, "residual", name, kept, limit)

    def scheme(self, name: str, chosen: Scheme, step: int) -> Scheme:
        """What `name` is compressed with at a step, where the policy has chosen `chosen`."""
        if step < self._plain_until:
            return codec("none")
        for _ in range(self._finer.get(name, 0)):
            chosen = finer(chosen)
        return chosen

    def begin(self, step: int) -> None:
        """A step begins, after the last one's numbers were judged."""
        self._told, self._order = self._order, []
        if step == self._plain_until and step > 0:
            self.revision += 1  # what was sent uncompressed for a while is compressed again

    def take_resets(self) -> list[str]:
        """Parameters whose residuals are to be given up."""
        taken, self._resets = self._resets, []
        return taken

    def take_changes(self) -> list[str]:
        """Parameters that are compressed with something else from now on."""
        taken, self._changed = self._changed, []
        return taken

    def state_dict(self) -> dict[str, object]:
        """Plain values: the decisions that are in force."""
        return {"finer": dict(self._finer), "plain_until": self._plain_until}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        finer, until = state.get("finer", {}), state.get("plain_until", 0)
        assert isinstance(finer, Mapping) and isinstance(until, int)
        self._finer, self._plain_until = dict(finer), until
        self.revision += 1

    def _compare(self, step: int, kind: str, value: float, limit: float, lasting: int = 1) -> None:
        if not value > 0:
            return
        usual = self._usual.setdefault(kind, Usual())
        over = usual.take(math.log(value), math.log(limit), lasting)
        if over is not None:
            del self._usual[kind]  # whatever comes next is compared with what there is now
            self._act(step, kind, "", math.exp(over), limit)

    def _act(self, step: int, kind: str, name: str, value: float, limit: float) -> None:
        action = getattr(self.guard, f"on_{kind}")
        if action == "ignore":
            return
        event = Event(step=step, kind=kind, name=name, value=value, limit=limit, action=action)
        if not any((old.kind, old.name) == (kind, name) for old in self.events):
            _log.warning("%s", event)
        self.events.append(event)
        if action == "stop":
            raise CompressionHarmful(str(event))
        if action == "raise":
            for each in [name] if name else list(self._schemes):
                self._finer[each] = self._finer.get(each, 0) + 1
                self._changed.append(each)
            self.revision += 1
        elif action == "none":
            self._plain_until = step + self.guard.steps
            self.revision += 1
        elif action == "reset":
            self._resets += [name] if name else list(self._schemes)


def finer(scheme: Scheme) -> Scheme:
    """The next better one: more bits, more elements, more ranks, in the end none."""
    if isinstance(scheme, PowerSGD):
        if scheme.rank >= 16:
            return codec("fp16")
        return PowerSGD(rank=2 * scheme.rank, alternate=scheme.alternate, factors=scheme.factors)
    if isinstance(scheme, DGC):
        return replace(scheme, ratio=4 * scheme.ratio) if scheme.ratio <= 0.0625 else codec("int8")
    if isinstance(scheme, Integer):
        return codec("int4" if scheme.bits < 4 else "int8" if scheme.bits < 8 else "fp16")
    name, ratio = scheme.name, getattr(scheme, "ratio", None)
    if ratio is not None:
        return codec(f"{name}:ratio={4 * ratio}" if ratio <= 0.0625 else "int8")
    if name in ("none", "fp16", "bf16"):
        return codec("none")
    return codec({"sign": "int4", "mxfp4": "int8"}.get(name, "bf16"))


def residual_limit(scheme: Scheme) -> float:
    """|residual| / |gradient| that error feedback with this scheme may come to, and some more.

    With a share r of the elements sent, one waits about 1/r steps, in which gradients that agree add up to that; with
    momentum m to 1/(1 - m) times as much."""
    if isinstance(scheme, DGC):
        return max(10.0, 4.0 / scheme.ratio) / (1 - scheme.momentum)
    if isinstance(scheme, PowerSGD):
        return 1000.0
    if scheme.name == "sign":
        return 100.0  # one magnitude a block: its largest elements wait many steps
    ratio = getattr(scheme, "ratio", None)
    return 10.0 if ratio is None else max(10.0, 4.0 / float(ratio))


def _sends_most(scheme: Scheme) -> bool:
    return not isinstance(scheme, PowerSGD | DGC) and not hasattr(scheme, "ratio") and scheme.name != "sign"


def summary(events: Sequence[Event]) -> dict[str, int]:
    """How often each kind of event came to each action: ``{"error: raise": 2}``."""
    counts: dict[str, int] = {}
    for event in events:
        key = f"{event.kind}: {event.action}"
        counts[key] = counts.get(key, 0) + 1
    return counts
