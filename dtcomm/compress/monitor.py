"""Monitors: what a rank measures for the guard, and what all ranks decide from the averages.

In every step sketches of the gradients before compression and of their mean after it are added up
(`dtcomm.compress.measurements.SketchWindow`); the cosine and the norms of the sums over a window say whether
compression does harm. On every ``sample_every``-th step the norms of what encodings lost are compared with those of the
gradients; the reports read them too. FSDP also takes an `ErrorSample` of what an encoding loses.

All ranks must act alike. What a rank measures in one step is therefore sent, as a few floats, with the last bucket of
the next step, and every rank evaluates the mean over ranks when the step after that begins. Ranks of tensor parallelism
have other gradients, and copies of the same norms and biases, which would drift apart if their codecs differed: the
mean is taken over them too (`Monitor.agreeing_groups`). Stages of a pipeline share neither parameters nor collectives
that depend on a decision, so each decides for itself; if one stops, the others lose it as they lose any rank.

The DDP hook, `LocalSGD` and FSDP have a `Monitor` each.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from dtcomm.codecs import codec
from dtcomm.collectives import all_reduce
from dtcomm.compress.checkpoint import rank_and_size
from dtcomm.compress.guard import CompressionHarmful, Event, Guard, finer, residual_limit
from dtcomm.compress.measurements import (
    SKETCH_SIZE,
    ErrorSample,
    Fidelity,
    GradientMeasurement,
    Reading,
    Sketched,
    SketchWindow,
    is_nonfinite,
)
from dtcomm.compress.spec import Scheme
from dtcomm.streams import copy_to_device, match_device

HEADER_SIZE = 5  # of `Monitor.stats_tensor`
STEPS_TO_EVALUATE = 2  # at most, from a step to the evaluation of its statistics
LOSS_PATIENCE = 2  # steps in a row in which a loss must exceed its limit
DECAY = 0.9  # of the running mean and deviation, for each loss
MIN_LOSSES = 5  # losses that the running mean needs before anything is compared with it
#: A loss must exceed the mean by so many deviations; minibatch losses near zero differ by factors between steps.
DEVIATIONS = 4.0

_log = logging.getLogger("dtcomm")


@dataclass
class LossMean:
    """Exponentially weighted mean and deviation of the logarithm of the loss, which varies by factors."""

    mean: float = 0.0
    deviation: float = 0.0
    count: int = 0
    excess_count: int = 0  # losses in a row beyond the limit

    def update(self, loss: float, limit: float) -> float | None:
        """Add a positive loss; one that is beyond ``limit`` times the mean does not change the mean.

        Returns:
            How many times the mean the loss is, if it is at least the `LOSS_PATIENCE`-th in a row beyond the limit,
            else None.
        """
        excess = math.log(loss) - self.mean
        if self.count >= MIN_LOSSES and excess > max(math.log(limit), DEVIATIONS * self.deviation):
            self.excess_count += 1
            return math.exp(excess) if self.excess_count >= LOSS_PATIENCE else None
        self.excess_count = 0
        if self.count == 0:
            self.mean = math.log(loss)
        else:
            if self.count >= MIN_LOSSES:
                # A loss that diverges gradually would otherwise make its own growth usual.
                excess = min(excess, max(math.log(limit), DEVIATIONS / 2 * self.deviation))
            self.deviation += (1 - DECAY) * (abs(excess) - self.deviation)
            self.mean += (1 - DECAY) * excess
        self.count += 1
        return None


@dataclass
class Monitor:
    """What an integration tells the guard in a step, and asks it between steps.

    Without a guard it measures and changes nothing.

    Args:
        guard: The limits and actions; None: no guard.
        group: The process group; None is the default group.
        ranks: (rank, number of ranks), where there is no process group.
        momentum: The momentum that the compressor applies to all gradients before it averages them (DGC); None if it
            applies none. What is averaged is compared with gradients that have the same momentum.
        agreeing_groups: Other groups, such as those of tensor parallelism, whose ranks decide alike.

    Attributes:
        events: What exceeded a limit so far, in order; the same on all ranks.
        revision: Changes whenever the scheme of a parameter may have changed.
    """

    guard: Guard | None
    group: dist.ProcessGroup | None = None
    ranks: tuple[int, int] | None = None
    momentum: float | None = None
    agreeing_groups: Sequence[dist.ProcessGroup] = ()
    events: list[Event] = field(default_factory=list)
    revision: int = 0
    # What this rank measured in this step.
    _loss: float | torch.Tensor = math.nan
    _nonfinite: torch.Tensor | None = None  # bool, of the mean; None: it was finite
    _own_nonfinite: torch.Tensor | None = None  # of this rank's gradients
    _sketched_mean: bool = False  # whether the sketches of this step say if the mean is finite
    _errors: dict[str, torch.Tensor] = field(default_factory=dict)  # `ErrorSample.measure` by parameter
    # Which parameters were sampled: in this step, in the one whose statistics are sent next, and in each `stats_tensor`
    # that was not evaluated yet.
    _sampled: list[str] = field(default_factory=list)
    _sampled_before: list[str] = field(default_factory=list)
    _in_flight: deque[tuple[list[str], bool]] = field(default_factory=deque)  # bool: with sketches
    _schemes: dict[str, Scheme] = field(default_factory=dict)
    _held_to_error: set[str] = field(default_factory=set)
    # What all ranks decided.
    _resets: list[str] = field(default_factory=list)
    _changed: list[str] = field(default_factory=list)
    _finer_steps: dict[str, int] = field(default_factory=dict)
    _uncompressed_until: int = 0
    _losses: LossMean = field(default_factory=LossMean)
    _nonfinite_steps: int = 0

    def __post_init__(self) -> None:
        self._window = SketchWindow(self.guard or Guard(), self.momentum)

    @property
    def fidelity(self) -> Fidelity | None:
        """The comparison of the last window, the same on all ranks; None before the end of the first one."""
        return self._window.fidelity

    def observe_loss(self, loss: float | torch.Tensor) -> None:
        """Record this step's loss on this rank; a tensor on a device is not read by the host."""
        if self.guard is None:
            return
        if isinstance(loss, torch.Tensor) and not loss.is_cpu:
            self._loss = loss.detach().reshape(1).float()
        else:
            self._loss = float(loss)

    def register_sample(self, name: str, scheme: Scheme, held_to_error: bool = False) -> None:
        """Announce that a parameter is sampled in this step, on every rank and in the same order.

        ``held_to_error`` says whether `Guard.error` applies to it.
        """
        self._sampled.append(name)
        self._schemes[name] = scheme
        if held_to_error:
            self._held_to_error.add(name)
        else:
            self._held_to_error.discard(name)

    def record_error(self, sample: ErrorSample, lost: torch.Tensor) -> None:
        """Record what the encoding of a sampled parameter lost."""
        if self.guard is not None:
            self._errors[sample.name] = sample.measure(lost)

    def record_residuals(self, names: Sequence[str], ratios: torch.Tensor) -> None:
        """Record |residual| / |gradient| of sampled parameters that `Guard.error` does not apply to."""
        if self.guard is not None:
            ratios = ratios.float()
            self._errors |= zip(
                names, torch.stack([torch.zeros_like(ratios), ratios], dim=1).unbind(), strict=True
            )

    def measure_gradient(self, layout: Sketched, gradient: torch.Tensor) -> GradientMeasurement | None:
        """Measure a bucket on this rank before it is compressed; on every rank for the same buckets."""
        if self.guard is None:
            return None
        nonfinite = None
        if gradient.numel() and (self._nonfinite_steps or self.guard.nonfinite <= STEPS_TO_EVALUATE):
            nonfinite = ~torch.isfinite(gradient.abs().amax())  # the message is to say whose they are
        return GradientMeasurement(self.sketch_gradient(layout, gradient), nonfinite)

    def sketch_gradient(self, layout: Sketched, gradient: torch.Tensor) -> Reading | None:
        """Read a gradient of this rank before it is compressed, for `add_sketches`; None: nothing is to be compared."""
        if self.guard is None or self.guard.on_harm == "ignore":
            return None
        sketch = layout.sketch(gradient.device)
        if sketch.is_empty:
            return None
        self._window.schemes |= layout.schemes
        self._schemes |= layout.schemes
        return sketch.read(gradient)

    def record_mean(
        self, measurement: GradientMeasurement | None, layout: Sketched, mean: torch.Tensor
    ) -> None:
        """Record the averaged bucket, with what was measured before."""
        if measurement is None:
            return
        if measurement.sketched is None:
            self.report_nonfinite(is_nonfinite(mean), measurement.nonfinite)
            return
        self.report_nonfinite(None, measurement.nonfinite)
        self._sketched_mean = True
        self.add_sketches(measurement.sketched, layout.sketch(mean.device).read(mean))

    def add_sketches(self, gradient: Reading, mean: Reading) -> None:
        """Add what was read of a gradient before compression and of the mean after it.

        The averages of both sketches over the ranks must be sketches of the same mean.
        """
        self._window.add(gradient, mean)

    @property
    def window_is_complete(self) -> bool:
        """Whether the next `stats_tensor` carries the sketches of a window; the same on all ranks."""
        return self._window.complete is not None

    def report_nonfinite(self, nonfinite: torch.Tensor | None, own: torch.Tensor | None) -> None:
        """Record whether this step's mean or this rank's own gradients held NaN or Inf: bools without dimensions.

        None: they did not.
        """
        if self.guard is None:
            return
        if nonfinite is not None:
            self._nonfinite = nonfinite if self._nonfinite is None else self._nonfinite | nonfinite
        if own is not None:
            self._own_nonfinite = own if self._own_nonfinite is None else self._own_nonfinite | own

    def stats_tensor(self, device: torch.device | None = None) -> torch.Tensor | None:
        """Return what to average over ranks: fp32 [n] on ``device`` (None: the CPU), or None if there is no guard.

        The layout is: 1 if this rank has no loss, the loss, 1 if a mean was not finite, 1 if this rank's gradients were
        not finite, then this rank + 1, otherwise two zeros, then (missing share, |residual| / |gradient|) of each
        sampled parameter, then both sketches if a window is complete.
        """
        if self.guard is None:
            return None
        names, window = self._sampled_before, self._window.pop_complete()
        loss = self._loss if isinstance(self._loss, float) else math.nan
        header = [0.0 if math.isfinite(loss) else 1.0, loss, *[0.0] * (HEADER_SIZE - 2)]
        stats = torch.tensor([*header, *[0.0] * (2 * len(names))], dtype=torch.float32)
        stats.nan_to_num_(nan=0.0, posinf=3e38, neginf=-3e38)
        if device is not None and device.type != "cpu":
            stats = copy_to_device(stats, device)
        if isinstance(self._loss, torch.Tensor):
            device_loss = self._loss.to(stats.device)
            finite = torch.isfinite(device_loss)
            stats[:1] = (~finite).float()
            stats[1:2] = torch.where(finite, device_loss, 0.0)
        if self._nonfinite is not None:
            stats[2] = match_device(self._nonfinite, stats)
        if self._own_nonfinite is not None:
            stats[3] = match_device(self._own_nonfinite, stats)
            stats[4] = stats[3] * (self._ranks()[0] + 1)
        if names and self._errors:
            none = torch.zeros(2, device=stats.device)
            errors = [match_device(self._errors.get(name, none), stats) for name in names]
            stats = torch.cat([stats[:HEADER_SIZE], *errors])
        if window is not None:
            stats = torch.cat([stats, window.flatten().to(stats.device)])
        self._loss, self._nonfinite, self._own_nonfinite, self._errors = math.nan, None, None, {}
        self._in_flight.append((names, window is not None))
        return stats

    def average_over_agreeing_groups(self, mean: torch.Tensor) -> None:
        """Average, in place, what the ranks of `group` have averaged; on all ranks of all groups."""
        for group in self.agreeing_groups:
            all_reduce(mean, "avg", group=group)

    def evaluate(self, step: int, mean: torch.Tensor) -> None:
        """Compare the mean over ranks of the oldest `stats_tensor` that was not evaluated yet with the limits.

        Raises CompressionHarmful if an action is "error".
        """
        guard = self.guard
        assert guard is not None  # without one there are no statistics
        names, with_sketches = self._in_flight.popleft() if self._in_flight else (self._sampled_before, False)
        if with_sketches:
            mean, sketches = mean[: -2 * SKETCH_SIZE], mean[-2 * SKETCH_SIZE :].view(2, SKETCH_SIZE)
            if (harm := self._window.evaluate(sketches)) is not None:
                self._act(step, "harm", "", harm.value, harm.limit, harm.explanation, "compression")
        without_loss, loss, nonfinite, own_nonfinite, own_rank, *errors = mean.tolist()
        self._nonfinite_steps = self._nonfinite_steps + 1 if nonfinite > 0 else 0
        if self._nonfinite_steps >= guard.nonfinite:
            blame = self._blame(own_nonfinite, own_rank)
            self._act(step, "nonfinite", "", self._nonfinite_steps, guard.nonfinite, *blame)
        if without_loss < 1 and loss > 0:
            excess = self._losses.update(loss / (1 - without_loss), guard.loss)
            if excess is not None:
                self._losses = LossMean()  # the losses after this one are compared with a new mean
                self._act(step, "loss", "", excess, guard.loss)
        for name, missing, residual_ratio in zip(names, errors[::2], errors[1::2], strict=True):
            scheme = self._schemes[name]
            if name in self._held_to_error and missing > guard.error:
                self._act(step, "error", name, missing, guard.error, cause="compression")
            limit = residual_limit(scheme) if guard.residual is None else guard.residual
            if residual_ratio > limit:
                self._act(step, "residual", name, residual_ratio, limit, cause="compression")

    def scheme_for(self, name: str, wanted: Scheme, step: int) -> Scheme:
        """Return what a parameter is compressed with in a step, if the policy wants ``wanted``."""
        if step < self._uncompressed_until:
            return codec("none")
        for _ in range(self._finer_steps.get(name, 0)):
            wanted = finer(wanted)
        return wanted

    def begin_step(self, step: int) -> None:
        """Start a step, after the statistics that have arrived were evaluated."""
        finite = self._window.end_step()
        if finite is not None and self._sketched_mean:
            self.report_nonfinite(~finite, None)
        self._sketched_mean = False
        self._sampled_before, self._sampled = self._sampled, []
        if step == self._uncompressed_until and step > 0:
            self.revision += 1  # the action "uncompressed" ends here

    def pop_resets(self) -> list[str]:
        """Return the parameters whose residuals are to be set to zero, once."""
        popped, self._resets = self._resets, []
        return popped

    def pop_changes(self) -> list[str]:
        """Return the parameters that are compressed with another scheme from now on, once."""
        popped, self._changed = self._changed, []
        return popped

    def state_dict(self) -> dict[str, object]:
        """Return the decisions in force as plain values."""
        if self.guard is None:
            return {}
        return {"finer": dict(self._finer_steps), "plain_until": self._uncompressed_until}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Continue with the decisions of a `state_dict`."""
        if self.guard is None:
            return
        finer_steps, until = state.get("finer", {}), state.get("plain_until", 0)
        assert isinstance(finer_steps, Mapping) and isinstance(until, int)
        self._finer_steps, self._uncompressed_until = dict(finer_steps), until
        self.revision += 1

    def _ranks(self) -> tuple[int, int]:
        """Return this rank and the number of ranks that decide alike; with several groups this rank's global number."""
        if self.ranks is None:
            rank, size = rank_and_size(self.group)
            if self.agreeing_groups:
                rank, size = dist.get_rank(), size * math.prod(map(dist.get_world_size, self.agreeing_groups))
            self.ranks = rank, size
        return self.ranks

    def _blame(self, own_nonfinite: float, own_rank: float) -> tuple[str, str, int | None]:
        """Return explanation, cause and rank of means that are not finite, from the averages of `stats_tensor`."""
        if own_nonfinite == 0:
            return (
                "the gradients of all ranks were finite before compression: values or sums beyond the range of the "
                "codec or of the gradients' dtype",
                "compression",
                None,
            )
        size = self._ranks()[1]
        count = round(own_nonfinite * size)
        if count == 1:
            rank = round(own_rank * size) - 1
            return f"the gradients of rank {rank} held NaN or Inf before compression", "gradients", rank
        text = f"the gradients of {count} of {size} ranks held NaN or Inf before compression"
        if count == size:
            text += "; the weights may hold them already"
        return text, "gradients", None

    def _act(
        self,
        step: int,
        kind: str,
        name: str,
        value: float,
        limit: float,
        explanation: str = "",
        cause: str = "unknown",
        rank: int | None = None,
    ) -> None:
        guard = self.guard
        assert guard is not None  # `evaluate` has one
        action = getattr(guard, f"on_{kind}")
        if action == "ignore":
            return
        event = Event(
            step=step,
            kind=kind,
            name=name,
            value=value,
            limit=limit,
            action=action,
            explanation=explanation,
            cause=cause,
            rank=rank,
        )
        if not any((old.kind, old.name) == (kind, name) for old in self.events):
            _log.warning("%s", event)
        self.events.append(event)
        affected = [name] if name else list(self._schemes)
        if action == "finer":
            for parameter in affected:
                self._finer_steps[parameter] = self._finer_steps.get(parameter, 0) + 1
                self._changed.append(parameter)
            self.revision += 1
        elif action == "uncompressed":
            self._uncompressed_until = step + guard.steps
            self.revision += 1
        elif action == "reset":
            self._resets += affected
        if guard.on_event is not None:
            guard.on_event(event)
        if action == "error":
            raise CompressionHarmful(event)
