"""Pipeline parallelism with compressed activations and gradients.

- `compress` compresses what the stages of `torch.distributed.pipelining` send to each other, whichever schedule runs
  them: GPipe, 1F1B, interleaved 1F1B, zero-bubble. Its `PipelineState` counts bytes and measures the bubble.
- `split_layers` divides layers among stages.
- `Sender` and `Receiver` are a link between two stages for programs with a schedule of their own.

Compression is straight-through: a gradient is that of the activation which the next stage received.
"""

from __future__ import annotations

import logging
from itertools import pairwise

from dtcomm.arguments import require_int
from dtcomm.pipeline.exchange import Receiver as Receiver
from dtcomm.pipeline.exchange import Sender as Sender
from dtcomm.pipeline.stages import compress
from dtcomm.pipeline.state import PipelineState

__all__ = ["PipelineState", "compress", "split_layers"]

_log = logging.getLogger("dtcomm")
_logged: set[tuple[int, int]] = set()  # (layers, stages) of the log lines so far


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
