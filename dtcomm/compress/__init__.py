"""Compressors: what adds state from step to step to a codec, and what integrations share.

- `spec`, `policy`: parse schemes, and choose one for each parameter.
- `bucket_layout`, `bucket_averager`, `stage_scheduler`: one bucket of gradients as one message, or as stages.
- `error_state`: what a rank keeps by parameter: `residuals` (error feedback), `ef21` (EF21, DIANA), `dgc` (velocities),
  `feedback` (the state of a user's own compressor).
- `powersgd`, `dgc`: the compressors that are more than a codec.
- `guard`, `guard_monitor`: limits beyond which compression counts as harmful, and what ranks measure.
- `report`, `checkpoint`: what users read and save.

The DDP hook, FSDP and `LocalSGD` use it; it knows none of them.
"""
