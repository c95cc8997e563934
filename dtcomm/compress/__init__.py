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

import sys
import types


class _Package(types.ModuleType):
    def __call__(self, *_: object, **__: object) -> None:
        raise TypeError(
            "dtcomm.compress is a package; call dtcomm.ddp.compress, dtcomm.fsdp.compress or dtcomm.tp.compress"
        )


sys.modules[__name__].__class__ = _Package
