"""`RunMonitor`: MFU, the share of communication by axis of the mesh, gradient norms and slow ranks of a training run.

The times of communication are those that the engine's flight recorder keeps anyway, the last 256 operations of each
group, so nothing is added to a call. The monitor reads them every few steps. `find_stragglers` says which ranks hold up
the others, and whether their processors or their links are the cause.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from dtcomm.arguments import require_int
from dtcomm.collectives import all_gather
from dtcomm.extensions.extras.model_flops import peak_flops
from dtcomm.profiling.metrics import HasMetrics, Metric
from dtcomm.profiling.summary import format_table
from dtcomm.profiling.trace import union_length
from dtcomm.runtime.communicator import existing_communicators

Axes = Mapping[str, dist.ProcessGroup | DeviceMesh | None] | DeviceMesh
SLOW_COMPUTE = 1.25  # times the seconds for a sample of the median rank
SLOW_LINK = 2.0  # times the seconds of a message on the median rank's faster link
WAITING_SHARE = 0.1  # of a step; where even the last rank waits less, no link is to blame


@dataclass(frozen=True, kw_only=True)
class RankSpeed:
    """What was measured of one rank in the last ``every`` steps.

    Attributes:
        rank: The rank in the group.
        samples: Its samples in a step.
        sample_s: Median seconds until all gradients of a step are computed, for each sample.
        wait_s: Median seconds that it then waits for communication, and so for slower ranks.
        link_s: Seconds of a message of 256 KiB on the faster of its links to the two ranks beside it.
    """

    rank: int
    samples: int
    sample_s: float
    wait_s: float
    link_s: float = 0.0

    @property
    def compute_s(self) -> float:
        """Seconds until all gradients of a step are computed."""
        return self.samples * self.sample_s


@dataclass(frozen=True, kw_only=True)
class Straggler:
    """A rank that holds up the others; ``str()`` says why.

    Attributes:
        rank: The rank in the group.
        cause: "slow compute" or "slow link".
        factor: How many times the median rank's time it takes.
    """

    rank: int
    cause: str
    factor: float

    def __str__(self) -> str:
        return f"rank {self.rank}: {self.cause}, {self.factor:.2g} times the median rank's time"


def find_stragglers(speeds: Sequence[RankSpeed]) -> list[Straggler]:
    """Return the ranks that are slow, and whether their processors or their links are.

    A rank computes slowly if a sample takes it 1.25 times as long as the median rank. Its link is slow if communication
    takes more than a tenth of a step even on the rank that waits least, and messages over its faster link take twice as
    long as on the median rank. With two ranks there is one link, so none can be called slow.

    Args:
        speeds: What was measured, of all ranks.

    Returns:
        The slow ranks; a rank may appear with both causes.

    Example:
        >>> from dtcomm.extensions.extras import RankSpeed, find_stragglers
        >>> fast = RankSpeed(rank=0, samples=8, sample_s=0.01, wait_s=0.09)
        >>> slow = RankSpeed(rank=1, samples=8, sample_s=0.02, wait_s=0.01)
        >>> print(*find_stragglers([fast, slow]))
        rank 1: slow compute, 2 times the median rank's time
    """
    stragglers = []
    sample_s = statistics.median_low(speed.sample_s for speed in speeds)
    link_s = statistics.median_low(speed.link_s for speed in speeds)
    waiting = min(speed.wait_s / max(speed.compute_s + speed.wait_s, 1e-12) for speed in speeds)
    for speed in speeds:
        if speed.sample_s > SLOW_COMPUTE * sample_s:
            factor = speed.sample_s / sample_s
            stragglers.append(Straggler(rank=speed.rank, cause="slow compute", factor=factor))
        if waiting > WAITING_SHARE and link_s > 0 and speed.link_s > SLOW_LINK * link_s:
            stragglers.append(Straggler(rank=speed.rank, cause="slow link", factor=speed.link_s / link_s))
    return stragglers


@dataclass(frozen=True, kw_only=True)
class AxisShare:
    """The communication of one axis.

    Attributes:
        axis: Its name.
        operations: Its collectives in a step.
        seconds: How long at least one of them was in flight in a step.
        share: That time over the step.
    """

    axis: str
    operations: float
    seconds: float
    share: float


@dataclass(frozen=True, kw_only=True)
class RunReport:
    """What a `RunMonitor` measured; ``str()`` prints it. Times are of this rank, in seconds.

    Attributes:
        steps: Number of steps.
        step_s: Median time of the last steps.
        own_s: The part of that in which no message of any axis was in flight: what the step would take alone.
        efficiency: The own time of the median rank over the step: what communication and slow ranks leave.
        flops: FLOPs of a step on this rank; 0 if they are not known.
        peak: Peak FLOP/s of the device; 0 if it is not known.
        mfu: Model FLOPs utilization: ``flops`` over what the peak allows in a step; None if either is unknown.
        tokens_per_second: Of this rank; 0 if tokens were not counted.
        gradient_norm: Of the last step for which it was given; None before.
        loss: Of the last step for which it was given; None before.
        axes: The shares of the axes whose groups have communicated.
        speeds: What the ranks told each other last.
        stragglers: The slow ones among them.
    """

    steps: int
    step_s: float
    own_s: float
    efficiency: float
    flops: float
    peak: float
    mfu: float | None
    tokens_per_second: float
    gradient_norm: float | None
    loss: float | None
    axes: tuple[AxisShare, ...]
    speeds: tuple[RankSpeed, ...]
    stragglers: tuple[Straggler, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self)

    def __str__(self) -> str:
        if not self.steps:
            return "run: no step was measured yet"
        parts = [f"{self.steps} steps of {self.step_s * 1e3:.3g} ms", f"efficiency {self.efficiency:.1%}"]
        if self.mfu is not None:
            parts.append(f"MFU {self.mfu:.1%} of {self.peak / 1e12:.4g} TFLOP/s")
        elif self.flops:
            parts.append(f"{self.flops / self.step_s / 1e12:.4g} TFLOP/s")
        if self.tokens_per_second:
            parts.append(f"{self.tokens_per_second:,.0f} tokens/s")
        if self.gradient_norm is not None:
            parts.append(f"gradient norm {self.gradient_norm:.4g}")
        if self.loss is not None:
            parts.append(f"loss {self.loss:.4g}")
        lines = [f"run: {', '.join(parts)}"]
        if self.axes:
            rows = [
                (a.axis, f"{a.operations:.3g}", f"{a.seconds * 1e3:.3g}", f"{a.share:.1%}") for a in self.axes
            ]
            lines += format_table(("axis", "operations", "ms", "share"), rows, left={0})
        lines += [f"slow: {straggler}" for straggler in self.stragglers]
        return "\n".join(lines)


class RunMonitor:
    """Measures a training run: call `step` once at the end of each step, on every rank.

    Every ``every`` steps the ranks exchange two numbers, and a rank whose own part of a step takes 1.25 times as long
    as the median rank's is reported as a straggler. All ranks of a synchronous run have equal steps; the slow one is
    the one that computes while the others wait for its messages.

    Args:
        axes: The axes of the run: name → process group or one-dimensional mesh (None: all ranks), or a device mesh
            whose dimensions have names. Default: ``{"all": None}``.
        states: States of integrations, whose metrics are exported along, with the label ``axis``: name → state.
            Default: none.
        flops: FLOPs of a step on this rank: `count_flops` or `transformer_flops` of the whole model, divided by the
            number of ranks that share its work. Default: 0, unknown.
        peak: Peak FLOP/s of this rank's device: a number, or a name for `peak_flops`. Default: None, unknown.
        tokens: Tokens of a step on this rank. Default: 0.
        group: The ranks that exchange their speeds; None: all. Default: None.
        every: Steps between two exchanges; 0: none, and nothing is communicated. Default: 20.

    Raises:
        TypeError: An argument has a wrong type.
        ValueError: A number is negative, a device is unknown, or a mesh has dimensions without names.

    Example::

        monitor = dtcomm.extensions.extras.RunMonitor(
            mesh, {"dp": state}, flops=dtcomm.extensions.extras.count_flops(model, tokens), peak="h100"
        )
        for tokens in batches:
            ...
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            monitor.step(gradient_norm=norm, loss=loss)
        print(monitor.report())
        dtcomm.profiling.write_prometheus(monitor, "run.prom")
    """

    def __init__(
        self,
        axes: Axes | None = None,
        states: Mapping[str, HasMetrics] | None = None,
        *,
        flops: float = 0.0,
        peak: float | str | None = None,
        tokens: float = 0.0,
        group: dist.ProcessGroup | None = None,
        every: int = 20,
    ) -> None:
        require_int("every", every, 0)
        for name, value in (("flops", flops), ("tokens", tokens)):
            if value < 0:
                raise ValueError(f"{name}: expected 0 or more, got {value}")
        self._peak = peak_flops(peak) if isinstance(peak, str) else float(peak or 0.0)
        if self._peak < 0:
            raise ValueError(f"peak: expected FLOP/s above 0, got {peak}")
        self._groups = _groups(axes)
        self._states = dict(states or {})
        for name, state in self._states.items():
            if not hasattr(state, "metrics"):
                got = type(state).__name__
                raise TypeError(f"states: {name}: expected an object with metrics(), got {got}")
        self._flops, self._tokens, self._group, self._every = float(flops), float(tokens), group, every
        self._steps = 0
        self._times: deque[float] = deque(maxlen=max(every, 20))
        self._begin: float | None = None
        self._start_window()
        self._axes: tuple[AxisShare, ...] = ()
        self._own_s = self._in_flight_s = 0.0
        self._speeds: tuple[RankSpeed, ...] = ()
        self._norm: float | torch.Tensor | None = None
        self._loss: float | torch.Tensor | None = None

    def step(
        self, *, gradient_norm: float | torch.Tensor | None = None, loss: float | torch.Tensor | None = None
    ) -> None:
        """End a step.

        Args:
            gradient_norm: The norm of the step's gradients, as ``torch.nn.utils.clip_grad_norm_`` returns it. A tensor
                is read when a report is made. Default: None, not known.
            loss: The step's loss. Default: None.
        """
        moment = time.perf_counter()
        if self._begin is not None:
            self._times.append(moment - self._begin)
        self._begin = moment
        self._steps += 1
        self._norm = self._norm if gradient_norm is None else _detached(gradient_norm)
        self._loss = self._loss if loss is None else _detached(loss)
        self._window_steps += 1
        if self._every and self._steps % self._every == 0:
            self._read_axes()
            self._exchange()
            self._start_window()
            self._begin = time.perf_counter()  # without what reading took

    def report(self) -> RunReport:
        """Return what was measured so far; nothing is communicated."""
        if self._window_steps and not (self._every and self._axes):
            self._read_axes()
        step_s = statistics.median(self._times) if self._times else 0.0
        flops_per_s = self._flops / step_s if step_s else 0.0
        own = statistics.median_low(speed.sample_s for speed in self._speeds) if self._speeds else self._own_s
        return RunReport(
            steps=self._steps, step_s=step_s, own_s=self._own_s,
            efficiency=min(1.0, own / step_s) if step_s and own else 0.0, flops=self._flops, peak=self._peak,
            mfu=flops_per_s / self._peak if self._peak and flops_per_s else None,
            tokens_per_second=self._tokens / step_s if step_s else 0.0,
            gradient_norm=None if self._norm is None else float(self._norm),
            loss=None if self._loss is None else float(self._loss), axes=self._axes, speeds=self._speeds,
            stragglers=tuple(find_stragglers(self._speeds)) if self._speeds else (),
        )  # fmt: skip

    def metrics(self) -> list[Metric]:
        """Return the metrics of the run, and those of the states with the label ``axis``."""
        report = self.report()
        rows: list[tuple[str, float | None, str, dict[str, str]]] = []
        if report.step_s:
            rows += [
                ("run_step_seconds", report.step_s, "median time of a step", {}),
                ("run_own_seconds", report.own_s, "time of a step without messages in flight", {}),
                ("run_efficiency", report.efficiency, "own time of the median rank over the step", {}),
            ]
        flops_per_s = report.flops / report.step_s if report.step_s else 0.0
        rows += [
            ("model_flops_per_second", flops_per_s or None, "model FLOP/s", {}),
            ("mfu", report.mfu or None, "model FLOPs utilization", {}),
            ("tokens_per_second", report.tokens_per_second or None, "tokens of this rank in a second", {}),
            ("gradient_norm", report.gradient_norm, "norm of the gradients", {}),
            ("loss", report.loss, "loss", {}),
        ]
        text = "time of a step in which messages of the axis were in flight"
        for axis in report.axes:
            labels = {"axis": axis.axis}
            rows.append(("axis_communication_share", axis.share, f"{text}, over the step", labels))
            rows.append(("axis_communication_seconds", axis.seconds, text, labels))
        slow = {straggler.rank: straggler.factor for straggler in report.stragglers}
        own = "time of a step in which a rank had no message in flight"
        factor = "times the median rank's time that a slow rank takes; 0 for the others"
        for speed in report.speeds:
            labels = {"peer": str(speed.rank)}
            rows.append(("rank_own_seconds", speed.sample_s, own, labels))
            rows.append(("straggler_factor", slow.get(speed.rank, 0.0), factor, labels))
        metrics = [Metric("dtcomm_run_steps_total", report.steps, "steps that the monitor saw", "counter")]
        metrics += [
            Metric(f"dtcomm_{name}", value, help, labels=labels)
            for name, value, help, labels in rows
            if value is not None
        ]
        for name, state in self._states.items():
            metrics += [
                Metric(metric.name, metric.value, metric.help, metric.kind, {"axis": name, **metric.labels})
                for metric in state.metrics()
            ]
        return metrics

    def _start_window(self) -> None:
        self._since, self._window_steps = time.monotonic_ns(), 0
        # The number of the last operation before, by communicator.
        self._numbers = {
            id(communicator): max((e.number for e in communicator.runtime.flight_entries()), default=0)
            for group in self._groups.values()
            for communicator in existing_communicators(group)
        }

    def _read_axes(self) -> None:
        """Take the operations since the last look from the flight recorders."""
        since, steps, before = self._since, self._window_steps, self._numbers
        end = time.monotonic_ns()
        self._start_window()
        if not steps:
            return
        step_s = (end - since) * 1e-9 / steps
        shares: list[AxisShare] = []
        everything: list[tuple[int, int]] = []
        largest_scale = 1.0
        for name, group in self._groups.items():
            intervals: list[tuple[int, int]] = []
            scale = 1.0
            for communicator in existing_communicators(group):
                entries = [e for e in communicator.runtime.flight_entries() if e.finished_ns > since]
                if not entries:
                    continue
                # What the recorder has forgotten is taken to have lasted as long as what it kept.
                all_operations = max(entry.number for entry in entries) - before.get(id(communicator), 0)
                scale = max(scale, all_operations / len(entries))
                intervals += [(max(e.started_ns or e.issued_ns, since), e.finished_ns) for e in entries]
            if not intervals:
                continue
            seconds = min(step_s, union_length(intervals) * 1e-9 * scale / steps)
            calls = len(intervals) * scale / steps
            shares.append(AxisShare(axis=name, operations=calls, seconds=seconds, share=seconds / step_s))
            everything += intervals
            largest_scale = max(largest_scale, scale)
        self._axes = tuple(shares)
        self._in_flight_s = min(step_s, union_length(everything) * 1e-9 * largest_scale / steps)
        self._own_s = step_s - self._in_flight_s

    def _exchange(self) -> None:
        """Tell the other ranks how long this one's part of a step takes."""
        if not dist.is_initialized():
            return
        device = "cuda" if dist.get_backend(self._group) == "nccl" else "cpu"
        self._speeds = tuple(
            RankSpeed(rank=rank, samples=1, sample_s=max(own_s, 1e-9), wait_s=in_flight)
            for rank, (own_s, in_flight) in enumerate(
                gather_rows([self._own_s, self._in_flight_s], self._group, device)
            )
        )


