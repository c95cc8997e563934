"""Predicts the time of a training step, and the memory of a rank. ``dtcomm plan step`` calls both.

**DDP.** Gradients become ready bucket by bucket, and their communication overlaps the backward pass. Buckets are sent
one after the other, each when it is ready and the previous one is complete. A step ends ``rest`` seconds (the optimizer
and what else precedes the next backward pass) after both the backward pass and the last bucket are complete.

**Cores.** CPU ranks compute and communicate on the same cores. What a message takes of them is added to computing, and
a message cannot take less time than that. The constants were fitted to DDP's steps of an MLP of 25 M parameters and a
click model of 1 M, on a Xeon with a core for each rank; docs/results/training.md counts right verdicts on others.

**FSDP.** A *unit*, a layer, is gathered before its forward and again before its backward, one unit ahead, and its
gradients are reduce-scattered after its backward. Gathers and reductions take place in the order of issue.

**Memory** in each stage of sharding (Rajbhandari et al. 2020, arXiv:1910.02054): FSDP and the stages 1 and 2 update
their shards in fp32. Compression adds residuals of a rank's whole gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from dtcomm.codecs import Codec, codec
from dtcomm.extensions.jobs.estimate import LINK_REACH, Estimate, chunk_elements
from dtcomm.extensions.jobs.hardware import System
from dtcomm.extensions.jobs.traffic_profile import profile

MIB = 2**20
BACKWARD_SHARE = 2 / 3  # of a step's arithmetic: gradients of activations and of weights
FIRST_BUCKET_BYTES = MIB  # as in DDP, so that communication starts early


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """A bucket: ``ready`` seconds after the step's start; ``measured`` seconds of communication, 0 if unknown."""

    nbytes: int
    ready: float
    measured: float = 0.0


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
    rest: float,
    seconds: Callable[[Bucket], float],
    delay: Callable[[Bucket], float] = lambda bucket: 0.0,
) -> TrainingStep:
    """Return a step of DDP whose buckets, in the order in which they become ready, are followed by ``rest`` seconds.

    ``seconds`` returns the time of a bucket's communication, ``delay`` the time by which that delays computing.
    """
    free = total = delayed = 0.0
    for bucket in buckets:
        duration = seconds(bucket)
        total += duration
        free = max(free, bucket.ready + delayed) + duration
        delayed += delay(bucket)
    ready = max((bucket.ready for bucket in buckets), default=0.0)
    return TrainingStep(seconds=max(free, ready + delayed) + rest, compute=ready + rest, communication=total)


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


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """A recorded run: its buckets, the seconds after them, and the measured time of its steps."""

    buckets: tuple[Bucket, ...]
    rest: float
    step: float
    ranks: int
    codec: str

    def replayed(self) -> TrainingStep:
        """Return the step replayed with the run's own bucket times; compare it with ``step``."""
        return replay(self.buckets, self.rest, lambda bucket: bucket.measured)

    @property
    def error(self) -> float | None:
        """The relative error of the replay with the run's own times; None if the run has recorded none."""
        if self.step <= 0 or not all(bucket.measured > 0 for bucket in self.buckets):
            return None
        return self.replayed().seconds / self.step - 1


def parse_record(fields: Mapping[str, Any], source: str = "") -> RunRecord:
    """Read a run's record; errors start with ``source``.

    Its form is ``{"ranks": 2, "codec": "none", "step_ms": 90, "rest_ms": 12, "buckets": [{"bytes": 1048576, "ready_ms":
    40, "comm_ms": 3}, …]}``. Times count from the step's start; ``comm_ms`` and ``rest_ms`` may be missing.
    """
    try:
        buckets = []
        for row in fields["buckets"]:
            ready, measured = (float(row["ready_ms"]) * 1e-3, float(row.get("comm_ms", 0)) * 1e-3)
            buckets.append(Bucket(nbytes=int(row["bytes"]), ready=ready, measured=measured))
        if not buckets or any(bucket.nbytes < 0 or bucket.ready < 0 for bucket in buckets):
            raise ValueError("buckets: expected at least one, with bytes and ready_ms of at least 0")
        rest, step = (float(fields.get(name, 0)) * 1e-3 for name in ("rest_ms", "step_ms"))
        ranks, spec = int(fields.get("ranks", 0)), str(fields.get("codec", "none"))
        ordered = tuple(sorted(buckets, key=lambda bucket: bucket.ready))
        return RunRecord(buckets=ordered, rest=rest, step=step, ranks=ranks, codec=spec)
    except KeyError as error:
        raise ValueError(f"{source or 'record'}: no {error}") from None
    except (TypeError, ValueError) as error:
        raise ValueError(f"{source or 'record'}: {error}") from None


