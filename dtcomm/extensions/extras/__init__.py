"""An optimizer for coarse codecs, and sums with the same bits on every number of ranks.

- `FrozenVariance` keeps Adam's second moment after a warm-up, for coarse codecs; `freeze_variance` does so for a
  `dtcomm.fsdp.ShardedOptimizer`.
- `InvariantRowParallelLinear` gives the same bits on every number of ranks.
"""

from dtcomm.extensions.extras.frozen_variance import FrozenVariance, freeze_variance
from dtcomm.extensions.extras.invariant_sum import InvariantRowParallelLinear

__all__ = ["FrozenVariance", "InvariantRowParallelLinear", "freeze_variance"]
