"""Predicts a training step: gradients become ready bucket by bucket, and their communication overlaps backward.

Buckets are sent one after the other, each when it is ready and the previous one is complete. A step ends ``rest``
seconds after both the backward pass and the last bucket are complete; ``rest`` is the optimizer and whatever else
precedes the next backward pass. ``dtcomm plan --model`` and ``--record`` call this.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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


def replay(buckets: Sequence[Bucket], rest: float, seconds: Callable[[Bucket], float]) -> TrainingStep:
    """Return the step if ``seconds(bucket)`` is the time of each bucket's communication."""
    free = total = 0.0
    for bucket in buckets:
        duration = seconds(bucket)
        total += duration
        free = max(free, bucket.ready) + duration
    ready = max((bucket.ready for bucket in buckets), default=0.0)
    return TrainingStep(seconds=max(free, ready) + rest, compute=ready + rest, communication=total)


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
            raise ValueError("buckets: want at least one, with bytes and ready_ms of at least 0")
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
