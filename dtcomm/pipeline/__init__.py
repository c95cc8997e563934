"""Pipeline parallelism with compressed activations and gradients.

- `compress` compresses what the stages of `torch.distributed.pipelining` send to each other, whichever schedule runs
  them: GPipe, 1F1B, interleaved 1F1B, zero-bubble. Its `PipelineState` counts bytes and measures the bubble.
- `bubble_fraction` computes the bubble of a schedule from its actions, and `split_layers` divides layers among stages.
- `Sender` and `Receiver` are a link between two stages for programs with a schedule of their own.

Compression is straight-through: a gradient is that of the activation which the next stage received.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from dtcomm.arguments import require_int
from dtcomm.pipeline.exchange import Receiver as Receiver
from dtcomm.pipeline.exchange import Sender as Sender
from dtcomm.pipeline.stages import compress
from dtcomm.pipeline.state import PipelineState

__all__ = ["PipelineState", "compress", "split_layers"]

_log = logging.getLogger("dtcomm")
_logged: set[tuple[int, int]] = set()  # (layers, stages) of the log lines so far

#: A computation in the text of torch's actions, such as ``2F0`` or, in an overlapped pair, ``(1F3;0B1)OVERLAP_F_B``.
_COMPUTATION = re.compile(r"(\d+)([FBIW])(\d+)(?!\w)")


class _Computation(NamedTuple):
    """F: forward, B: whole backward, I: backward of the input, W: backward of the weights."""

    stage: int
    kind: str
    micro_batch: int


def bubble_fraction(schedule: Any, *, forward: float = 1.0, backward: float = 2.0) -> float:
    """Return the share of time in which ranks wait, if sending takes no time and all stages are equally slow.

    Each rank runs the computations of its schedule in order, each as soon as its input is there. For GPipe and 1F1B
    with p stages and m micro-batches the result is (p - 1) / (m + p - 1) (Huang et al. 2019, arXiv:1811.06965).

    Args:
        schedule: A schedule of `torch.distributed.pipelining`, or its ``pipeline_order``: rank → actions, as torch's
            objects or as text such as ``"0F1"``.
        forward: Time of a forward pass of one micro-batch through one stage, in any unit. Default: 1.
        backward: Time of a backward pass; schedules that split it take half for the input and half for the weights.
            Default: 2.

    Returns:
        The sum of all ranks' waiting times over the sum of their times.

    Raises:
        TypeError: ``schedule`` has no actions.
        ValueError: A time is not positive, a backward pass is missing, or the actions are a deadlock.

    Example:
        >>> order = {0: ["0F0", "0F1", "0B0", "0B1"], 1: ["1F0", "1F1", "1B0", "1B1"]}  # GPipe, p = 2, m = 2
        >>> round(dtcomm.pipeline.bubble_fraction(order), 4)
        0.3333
    """
    for name, value in (("forward", forward), ("backward", backward)):
        if value <= 0:
            raise ValueError(f"{name}={value}: expected a positive time")
    order = schedule if isinstance(schedule, Mapping) else getattr(schedule, "pipeline_order", None)
    if not order:
        raise TypeError(
            f"schedule: {type(schedule).__name__} has no actions; valid: a schedule of torch.distributed.pipelining "
            "with a pipeline_order, or a mapping from ranks to actions"
        )
    seconds = {"F": forward, "B": backward, "I": backward / 2, "W": backward / 2}
    actions = {rank: _computations(of_rank) for rank, of_rank in order.items()}
    finished = _finish_times(actions, seconds)
    span = max(finished.values())
    busy = sum(seconds[computation.kind] for computation in finished)
    return 1 - busy / (span * len(actions))


def _computations(actions: Sequence[Any]) -> list[_Computation]:
    """Return the computations of one rank's actions; idle slots and communication are left out."""
    computations = [
        _Computation(int(stage), kind, int(micro_batch))
        for action in actions
        if action is not None
        for stage, kind, micro_batch in _COMPUTATION.findall(str(action))
    ]
    # torch 2.13 numbers the last stage's forward passes of 1F1B from 1, and its backward passes from 0.
    numbers: dict[tuple[int, bool], list[int]] = {}
    for stage, kind, micro_batch in computations:
        if kind != "W":
            numbers.setdefault((stage, kind == "F"), []).append(micro_batch)
    for (stage, forward), of_stage in numbers.items():
        if len(of_stage) != len(numbers.get((stage, not forward), of_stage)):
            raise ValueError(f"schedule: stage {stage} has not as many backward passes as forward passes")
    renumbered = {
        (stage, number): correct
        for (stage, forward), of_stage in numbers.items()
        if forward
        for number, correct in zip(
            sorted(of_stage), sorted(numbers.get((stage, False), of_stage)), strict=True
        )
    }
    return [
        computation._replace(micro_batch=renumbered[computation.stage, computation.micro_batch])
        if computation.kind == "F"
        else computation
        for computation in computations
    ]