BUCKET_BYTES = 25 * 2**20
STAGES = ("ddp", "zero-1", "zero-2", "fsdp")
#: Bytes per element of residuals, by their form; LoCo keeps a moving average in 8 bits with a scale per block.
RESIDUAL_BYTES = {
    "none": 0.0, "fp32": 4.0, "bf16": 2.0, "int8": codec("int8").wire_bytes(2**20) / 2**20,
    "loco": codec("int8:block=256").wire_bytes(2**20) / 2**20,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    """A model of ``layers`` equal units; ``states`` are the optimizer's fp32 values per parameter, 2 for Adam.

    ``trainable`` of its parameters learn (None: all). ``tokens`` are those of a rank and step, 0 if they are not known.
    """

    params: float
    layers: int = 32
    itemsize: int = 4
    states: int = 2
    bucket_bytes: int = BUCKET_BYTES
    trainable: float | None = None
    tokens: float = 0.0

    def activations(self, recompute: bool) -> float:
        """Return the bytes of a Llama's activations with fused attention, kept or recomputed layer by layer."""
        width = math.sqrt(self.params / (12 * self.layers))
        layer = self.tokens * (16 * self.itemsize + 2) * width  # 34 bytes in 16 bits (arXiv:2205.05198)
        return self.tokens * self.layers * width * self.itemsize + layer if recompute else self.layers * layer


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """Bytes on one rank.

    ``parameters`` are those kept between steps. ``passing`` are units while they are computed with and their gradients
    until they are reduced. ``references`` are the copies for ``delta:``.
    """

    stage: str
    feedback: str
    delta: bool
    parameters: float
    optimizer: float
    gradients: float
    passing: float
    residuals: float
    references: float
    activations: float = 0.0
    recompute: bool = False  # of activations

    @property
    def total(self) -> float:
        """The sum of all parts."""
        kept = self.parameters + self.optimizer + self.gradients + self.activations
        return kept + self.passing + self.residuals + self.references

    def as_dict(self) -> dict[str, Any]:
        """Return the bytes, rounded, for JSON."""
        values = {**asdict(self), "total": self.total}
        return {name: round(value) if isinstance(value, float) else value for name, value in values.items()}


def rank_memory(
    model: ModelSize, ranks: int, stage: str, feedback: str = "none", delta: bool = False, capacity: int = 0
) -> RankMemory:
    """Return the memory of one rank; ``feedback`` is the form of the residuals.

    Activations are recomputed if they do not fit in ``capacity`` bytes otherwise; 0: it is not known. With ``delta``
    parameters are sent as differences. FSDP then keeps a copy of all of them; the sharded optimizer has the model
    itself for that.
    """
    if stage not in STAGES:
        raise ValueError(f"stage: {stage!r} is not one of {', '.join(STAGES)}")
    if feedback not in RESIDUAL_BYTES:
        raise ValueError(f"feedback: {feedback!r} is not one of {', '.join(RESIDUAL_BYTES)}")
    if ranks < 1:
        raise ValueError(f"ranks: must be at least 1, got {ranks}")
    p, b = model.params, model.itemsize
    learning = p if model.trainable is None else model.trainable
    whole, sent, shard = p * b, learning * b, 4 * learning / ranks
    unit = whole / model.layers
    bucket = min(float(model.bucket_bytes), sent)
    if stage == "ddp":
        # Buckets are another copy of the gradients, unless gradient_as_bucket_view is set.
        parts: dict[str, Any] = {"parameters": whole, "gradients": sent, "passing": sent}
        parts["optimizer"] = model.states * 4 * learning
    else:
        parts = {"optimizer": model.states * shard, "gradients": shard, "parameters": shard}
        parts["parameters"] += (whole - sent) / ranks if stage == "fsdp" else whole
        if stage == "zero-1":
            parts["gradients"] += sent
        # zero-2: a bucket that fills while another one is sent. fsdp: a unit as it is gathered and as it is computed
        # with, and the next unit, whose place its gradients take in backward.
        parts["passing"] = {"zero-1": 0.0, "zero-2": 2 * bucket, "fsdp": 4 * unit}[stage]
    kept = RankMemory(
        stage=stage, feedback=feedback, delta=delta, residuals=RESIDUAL_BYTES[feedback] * learning,
        references=sent if delta and stage == "fsdp" else 0.0, activations=model.activations(False), **parts,
    )  # fmt: skip
    if not capacity or not model.tokens or kept.total <= capacity:
        return kept
    return replace(kept, activations=model.activations(True), recompute=True)


def memory_table(model: ModelSize, ranks: int, capacity: int = 0) -> list[RankMemory]:
    """Return every stage uncompressed, then with each form of compression state."""
    rows: list[RankMemory] = []
    for stage in STAGES:
        forms = RESIDUAL_BYTES if stage != "ddp" else [form for form in RESIDUAL_BYTES if form != "loco"]
        more = [("none", True), ("loco", True)] if stage == "fsdp" else []
        for feedback, delta in [*((form, False) for form in forms), *more]:
            rows.append(rank_memory(model, ranks, stage, feedback, delta, capacity))
    return rows
