"""What a rank measures of its own gradients and encodings, for the monitors of `dtcomm.compress.monitor`.

`ErrorSample` measures what an encoding loses of a gradient, on some of its elements. `GradientSketch` makes 256 numbers
that keep inner products, to compare gradients without sending them; `SketchWindow` sums them over steps and compares
the sums.

The guard compares what ranks apply (the mean after compression) with what they would apply without compression (the
mean of their gradients) by a sketch of each, summed over a window of steps. A sketch is linear: the mean over ranks of
the sketches of their gradients is the sketch of the mean gradient, and sums over steps are sketches of sums.

**The map** (Alon, Matias, Szegedy 1996; Charikar, Chen, Farach-Colton 2002, "Finding Frequent Items in Data Streams").
Element i of a parameter gets a sign s(i) = +1 or -1 and one of S = 256 cells h(i); cell k of the sketch is the sum of
s(i) x(i) over the elements with h(i) = k. Both come from the parameter's name and the element's index by a
counter-based hash, so they are equal on all ranks and in all runs. Of a parameter with more than 16384 elements only a
stratified sample is read, 128 runs of 64 adjacent elements at random places, weighted so that the expected squared
norm is that of the whole. A sketch therefore costs a bounded time for each parameter, whatever its size.

**Its error.** For a true cosine r between two vectors, Fisher's transform atanh(c) of the cosine c of their sketches is
nearly normal around atanh(r), with standard deviation 1 / sqrt(S - 3) = 0.063, unless a few elements hold most of the
energy. So a window whose true cosine is r falls below a limit t with probability

    p(r, t) = Phi(-(atanh(r) - atanh(t)) * sqrt(S - 3)).

At the limit 0.5 that is 2e-7 for r = 0.7 and 1 % for r = 0.6; at the limit 0.7 it is 1e-4 for r = 0.8 and below 1e-20
for r = 0.9. The logarithm of the ratio of the norms has a standard deviation of at most sqrt((1 - r^2) / S) = 0.0625
sqrt(1 - r^2); the limit log 2 is more than 11 of them away from 0. An alarm needs two windows in a row, so that p
bounds the rate of false alarms from above. Where parameters are sampled, r is the cosine over the sample.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from dtcomm.compress.guard import Guard, cosine_limit, send_interval
from dtcomm.compress.spec import Scheme
from dtcomm.kernels import counter_rng
from dtcomm.streams import copy_to_device, record_streams

SKETCH_SIZE = 256
FULL_SIZE = 16384  # elements up to which all of a parameter is read
RUN = 8  # adjacent elements that go into the same cell
SAMPLED_RUNS = 128  # of a larger parameter
SAMPLED_RUN = 64  # adjacent elements that are read together; every RUN of them go into one cell
MAX_READINGS = 128  # that are kept until their sketches are added up
MAX_WEIGHTS = 4  # of lists of readings, which are kept: of gradients and of means
HARM_PATIENCE = 2  # windows in a row that must exceed a limit


class GradientSketch:
    """The map from a flat tensor to its sketch.

    ``parameters`` are (name, first element, number of elements) of those that take part; those of fewer than `RUN`
    elements are left out.

    Example:
        >>> sketch = GradientSketch([("weight", 0, 4096)], torch.device("cpu"))
        >>> x = torch.ones(4096)
        >>> sketch(x).shape, torch.equal(sketch(2 * x), 2 * sketch(x))
        (torch.Size([256]), True)
    """

    def __init__(self, parameters: Iterable[tuple[str, int, int]], device: torch.device) -> None:
        maps = [
            (_all_runs if numel <= FULL_SIZE else _sampled_runs)(name, start, numel)
            for name, start, numel in parameters
            if numel >= RUN
        ]
        self.is_empty = not maps  # whether there is nothing to compare
        if maps:
            # First elements of runs [256, n] and their weights [256, n, RUN].
            self._starts = copy_to_device(torch.cat([starts for starts, _ in maps], dim=1), device)
            self.weights = copy_to_device(torch.cat([weights for _, weights in maps], dim=1), device)

    def read(self, tensor: torch.Tensor) -> Reading:
        """Return the elements of a flat contiguous tensor that are in its sketch; on a device one kernel."""
        # A view whose row i is the run that begins with element i.
        runs = tensor.detach().as_strided((tensor.numel() - RUN + 1, RUN), (1, 1))
        return Reading(torch.embedding(runs, self._starts), self)

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return fp32 [256] of a flat contiguous tensor; not finite if an element that is read is not."""
        if self.is_empty:
            return torch.zeros(SKETCH_SIZE, device=tensor.device)
        return SketchSum().add_up([self.read(tensor)])


