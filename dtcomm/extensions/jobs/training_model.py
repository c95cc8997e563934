"""Predicts the time of a training step, and the memory of a rank. ``dtcomm plan`` calls both.

**Time of DDP.** Gradients become ready bucket by bucket, and their communication overlaps the backward pass. Buckets
are sent one after the other, each when it is ready and the previous one is complete. A step ends ``rest`` seconds after
both the backward pass and the last bucket are complete; ``rest`` is the optimizer and whatever else precedes the next
backward pass.

**Cores.** CPU ranks compute and communicate on the same cores. What a message takes of them is added to computing, so
that the buckets that follow are ready later, and a message cannot take less time than it takes of a core.

**Time of FSDP.** A *unit* is what is gathered at once: a layer. A unit's parameters are gathered before its forward and
again before its backward, one unit ahead of the computation, and its gradients are reduce-scattered after its backward.
Gathers and reductions share the links, so they take place one after the other, in the order in which they are issued.

**Memory** in each stage of sharding (Rajbhandari et al. 2020, arXiv:1910.02054). A model has P parameters of b bytes,
on n ranks, and an optimizer that keeps s values in fp32 for each. FSDP and the stages 1 and 2 update their shards in
fp32. Compression adds residuals of a rank's whole gradients, and with ``delta:`` a copy of the parameters as the peers
know them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from dtcomm.codecs import codec

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


def even_buckets(
    params: float, itemsize: int, step: float, bucket_bytes: int = 25 * MIB
) -> tuple[list[Bucket], float]:
    """Return buckets that become ready evenly over the backward pass, and the seconds that follow it.

    Args:
        params: The number of parameters.
        itemsize: Bytes per gradient.
        step: Seconds of a step without communication.
        bucket_bytes: The size of a bucket.
    """
    total = int(params * itemsize)
    begin = step * (1 - BACKWARD_SHARE)
    buckets: list[Bucket] = []
    done = 0
    while done < total:
        size = min(FIRST_BUCKET_BYTES if not buckets else bucket_bytes, total - done)
        done += size
        buckets.append(Bucket(nbytes=size, ready=begin + (step - begin) * done / total))
    return buckets, 0.0


def replay(
    buckets: Sequence[Bucket],
    rest: float,
    seconds: Callable[[Bucket], float],
    delay: Callable[[Bucket], float] = lambda bucket: 0.0,
) -> TrainingStep:
    """Return a step of DDP.

    Args:
        buckets: The buckets, in the order in which they become ready.
        rest: Seconds of computing after the last bucket.
        seconds: Returns the time of a bucket's communication.
        delay: Returns the seconds by which a bucket's communication delays computing.
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
    layers: int,
    forward: float,
    backward: float,
    gather: float,
    reduce: float,
    gather_delay: float = 0.0,
    reduce_delay: float = 0.0,
) -> TrainingStep:
    """Return a step of FSDP with equal units.

    Args:
        layers: The number of units.
        forward: Seconds of a unit's forward.
        backward: Seconds of a unit's backward.
        gather: Seconds of the all_gather of a unit's parameters.
        reduce: Seconds of the reduce_scatter of a unit's gradients.
        gather_delay: Seconds by which a gather delays the computing that it overlaps with.
        reduce_delay: Seconds by which a reduction does.
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


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """A recorded run: its buckets, the seconds after them, and the measured time of its steps."""

    buckets: tuple[Bucket, ...]
    rest: float
    step: float
    ranks: int
    codec: str
    source: str = ""

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
    """Read a run's record.

    Its form is ``{"ranks": 2, "codec": "none", "step_ms": 90, "rest_ms": 12, "buckets": [{"bytes": 1048576, "ready_ms":
    40, "comm_ms": 3}, …]}``. Times count from the step's start; ``comm_ms`` and ``rest_ms`` may be missing.

    Raises:
        ValueError: If the record cannot be read. The message starts with ``source``.
    """
    try:
        buckets = tuple(
            Bucket(
                nbytes=int(row["bytes"]),
                ready=float(row["ready_ms"]) * 1e-3,
                measured=float(row.get("comm_ms", 0)) * 1e-3,
            )
            for row in fields["buckets"]
        )
        step = float(fields.get("step_ms", 0)) * 1e-3
        if not buckets or any(bucket.nbytes < 0 or bucket.ready < 0 for bucket in buckets):
            raise ValueError("buckets: expected at least one, with bytes and ready_ms of at least 0")
        rest = float(fields.get("rest_ms", 0)) * 1e-3
        return RunRecord(
            buckets=tuple(sorted(buckets, key=lambda bucket: bucket.ready)),
            rest=rest,
            step=step,
            ranks=int(fields.get("ranks", 0)),
            codec=str(fields.get("codec", "none")),
            source=source,
        )
    except KeyError as error:
        raise ValueError(f"{source or 'record'}: no {error}") from None
    except (TypeError, ValueError) as error:
        raise ValueError(f"{source or 'record'}: {error}") from None


BUCKET_BYTES = 25 * 2**20
STAGES = ("ddp", "zero-1", "zero-2", "fsdp")
#: Bytes per element of residuals, by their form; LoCo keeps a moving average in 8 bits with a scale per block.
RESIDUAL_BYTES = {
    "none": 0.0,
    "fp32": 4.0,
    "bf16": 2.0,
    "int8": codec("int8").wire_bytes(2**20) / 2**20,
    "loco": codec("int8:block=256").wire_bytes(2**20) / 2**20,
}


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    """A model of ``layers`` equal units; ``states`` are the optimizer's fp32 values per parameter, 2 for Adam."""

    params: float
    layers: int = 32
    itemsize: int = 4
    states: int = 2
    bucket_bytes: int = BUCKET_BYTES


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

    @property
    def total(self) -> float:
        """The sum of all parts."""
        return (
            self.parameters
            + self.optimizer
            + self.gradients
            + self.passing
            + self.residuals
            + self.references
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the bytes, rounded, for JSON."""
        fields = {
            name: round(value) if isinstance(value, float) else value for name, value in asdict(self).items()
        }
        return {**fields, "total": round(self.total)}


def rank_memory(
    model: ModelSize, ranks: int, stage: str, feedback: str = "none", delta: bool = False
) -> RankMemory:
    """Return the memory of one rank.

    Args:
        model: The model.
        ranks: The number of ranks.
        stage: One of `STAGES`.
        feedback: The form of the residuals, one of `RESIDUAL_BYTES`.
        delta: Whether parameters are sent as differences. FSDP then keeps a copy of all of them; the sharded optimizer
            has the model itself for that.

    Raises:
        ValueError: If an argument is not valid.
    """
    if stage not in STAGES:
        raise ValueError(f"stage: {stage!r} is not one of {', '.join(STAGES)}")
    if feedback not in RESIDUAL_BYTES:
        raise ValueError(f"feedback: {feedback!r} is not one of {', '.join(RESIDUAL_BYTES)}")
    if ranks < 1:
        raise ValueError(f"ranks: must be at least 1, got {ranks}")
    p, b = model.params, model.itemsize
    whole, shard = p * b, 4 * p / ranks
    unit = whole / model.layers
    bucket = min(float(model.bucket_bytes), whole)
    if stage == "ddp":
        # Buckets are another copy of the gradients, unless gradient_as_bucket_view is set.
        parts = {"parameters": whole, "optimizer": model.states * 4 * p, "gradients": whole, "passing": whole}
    else:
        parts = {"optimizer": model.states * shard, "gradients": shard, "parameters": shard}
        if stage != "fsdp":
            parts["parameters"] += whole
        if stage == "zero-1":
            parts["gradients"] += whole
        # zero-2: a bucket that fills while another one is sent. fsdp: a unit as it is gathered and as it is computed
        # with, and the next unit, whose place its gradients take in backward.
        parts["passing"] = {"zero-1": 0.0, "zero-2": 2 * bucket, "fsdp": 4 * unit}[stage]
    return RankMemory(
        stage=stage,
        feedback=feedback,
        delta=delta,
        residuals=RESIDUAL_BYTES[feedback] * p,
        references=whole if delta and stage == "fsdp" else 0.0,
        **parts,
    )


def memory_table(model: ModelSize, ranks: int) -> list[RankMemory]:
    """Return every stage uncompressed, then with each form of compression state."""
    rows = []
    for stage in STAGES:
        forms = RESIDUAL_BYTES if stage != "ddp" else [form for form in RESIDUAL_BYTES if form != "loco"]
        rows += [rank_memory(model, ranks, stage, feedback) for feedback in forms]
        if stage == "fsdp":
            rows += [rank_memory(model, ranks, stage, feedback, delta=True) for feedback in ("none", "loco")]
    return rows
