"""What the autotuner measures: buckets, samples of their gradients, kernels and the link; how ranks agree on it.

`Measurements` collects what one rank measured in the first steps. `Consensus` gives all ranks the largest of their
measurements. `dtcomm.ddp.autotune.tuner` decides by them.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import torch
import torch.distributed as dist

from dtcomm import env
from dtcomm.collectives import all_reduce, info
from dtcomm.compress.autotune_model import BucketProfile, LinkCosts, cpu_oversubscribed
from dtcomm.compress.checkpoint import rank_and_size
from dtcomm.compress.policy import MIN_COMPRESSED_ELEMENTS
from dtcomm.compress.powersgd import PowerSGD
from dtcomm.compress.spec import LevelCodecs, Scheme, matrix_shape, wire_codec
from dtcomm.device.streams import Streams, copy_to_device, streams_of
from dtcomm.kernels import low_rank, ops

SAMPLE_ELEMENTS = 1 << 16  # of one gradient, on which errors and kernels are measured
CALLS = 5  # of a kernel that is timed
PROBE_BYTES = [1 << exponent for exponent in (16, 18, 20, 22)]
MAX_PROBE_SECONDS = 0.02  # after a probe that takes longer no larger one is sent


class Consensus(Protocol):
    """What the autotuner asks about all ranks; calls are made on all ranks in the same order.

    Attributes:
        ranks: The number of ranks.
        device: The device of the gradients; None for the CPU.
    """

    ranks: int
    device: torch.device | None

    def max(self, values: Sequence[float]) -> list[float]:
        """Return the largest of all ranks' values, element by element."""

    def probe(self) -> tuple[float, float]:
        """Return the seconds of a tiny message, and the seconds for each byte that a rank sends in a large one."""

    def cpu_oversubscribed(self) -> bool:
        """Return whether this rank has no core besides the one that computes."""

    def in_memory(self) -> bool:
        """Return whether all ranks share one host's memory."""

    def emulated(self) -> bool:
        """Return whether DTCOMM_LINK slows our messages; the group's own backend then says nothing of the link."""


