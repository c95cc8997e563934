"""Pipeline parallelism with compressed activations and gradients.

- `compress` compresses what the stages of `torch.distributed.pipelining` send to each other, whichever schedule runs
  them: GPipe, 1F1B, interleaved 1F1B, zero-bubble. Its `State` counts bytes and measures the bubble.
- `bubble_fraction` computes the bubble of a schedule from its actions, and `split_layers` divides layers among stages.
- `Sender` and `Receiver` are a link between two stages for programs with a schedule of their own.

Compression is straight-through: a gradient is that of the activation which the next stage received.
"""

from dtcomm.pipeline.exchange import Receiver as Receiver
from dtcomm.pipeline.exchange import Sender as Sender
from dtcomm.pipeline.schedules import bubble_fraction as bubble_fraction
from dtcomm.pipeline.schedules import split_layers
from dtcomm.pipeline.stages import compress
from dtcomm.pipeline.state import State

__all__ = ["State", "compress", "split_layers"]