def _finish_times(
    actions: Mapping[int, Sequence[_Computation]], seconds: Mapping[str, float]
) -> dict[_Computation, float]:
    known = {computation for of_rank in actions.values() for computation in of_rank}
    finished: dict[_Computation, float] = {}
    position, free = dict.fromkeys(actions, 0), dict.fromkeys(actions, 0.0)
    progress = True
    while progress:
        progress = False
        for rank, of_rank in actions.items():
            while position[rank] < len(of_rank):
                computation = of_rank[position[rank]]
                inputs = _inputs(computation, known)
                if not finished.keys() >= inputs:
                    break
                start = max([free[rank], *(finished[needed] for needed in inputs)])
                finished[computation] = free[rank] = start + seconds[computation.kind]
                position[rank] += 1
                progress = True
    waiting = {
        rank: of_rank[position[rank]] for rank, of_rank in actions.items() if position[rank] < len(of_rank)
    }
    if waiting:
        texts = ", ".join(f"rank {rank} at {stage}{kind}{mb}" for rank, (stage, kind, mb) in waiting.items())
        raise ValueError(f"schedule: deadlock: {texts}")
    return finished


def _inputs(computation: _Computation, known: set[_Computation]) -> set[_Computation]:
    stage, kind, micro_batch = computation
    if kind == "F":
        return {_Computation(stage - 1, "F", micro_batch)} if stage else set()
    if kind == "W":
        return {_Computation(stage, "I", micro_batch)}
    gradients = {_Computation(stage + 1, of_next, micro_batch) for of_next in "BI"}
    return {_Computation(stage, "F", micro_batch)} | (gradients & known)


def split_layers(layers: int, stages: int) -> list[range]:
    """Return which layers each stage has: consecutive ones, as equally many as possible.

    If the stages do not divide the layers, the first stages have one more, and a log line says so: the stages with more
    layers set the pace.

    Args:
        layers: Number of layers.
        stages: Number of stages, at most that of layers.

    Returns:
        For each stage the range of its layers.

    Raises:
        ValueError: There are fewer layers than stages; the message names both.

    Example:
        >>> dtcomm.pipeline.split_layers(7, 3)
        [range(0, 3), range(3, 5), range(5, 7)]
    """
    require_int("layers", layers, 1)
    require_int("stages", stages, 1)
    if layers < stages:
        raise ValueError(f"stages={stages}: there are {layers} layers; valid: 1 to {layers} stages")
    each, more = divmod(layers, stages)
    if more and (layers, stages) not in _logged:
        _logged.add((layers, stages))
        _log.warning(
            f"dtcomm.pipeline: {stages} stages do not divide {layers} layers: {more} stages have {each + 1} layers, "
            f"the others {each}; the larger ones set the pace"
        )
    starts = [stage * each + min(stage, more) for stage in range(stages + 1)]
    return [range(begin, end) for begin, end in pairwise(starts)]
