"""A training step: gradients that become ready bucket by bucket, and how much of their way is hidden.

Buckets go one after the other, each when it is ready and the one before has arrived. A step ends when the backward
pass has ended and the last bucket has arrived, and ``rest`` later (the optimizer, and what follows until the next
backward pass begins).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MIB = 2**20
BACKWARD = 2 / 3  # of a step's arithmetic: gradients of activations and of weights, after one forward pass
FIRST_BUCKET = MIB  # DDP's, so that something is under way early


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """``ready`` in seconds from the beginning of the step; ``measured`` what it took to arrive, 0 if unknown."""

    nbytes: int
    ready: float
    measured: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Step:
    """``seconds`` of a step, of which ``compute`` would be left without any communication. ``hidden`` is the part of
    ``communication`` that took no time of its own.
    """

    seconds: float
    compute: float
    communication: float

    @property
    def hidden(self) -> float:
        exposed = self.seconds - self.compute
        return max(0.0, 1 - exposed / self.communication) if self.communication else 1.0

    @property
    def efficiency(self) -> float:
        """Of scaling: what a rank still does beside one that is alone."""
        return self.compute / self.seconds if self.seconds else 1.0


def spread(
    params: float, itemsize: int, step: float, bucket_bytes: int = 25 * MIB
) -> tuple[list[Bucket], float]:
    """The buckets of ``params`` gradients that become ready evenly over the backward pass, and when that ends."""
    total = int(params * itemsize)
    begin = step * (1 - BACKWARD)
    buckets: list[Bucket] = []
    done = 0
    while done < total:
        size = min(FIRST_BUCKET if not buckets else bucket_bytes, total - done)
        done += size
        buckets.append(Bucket(nbytes=size, ready=begin + (step - begin) * done / total))
    return buckets, 0.0


def replay(buckets: Sequence[Bucket], rest: float, seconds: Callable[[Bucket], float]) -> Step:
    """The step with ``seconds`` for each bucket's way."""
    free = total = 0.0
    for bucket in buckets:
        took = seconds(bucket)
        total += took
        free = max(free, bucket.ready) + took
    ready = max((bucket.ready for bucket in buckets), default=0.0)
    return Step(seconds=max(free, ready) + rest, compute=ready + rest, communication=total)


@dataclass(frozen=True, kw_only=True)
class Record:
    """What a run wrote of itself: its buckets, what is left of a step after them, and how long steps really took."""

    buckets: tuple[Bucket, ...]
    rest: float
    step: float
    ranks: int
    codec: str
    source: str = ""

    def again(self) -> Step:
        """With the run's own times of arrival: what it lacks to ``step`` is the replay's error."""
        return replay(self.buckets, self.rest, lambda bucket: bucket.measured)

    @property
    def error(self) -> float | None:
        """Of the replay with its own times, as a part of the step; None where the run has none of them."""
        if self.step <= 0 or not all(bucket.measured > 0 for bucket in self.buckets):
            return None
        return self.again().seconds / self.step - 1


def parse_record(found: Mapping[str, Any], source: str = "") -> Record:
    """``{"ranks": 2, "codec": "none", "step_ms": 90, "rest_ms": 12, "buckets": [{"bytes": 1048576, "ready_ms": 40,
    "comm_ms": 3}, …]}``; times count from the step's beginning, ``comm_ms`` and ``rest_ms`` may be missing.
    """
    try:
        buckets = tuple(
            Bucket(
                nbytes=int(each["bytes"]),
                ready=float(each["ready_ms"]) * 1e-3,
                measured=float(each.get("comm_ms", 0)) * 1e-3,
            )
            for each in found["buckets"]
        )
        step = float(found.get("step_ms", 0)) * 1e-3
        if not buckets or any(each.nbytes < 0 or each.ready < 0 for each in buckets):
            raise ValueError("buckets: want at least one, with bytes and ready_ms of at least 0")
        rest = float(found.get("rest_ms", 0)) * 1e-3
        return Record(
            buckets=tuple(sorted(buckets, key=lambda each: each.ready)),
            rest=rest,
            step=step,
            ranks=int(found.get("ranks", 0)),
            codec=str(found.get("codec", "none")),
            source=source,
        )
    except KeyError as error:
        raise ValueError(f"{source or 'record'}: no {error}") from None
    except (TypeError, ValueError) as error:
        raise ValueError(f"{source or 'record'}: {error}") from None