class ProcessGroupConsensus:
    """`Consensus` over a process group.

    Args:
        group: The process group; None is the default group.

    Attributes:
        agreeing_groups: Other groups, such as those of tensor parallelism, whose ranks choose alike. Default: none.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self.agreeing_groups: Sequence[dist.ProcessGroup] = ()
        self.device: torch.device | None = None
        self.ranks = rank_and_size(group)[1]

    def max(self, values: Sequence[float]) -> list[float]:
        """See `Consensus.max`."""
        tensor = torch.tensor(values, dtype=torch.float64)
        for group in (self._group, *self.agreeing_groups):
            all_reduce(tensor, "max", group=group)
        largest: list[float] = tensor.tolist()
        return largest

    def probe(self) -> tuple[float, float]:
        """See `Consensus.probe`."""
        latency = min(self._time_all_reduces(64, 8))
        per_byte = 0.0
        for size in PROBE_BYTES:
            seconds = self.max([min(self._time_all_reduces(size // 4, 2))])[0]
            bytes_sent = 2 * (self.ranks - 1) / self.ranks * size
            per_byte = max(0.0, seconds - latency) / bytes_sent
            if seconds > MAX_PROBE_SECONDS:
                break
        return latency, per_byte

    def cpu_oversubscribed(self) -> bool:
        """See `Consensus.cpu_oversubscribed`."""
        if self.device is not None:
            return False
        return cpu_oversubscribed(self.ranks // max(1, int(info(self._group)["hosts"])))

    def in_memory(self) -> bool:
        """See `Consensus.in_memory`."""
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
        """See `Consensus.emulated`."""
        return bool(env.get("DTCOMM_LINK"))

    def _time_all_reduces(self, elements: int, calls: int) -> list[float]:
        tensor = torch.zeros(elements, device=self.device)
        streams = streams_of(tensor.device)
        all_reduce(tensor, group=self._group)  # brings the ranks together
        marks = [streams.mark()]
        for _ in range(calls):
            all_reduce(tensor, group=self._group)
            marks.append(streams.mark())
        if not streams.query(marks[-1]):
            streams.synchronize(marks[-1])
        return [streams.elapsed(*pair) for pair in pairwise(marks)]


@dataclass(frozen=True)
class BucketTiming:
    """One bucket of a step.

    Attributes:
        ready: Seconds from the first bucket of the step until this one was ready.
        seconds: How long its collective took.
        wire_bytes: What this rank sent.
    """

    ready: float
    seconds: float
    wire_bytes: int


@dataclass(frozen=True)
class BucketInfo:
    """What one bucket contains.

    Attributes:
        names: Its parameters.
        matrices: The shapes of the parameters that may be compressed.
        uncompressed_elements: The elements of the others.
        sample: Rows of the largest matrix, on the CPU.
        dtype: The dtype of the gradients.
    """

    names: list[str]
    matrices: tuple[tuple[int, int], ...]
    uncompressed_elements: int
    sample: torch.Tensor
    dtype: torch.dtype

    def error(self, scheme: Scheme) -> float:
        """Return the relative error of one encoding of the sample."""
        return relative_error(scheme, self.sample) if self.sample.numel() else 0.0


@dataclass(frozen=True, kw_only=True)
class MeasuredCosts:
    """What all ranks agreed on.

    Attributes:
        costs: The costs of the link and of the kernels.
        buckets: The profile of each bucket.
        errors: The relative error of each scheme.
        probe_per_byte: Seconds for each byte of the probe alone.
        uncompressed_seconds: Seconds of an uncompressed step.
    """

    costs: LinkCosts
    buckets: list[BucketProfile]
    errors: Mapping[Scheme, float]
    probe_per_byte: float
    uncompressed_seconds: float


class Measurements:
    """What one rank measured."""

    def __init__(self) -> None:
        self._steps: list[Sequence[BucketTiming]] = []
        self._buckets: dict[int, BucketInfo] = {}

    def add_step(self, timings: Sequence[BucketTiming]) -> None:
        """Add the timings of the buckets of one step."""
        self._steps.append(timings)

    def sample_bucket(self, index: int, names: Sequence[str], gradients: Sequence[torch.Tensor]) -> None:
        """Record what a bucket contains, before it is reduced."""
        shapes, uncompressed = [], 0
        largest = torch.empty(0, 0)
        for gradient in gradients:
            if gradient.ndim < 2 or gradient.numel() < MIN_COMPRESSED_ELEMENTS:
                uncompressed += gradient.numel()
                continue
            shapes.append(matrix_shape(gradient))
            if gradient.numel() > largest.numel():
                largest = gradient
        rows, columns = matrix_shape(largest)
        some_rows = largest.reshape(rows, columns)[: max(1, SAMPLE_ELEMENTS // max(1, columns))]
        sample = some_rows.detach().cpu().clone()
        self._buckets[index] = BucketInfo(
            list(names), tuple(shapes), uncompressed, sample, gradients[0].dtype
        )

    def names(self) -> list[list[str]]:
        """Return the names of the parameters in each bucket."""
        return [self._buckets[index].names for index in sorted(self._buckets)]

    def agree(
        self, consensus: Consensus, schemes: Sequence[Scheme], uncompressed_seconds: float
    ) -> MeasuredCosts:
        """Return what all ranks decide by: the largest of their measurements.

        Args:
            consensus: The ranks.
            schemes: The schemes to measure.
            uncompressed_seconds: This rank's time of an uncompressed step.
        """
        infos = [self._buckets[index] for index in sorted(self._buckets)]
        latency, probe_per_byte = consensus.probe()
        steps = [timings for timings in self._steps if len(timings) == len(infos)]
        timings = [
            BucketTiming(
                statistics.median(timing.ready for timing in bucket),
                min(timing.seconds for timing in bucket),
                bucket[0].wire_bytes,
            )
            for bucket in zip(*steps, strict=True)
        ] or [BucketTiming(0.0, 0.0, 0)] * len(infos)
        largest = max(timings, key=lambda timing: timing.wire_bytes, default=BucketTiming(0.0, 0.0, 0))
        # Buckets are sent while backward computes, the probe alone: the faster of the two is the link's speed.
        per_byte = probe_per_byte
        if largest.wire_bytes and largest.seconds > latency:
            per_byte = min(probe_per_byte, (largest.seconds - latency) / largest.wire_bytes)
        oversubscribed = float(consensus.cpu_oversubscribed())
        own = [latency, probe_per_byte, per_byte, uncompressed_seconds, oversubscribed]
        own += [timing.ready for timing in timings]
        for scheme in schemes:
            error = max((bucket.error(scheme) for bucket in infos), default=0.0)
            own += [*kernel_seconds(scheme, device=consensus.device), error]
        latency, probe_per_byte, per_byte, uncompressed_seconds, oversubscribed, *rest = consensus.max(own)
        ready, by_scheme = rest[: len(infos)], rest[len(infos) :]
        kernels = {scheme: (by_scheme[3 * i], by_scheme[3 * i + 1]) for i, scheme in enumerate(schemes)}
        return MeasuredCosts(
            costs=LinkCosts(
                ranks=consensus.ranks,
                latency=latency,
                per_byte=per_byte,
                kernel_seconds=kernels,
                cpu_oversubscribed=bool(oversubscribed),
            ),
            buckets=[
                BucketProfile(
                    ready=seconds,
                    matrices=info.matrices,
                    uncompressed_elements=info.uncompressed_elements,
                    dtype=info.dtype,
                )
                for seconds, info in zip(ready, infos, strict=True)
            ],
            errors={scheme: by_scheme[3 * i + 2] for i, scheme in enumerate(schemes)},
            probe_per_byte=probe_per_byte,
            uncompressed_seconds=uncompressed_seconds,
        )


def kernel_seconds(
    scheme: Scheme, elements: int = SAMPLE_ELEMENTS, device: torch.device | None = None
) -> tuple[float, float]:
    """Return the seconds for each element to encode, with a residual, and to decode; takes a few milliseconds.

    Args:
        scheme: The scheme. PowerSGD's passes count as encoding.
        elements: The size of the tensor.
        device: The device, for which the host waits; None: this CPU core.
    """
    x = torch.randn(elements, generator=torch.Generator().manual_seed(0))
    x = x if device is None else copy_to_device(x, device)
    streams = streams_of(x.device)
    lost = torch.zeros_like(x)
    if isinstance(scheme, PowerSGD):
        side = math.isqrt(elements)
        left, right = x[: 2 * scheme.rank * side].clone().view(2, scheme.rank, side)
        square = side * side

        def run_passes() -> None:
            low_rank.project_rows(x[:square], lost[:square], right, left)
            if not scheme.alternate:
                low_rank.project_columns(x[:square], lost[:square], left, right)
            low_rank.expand(x[:square], lost[:square], left, right)

        return _call_seconds(streams, run_passes) / square, 0.0
    assert not isinstance(scheme, LevelCodecs)  # `AutoConfig` refuses it
    codec = wire_codec(scheme)
    payload = ops.encode(codec, x)
    out = torch.empty_like(x)
    residual = None if codec.lossless(x.dtype) else lost
    encode = _call_seconds(streams, lambda: ops.encode(codec, x, residual=residual, out=payload))
    decode = _call_seconds(streams, lambda: ops.decode(codec, payload, elements, out=out))
    return encode / elements, decode / elements


def relative_error(scheme: Scheme, gradient: torch.Tensor) -> float:
    """Return |what one encoding loses| / |gradient| of whole rows [rows, columns]; 0 if that is 0 or not finite."""
    x = gradient.float().contiguous()
    norm = float(torch.linalg.vector_norm(x))
    if not 0 < norm < math.inf:
        return 0.0
    lost = torch.zeros(x.numel())
    if isinstance(scheme, PowerSGD):
        rows, columns = x.shape
        rank = min(scheme.rank, rows, columns)
        right = torch.randn(rank, columns, generator=torch.Generator().manual_seed(0))
        left = torch.empty(rank, rows)
        x = x.clone().view(-1)
        for _ in range(2):  # the second iteration stands for a warm start
            low_rank.project_rows(x, lost, right, left)
            low_rank.orthonormalise(left)
            low_rank.project_columns(x, lost, left, right)
        low_rank.expand(x, lost, left, right)
    else:
        assert not isinstance(scheme, LevelCodecs)
        ops.encode(wire_codec(scheme), x.view(-1), residual=lost)
    return float(torch.linalg.vector_norm(lost)) / norm


def _call_seconds(streams: Streams, call: Callable[[], object]) -> float:
    """Return the second shortest of some calls: of the device, or of this thread, whose clock stops for others."""
    call()
    if streams.device.type == "cpu":
        marks = [time.thread_time()]
        for _ in range(CALLS):
            call()
            marks.append(time.thread_time())
        seconds = [end - begin for begin, end in pairwise(marks)]
    else:
        events = [streams.mark()]
        for _ in range(CALLS):
            call()
            events.append(streams.mark())
        if not streams.query(events[-1]):
            streams.synchronize(events[-1])
        seconds = [streams.elapsed(*pair) for pair in pairwise(events)]
    return max(sorted(seconds)[1], 1e-9)
