"""What a user's machine was tuned to is not what tests are about."""

import os

from dtcomm.testing import nursery

os.environ["DTCOMM_TUNE"] = "off"

# Imported once for all ranks: each would take another two seconds over them.
nursery.MODULES += [
    "dtcomm.collectives",
    "torch._dynamo",  # by the first step of an optimizer
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
]