def gather_rows(
    values: Sequence[float], group: dist.ProcessGroup | None, device: torch.device | str | None
) -> list[list[float]]:
    """Return the values of all ranks of a group, which communicates tensors of ``device``."""
    own = torch.tensor(values, dtype=torch.float32, device=device)
    gathered = own.new_empty(dist.get_world_size(group), len(values))
    all_gather(gathered, own, group=group)
    rows: list[list[float]] = gathered.tolist()
    return rows


def _groups(axes: Axes | None) -> dict[str, dist.ProcessGroup | None]:
    if axes is None:
        return {"all": None}
    if isinstance(axes, DeviceMesh):
        names = axes.mesh_dim_names
        if not names:
            text = "pass mesh_dim_names= to init_device_mesh"
            raise ValueError(f"axes: the dimensions of the mesh have no names; {text}")
        return {name: axes.get_group(name) for name in names}
    if not isinstance(axes, Mapping):
        raise TypeError(f"axes: expected a mapping or a DeviceMesh, got {type(axes).__name__}")
    groups: dict[str, dist.ProcessGroup | None] = {}
    for name, group in axes.items():
        if isinstance(group, DeviceMesh):
            if group.ndim != 1:
                raise ValueError(f"axes: {name}: expected a mesh of one dimension, got {group.ndim}")
            group = group.get_group()
        if group is not None and not isinstance(group, dist.ProcessGroup):
            raise TypeError(f"axes: {name}: expected a process group or a mesh, got {type(group).__name__}")
        groups[name] = group
    return groups


def _detached(value: float | torch.Tensor) -> float | torch.Tensor:
    return value.detach() if isinstance(value, torch.Tensor) else value
