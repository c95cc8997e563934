"""Predicts the time of a training step of data parallelism, for ``dtcomm plan step``.

**DDP.** Gradients become ready bucket by bucket, and their communication overlaps the backward pass. Buckets are sent
one after the other, each when it is ready and the previous one is complete. A step ends when both the backward pass and
the last bucket are complete.

**Cores.** CPU ranks compute and communicate on the same cores. What a message takes of them is added to computing, and
a message cannot take less time than that. The constants were fitted to DDP's steps of an MLP of 25 M parameters and a
click model of 1 M, on a Xeon with a core for each rank; docs/results/training.md counts right verdicts on others.

**FSDP.** A *unit*, a layer, is gathered before its forward and again before its backward, one unit ahead, and its
gradients are reduce-scattered after its backward. Gathers and reductions take place in the order of issue.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from dtcomm.codecs import Codec
from dtcomm.extensions.jobs.estimate import LINK_REACH, Estimate, chunk_elements
from dtcomm.extensions.jobs.hardware import System
from dtcomm.extensions.jobs.traffic_profile import profile

MIB = 2**20
BUCKET_BYTES = 25 * MIB
BACKWARD_SHARE = 2 / 3  # of a step's arithmetic: gradients of activations and of weights
FIRST_BUCKET_BYTES = MIB  # as in DDP, so that communication starts early


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """A bucket: ``ready`` seconds after the step's start."""

    nbytes: int
    ready: float


@dataclass(frozen=True, kw_only=True)
class TrainingStep:
    """The times of a step: ``seconds`` in all, and ``compute`` without any communication."""

    seconds: float
    compute: float
    communication: float

    @property
    def hidden(self) -> float:
        """The fraction of the communication that overlaps with computing."""
        exposed = self.seconds - self.compute
        return max(0.0, 1 - exposed / self.communication) if self.communication else 1.0

    @property
    def efficiency(self) -> float:
        """The scaling efficiency: a rank's throughput as a fraction of that of a rank alone."""
        return self.compute / self.seconds if self.seconds else 1.0


def even_buckets(params: float, itemsize: int, step: float, bucket_bytes: int) -> list[Bucket]:
    """Return buckets that become ready evenly over the backward pass, which ends the step.

    ``itemsize`` is that of gradients, ``step`` the seconds of a step without communication.
    """
    total = int(params * itemsize)
    begin = step * (1 - BACKWARD_SHARE)
    buckets: list[Bucket] = []
    done = 0
    while done < total:
        size = min(FIRST_BUCKET_BYTES if not buckets else bucket_bytes, total - done)
        done += size
        buckets.append(Bucket(nbytes=size, ready=begin + (step - begin) * done / total))
    return buckets


def replay(
    buckets: Sequence[Bucket],
    seconds: Callable[[Bucket], float],
    delay: Callable[[Bucket], float] = lambda bucket: 0.0,
) -> TrainingStep:
    """Return a step of DDP with buckets in the order in which they become ready.

    ``seconds`` returns the time of a bucket's communication, ``delay`` the time by which that delays computing.
    """
    free = total = delayed = 0.0
    for bucket in buckets:
        duration = seconds(bucket)
        total += duration
        free = max(free, bucket.ready + delayed) + duration
        delayed += delay(bucket)
    ready = max((bucket.ready for bucket in buckets), default=0.0)
    return TrainingStep(seconds=max(free, ready + delayed), compute=ready, communication=total)


def replay_sharded(
    layers: int, forward: float, backward: float, gather: float, reduce: float, gather_delay: float = 0.0,
    reduce_delay: float = 0.0,
) -> TrainingStep:  # fmt: skip
    """Return a step of FSDP with equal units; all times are seconds of one unit.

    ``gather_delay`` and ``reduce_delay`` are those by which a gather and a reduction delay the computing beside them.
    """
    link_free = computed = started = 0.0

    def send(issued: float, seconds: float) -> float:
        nonlocal link_free
        link_free = max(link_free, issued) + seconds
        return link_free

    for unit in range(layers):
        # Issued as the previous unit's forward starts.
        gathered = send(started, gather)
        started = max(computed, gathered)
        computed = started + forward
        if unit + 1 < layers:  # the next unit is gathered meanwhile
            computed += gather_delay
    gathered = send(computed, gather)
    for unit in range(layers):
        started = max(computed, gathered)
        computed = started + backward
        if unit + 1 < layers:
            gathered = send(started, gather)
            computed += gather_delay
        if unit > 0:
            computed += reduce_delay
        send(computed, reduce)
    return TrainingStep(
        seconds=max(computed, link_free),
        compute=layers * (forward + backward),
        communication=layers * (2 * gather + reduce),
    )


#: Of a bucket of DDP besides its data: the hook, and threads that take turns with computing.
BUCKET_SECONDS = 2e-3
#: Of each element that is encoded or decoded, and has left the caches.
ELEMENT_SECONDS = 0.4e-9
#: Of each byte that is sent or received through sockets.
BYTE_SECONDS = 0.15e-9


def cores_per_rank(system: System) -> float:
    """Return the cores of a CPU rank; less than 1 if ranks share them."""
    return system.cores / system.per_host if system.cores else 1.0


def bucket_core_seconds(system: System) -> float:
    """Return the seconds of a core that a bucket of DDP takes besides its data."""
    return 0.0 if system.device.generation or system.ranks == 1 else BUCKET_SECONDS


def message_core_seconds(system: System, message: Estimate, spec: Codec, dtype: torch.dtype) -> float:
    """Return the seconds of a core that a message takes on the busiest rank."""
    if system.device.generation:
        return 0.0
    loads = profile(message.algorithm, message.collective, system.ranks, system.per_host)
    assert loads is not None, f"{message.algorithm} has an estimate, so its profile is known"
    total = loads.total()
    chunk = chunk_elements(loads, message.nbytes // dtype.itemsize, spec.granularity)
    payload = spec.wire_bytes(chunk, dtype)
    # Cores copy what ranks of a host exchange. Between hosts a rank receives as much as it sends.
    inside = total.inside * payload / (system.inside.bandwidth * LINK_REACH[system.engine])
    coded = (total.encode + total.decode) * chunk
    return coded * ELEMENT_SECONDS + 2 * total.between * payload * BYTE_SECONDS + inside