class Reading(NamedTuple):
    """The elements [256, n, RUN] of a tensor that are in its sketch, which counts ``scale`` times."""

    elements: torch.Tensor
    sketch: GradientSketch
    scale: float = 1.0


class SketchSum:
    """Adds up the sketches of many tensors, in three kernels on a device; the weights are kept from step to step."""

    def __init__(self) -> None:
        self._weights: dict[tuple[tuple[GradientSketch, float], ...], torch.Tensor] = {}

    def add_up(self, readings: Sequence[Reading], out: torch.Tensor | None = None) -> torch.Tensor:
        """Return the sum of the sketches, fp32 [256], in ``out`` if it is given."""
        maps = tuple((reading.sketch, reading.scale) for reading in readings)
        weights = self._weights.get(maps)
        if weights is None:
            if len(self._weights) == MAX_WEIGHTS:
                self._weights.clear()
            parts = [sketch.weights if scale == 1 else sketch.weights * scale for sketch, scale in maps]
            weights = self._weights[maps] = torch.cat(parts, dim=1) if len(parts) > 1 else parts[0]
        elements = [reading.elements for reading in readings]
        record_streams(*elements)  # they may have been read on another stream
        weighted = (torch.cat(elements, dim=1) if len(elements) > 1 else elements[0]) * weights
        return torch.sum(weighted, dim=(1, 2), out=out)


@dataclass(frozen=True)
class Fidelity:
    """How the gradients that all ranks applied in a window of steps compare with the uncompressed ones.

    Attributes:
        cosine: The cosine between the sums over the window.
        norm_ratio: The norm of the sum that was applied over that of the uncompressed one.
        steps: The number of steps in the window.
    """

    cosine: float
    norm_ratio: float
    steps: int

    def __str__(self) -> str:
        return (
            f"cosine {self.cosine:.2f} with the uncompressed gradients and {self.norm_ratio:.2f} times their norm, "
            f"over {self.steps} steps"
        )


def compare_sketches(uncompressed: torch.Tensor, applied: torch.Tensor, steps: int) -> Fidelity:
    """Compare the sketches of two sums over ``steps`` steps; two sketches of zeros count as equal."""
    first, second = (float(torch.linalg.vector_norm(sketch)) for sketch in (uncompressed, applied))
    if not first or not second:
        equal = first == second
        return Fidelity(float(equal), 1.0 if equal else math.inf if second else 0.0, steps)
    return Fidelity(float(torch.dot(uncompressed / first, applied / second)), second / first, steps)


class Sketched(Protocol):
    """A flat tensor of parameters whose gradients are compared."""

    @property
    def schemes(self) -> Mapping[str, Scheme]:
        """What the parameters that are compared are compressed with."""

    def sketch(self, device: torch.device) -> GradientSketch:
        """Return the map to their sketch."""


class Harm(NamedTuple):
    """A cosine or a ratio of norms beyond its limit, and what that means."""

    value: float
    limit: float
    explanation: str


