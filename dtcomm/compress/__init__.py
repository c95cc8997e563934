"""Compressors: what adds state from step to step to a codec, and what integrations share.

- `spec`, `policy`: parse schemes, and choose one for each parameter.
- `bucket`, `stage_scheduler`: one bucket of gradients as one message, or as stages.
- `error_state`: what a rank keeps by parameter: `residuals` (error feedback), or what `feedback` has in their place
  (EF21, DIANA, DGC, a user's own).
- `powersgd`: low-rank compression.
- `guard`, `monitor`, `measurements`: limits beyond which compression counts as harmful, and what ranks measure.
- `report`, `checkpoint`: what users read and save.

The DDP hook, FSDP and `LocalSGD` use it; it knows none of them.
"""
