"""An optimizer for coarse codecs, and sums with the same bits on every number of ranks.

- `FrozenVariance` keeps Adam's second moment after a warm-up, for coarse codecs; `freeze_variance` does so for a
  `dtcomm.fsdp.ShardedOptimizer`.
- `sum_microbatches`, `fix_terms` and `scale_tokens` give gradients, tensor-parallel layers and norms the same bits on
  every number of ranks.
"""

from dtcomm.extensions.extras.frozen_variance import FrozenVariance, freeze_variance
from dtcomm.extensions.extras.invariant_sum import fix_terms, scale_tokens, sum_microbatches

__all__ = ["FrozenVariance", "fix_terms", "freeze_variance", "scale_tokens", "sum_microbatches"]
