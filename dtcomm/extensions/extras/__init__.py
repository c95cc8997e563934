"""Tools for a training run: monitoring, and layers and optimizers for special cases.

- `RunMonitor` reports model FLOPs, shares of axes and slow ranks.
- `FrozenVariance` keeps Adam's second moment after a warm-up, for coarse codecs; `freeze_variance` does so for a
  `dtcomm.fsdp.ShardedOptimizer`.
- `InvariantRowParallelLinear` gives the same bits on every number of ranks.
"""

from dtcomm.extensions.extras.frozen_variance import FrozenVariance, freeze_variance
from dtcomm.extensions.extras.invariant_sum import InvariantRowParallelLinear
from dtcomm.extensions.extras.model_flops import count_flops, peak_flops, transformer_flops
from dtcomm.extensions.extras.run_monitor import (
    AxisShare,
    RankSpeed,
    RunMonitor,
    RunReport,
    Straggler,
    find_stragglers,
)  # fmt: skip

__all__ = [
    "AxisShare", "FrozenVariance", "InvariantRowParallelLinear",
    "RankSpeed", "RunMonitor", "RunReport", "Straggler", "count_flops",
    "find_stragglers", "freeze_variance", "peak_flops", "transformer_flops",
]  # fmt: skip