class SketchWindow:
    """Sums of both sketches over a window of steps, and their comparison.

    Attributes:
        schemes: What the parameters that are sketched are compressed with.
        complete: fp32 [2, 256], the sums of a window that is over but was not sent yet.
        fidelity: The comparison of the last window; None before the end of the first one.
    """

    def __init__(self, guard: Guard, momentum: float | None) -> None:
        self._guard, self._momentum = guard, momentum
        self.schemes: dict[str, Scheme] = {}
        self.complete: torch.Tensor | None = None
        self.fidelity: Fidelity | None = None
        # Of this rank's gradients and of their means in this step: what was read, and sketches [2, 256] before that.
        self._read: list[tuple[Reading, Reading]] = []
        self._step: torch.Tensor | None = None
        self._sum = SketchSum()
        self._velocity: torch.Tensor | None = None  # [256]: of this rank's gradients with momentum
        self._sums: torch.Tensor | None = None
        self._steps = self._size = 0  # steps so far, and in the whole window
        self._harmful = 0  # windows in a row beyond a limit

    def add(self, gradient: Reading, mean: Reading) -> None:
        """Add a gradient before compression and the mean after it."""
        self._read.append((gradient, mean))
        if len(self._read) == MAX_READINGS:  # as when gradients of many micro-batches are reduced
            self._add_up()

    def _add_up(self) -> None:
        sides = list(zip(*self._read, strict=True))
        self._read = []
        sketches = torch.empty(2, SKETCH_SIZE, device=sides[0][0].elements.device)
        for side, out in zip(sides, sketches, strict=True):
            self._sum.add_up(side, out)
        self._step = sketches if self._step is None else self._step + sketches

    def end_step(self) -> torch.Tensor | None:
        """Add the sketches of the step that is over to the window.

        Returns:
            Whether all are finite, a bool tensor without dimensions; None if there are none.
        """
        if self._read:
            self._add_up()
        sketches, self._step = self._step, None
        if sketches is None:
            return None
        # A step with NaN or Inf, which all ranks have alike, does not count; a GradScaler skips it.
        is_finite: torch.Tensor = torch.linalg.vector_norm(sketches, torch.inf) < torch.inf
        sketches = torch.where(is_finite, sketches, 0.0)
        if self._momentum is not None:
            # A sketch is linear, so momentum of sketches is a sketch of the momentum.
            before = torch.zeros_like(sketches[0]) if self._velocity is None else self._velocity
            self._velocity = torch.where(is_finite, self._momentum * before + sketches[0], before)
            sketches = torch.stack([torch.where(is_finite, self._velocity, 0.0), sketches[1]])
        self._sums = sketches if self._sums is None else self._sums + sketches
        self._steps += 1
        # All ranks know the same schemes. What waits longer than a window would seem to be lost.
        wait = max(map(send_interval, self.schemes.values()), default=1)
        self._size = max(self._guard.window, wait // 2)
        if self._steps >= self._size:
            self.complete, self._sums, self._steps = self._sums, None, 0
        return is_finite

    def pop_complete(self) -> torch.Tensor | None:
        """Return the sums of a window that is over, once."""
        complete, self.complete = self.complete, None
        return complete

    def evaluate(self, sums: torch.Tensor) -> Harm | None:
        """Compare the mean over ranks of a window's sums; return what is beyond a limit in two windows in a row."""
        fidelity = self.fidelity = compare_sketches(sums[0], sums[1], self._size)
        cosine, norm_ratio = fidelity.cosine, fidelity.norm_ratio
        limit = self._guard.cosine
        if limit is None:
            limit = min(map(cosine_limit, self.schemes.values()), default=0.5)
        highest = self._guard.norm_ratio
        # DGC drops the momentum of the elements that it sends; without any, 1 - momentum of the norm is left.
        lowest = (1 - (self._momentum or 0)) / highest
        if cosine >= limit and lowest <= norm_ratio <= highest:
            self._harmful = 0
            return None
        self._harmful += 1
        if self._harmful < HARM_PATIENCE:
            return None
        self._harmful = 0
        value, exceeded = cosine, limit
        meaning = "what compression loses does not arrive in time, or the error of the rest is too large"
        if cosine >= limit:
            value, exceeded = norm_ratio, highest if norm_ratio > 1 else lowest
            meaning = (
                "delayed gradients come back in bursts, or are scaled up"
                if norm_ratio > 1
                else "a large part of the gradients does not arrive"
            )
        remedy = "use more bits or elements, feedback, or a lower learning rate"
        explanation = f"{fidelity}, and the window before was beyond a limit too: {meaning}; {remedy}"
        return Harm(value, exceeded, explanation)


def _all_runs(name: str, start: int, numel: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the first elements [256, n] of the runs of a whole parameter, and the weights [256, n, 8]."""
    key = counter_rng.absorb(zlib.crc32(name.encode()), numel)
    count = -(-numel // RUN)
    weights = _signs(key, count * RUN).view(count, RUN)
    first = torch.arange(count) * RUN
    # The last run ends with the parameter and leaves out what the one before it holds.
    overlap = count * RUN - numel
    first[-1] -= overlap
    weights[-1, :overlap] = 0.0
    # In a random order, so that neighbours go into different cells. Each cell gets as many runs.
    padded = -(-count // SKETCH_SIZE) * SKETCH_SIZE
    order = torch.from_numpy(counter_rng.uniform(counter_rng.absorb(key, 1), 0, padded)).argsort(stable=True)
    starts = torch.full((padded,), start)
    starts[:count] += first
    padded_weights = torch.zeros(padded, RUN)
    padded_weights[:count] = weights
    return starts[order].view(SKETCH_SIZE, -1), padded_weights[order].view(SKETCH_SIZE, -1, RUN)


def _sampled_runs(name: str, start: int, numel: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the first elements [256, 4] of runs in the sampled ones of a parameter, and the weights [256, 4, 8]."""
    key = counter_rng.absorb(zlib.crc32(name.encode()), numel)
    cells_of_run = SAMPLED_RUN // RUN
    # One run at a random place of each of equal strata.
    places = torch.from_numpy(counter_rng.uniform(counter_rng.absorb(key, 1), 0, SAMPLED_RUNS)).double()
    places += torch.arange(SAMPLED_RUNS)
    first = (places * ((numel - SAMPLED_RUN) / SAMPLED_RUNS)).long()
    order = torch.from_numpy(counter_rng.uniform(counter_rng.absorb(key, 2), 0, SAMPLED_RUNS)).argsort(
        stable=True
    )
    signs = _signs(key, SAMPLED_RUNS * SAMPLED_RUN) * math.sqrt(numel / (SAMPLED_RUNS * SAMPLED_RUN))
    groups = SKETCH_SIZE // cells_of_run
    # Each group of cells gets as many sampled runs, and a cell one run of each.
    starts = (start + first)[order].view(groups, 1, -1) + RUN * torch.arange(cells_of_run).view(-1, 1)
    weights = signs.view(groups, -1, cells_of_run, RUN).transpose(1, 2)
    return starts.view(SKETCH_SIZE, -1), weights.reshape(SKETCH_SIZE, -1, RUN)


def _signs(key: int, count: int) -> torch.Tensor:
    return torch.where(torch.from_numpy(counter_rng.uniform(key, 0, count)) < 0.5, -1.0, 1.0)


MAX_SAMPLES = 8192  # elements of a gradient, or of a mean, that are looked at
TYPICAL_SHARE = 0.9  # the share of elements, the smallest ones, over which the typical error is taken


@dataclass
class ErrorSample:
    """A sample of one parameter before its encoding, to be compared with what the encoding lost.

    Attributes:
        stride: Every ``stride``-th element is in the sample.
        encoder_input: The sampled elements of gradient + residual, fp32.
        gradient_norm: The norm of the whole gradient; a tensor without dimensions on the gradient's device.
    """

    name: str
    scheme: Scheme
    stride: int
    encoder_input: torch.Tensor
    gradient_norm: float | torch.Tensor

    @staticmethod
    def take(
        name: str,
        scheme: Scheme,
        gradient_norm: float | torch.Tensor,
        sent: torch.Tensor,
        residual: torch.Tensor | None,
    ) -> ErrorSample:
        """Copy every n-th element of ``sent`` + ``residual``, the two tensors that are given to the collective."""
        stride = max(1, sent.numel() // MAX_SAMPLES)
        # A copy in any case: collectives may write their result over their input.
        encoder_input = sent[::stride].to(torch.float32, copy=True)
        if residual is not None:
            encoder_input += residual[::stride]
        return ErrorSample(name, scheme, stride, encoder_input, gradient_norm)

    def measure(self, lost: torch.Tensor) -> torch.Tensor:
        """Return fp32 [2] on the device of ``lost``; the host does not wait for it.

        The values are the share of the typical elements that is missing (1 less their projection on what arrived) and
        |lost| / |gradient|; 0 instead of one that is not finite.
        """
        magnitudes = self.encoder_input.abs()
        if not magnitudes.numel():
            return torch.zeros(2, device=lost.device)
        # A place in the sorted magnitudes instead of a quantile, whose number would have to be read on the host.
        largest_typical = magnitudes.sort().values[int(TYPICAL_SHARE * (magnitudes.numel() - 1))]
        is_typical = magnitudes <= largest_typical
        typical = torch.where(is_typical, self.encoder_input, 0.0)
        missing = (
            typical * torch.where(is_typical, lost[:: self.stride], 0.0)
        ).sum() / typical.square().sum()
        missing = torch.where(torch.isfinite(self.encoder_input).all(), missing, 0.0)
        gradient_norm = torch.as_tensor(self.gradient_norm, dtype=torch.float32).reshape(1)
        residual_ratio = torch.linalg.vector_norm(lost) / gradient_norm
        errors = torch.stack([missing.clamp(min=0.0), residual_ratio.reshape(())])
        return torch.where(torch.isfinite(errors), errors, 0.0)


def l2_norm(tensor: torch.Tensor) -> torch.Tensor:
    """Return the norm in fp32, a tensor without dimensions on the device of ``tensor``."""
    norm: torch.Tensor = torch.linalg.vector_norm(tensor, dtype=torch.float32)
    return norm


def l2_norms(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the norm of each in fp32, [len(tensors)]."""
    return torch.stack([l2_norm(tensor) for tensor in tensors])


@dataclass(frozen=True)
class GradientMeasurement:
    """What was measured of a bucket's gradients on this rank before they were compressed.

    Attributes:
        sketched: What is sketched of its lossy segments; None if there are none.
        nonfinite: Whether the gradients hold NaN or Inf, a bool tensor without dimensions. None: not looked at, as
            means of the steps before were finite.
    """

    sketched: Reading | None
    nonfinite: torch.Tensor | None


def is_nonfinite(tensor: torch.Tensor) -> torch.Tensor:
    """Return whether a sample of a flat tensor holds NaN or Inf, a bool tensor without dimensions."""
    # Of their sum, because torch.isfinite takes twice as long for elements that are not adjacent.
    return ~torch.isfinite(tensor[:: max(1, tensor.numel() // MAX_SAMPLES)].sum(dtype=torch.float32))
