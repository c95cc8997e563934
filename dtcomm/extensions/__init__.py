"""Extensions: parts that use the core and that the core does not know.

- `jobs` predicts collectives, training steps and whole jobs on hardware that need not exist: ``dtcomm plan``.
- `elastic` trains with ranks that come and go: ``dtcomm coordinator``.
- `calibrate` chooses a codec for each layer of tensor parallelism: ``dtcomm tp calibrate``.
- `extras` has an optimizer for coarse codecs, and sums with the same bits on every number of ranks.
- `weights` sends new weights to inference engines as lossless deltas.

An extension imports any part of dtcomm and no other extension. No part of the core imports an extension; a command of
the command line is loaded by its name when it is called.
"""

import importlib
from types import ModuleType

_PACKAGES = ("calibrate", "elastic", "extras", "jobs", "weights")


def __getattr__(name: str) -> ModuleType:
    if name in _PACKAGES:
        return importlib.import_module(f"dtcomm.extensions.{name}")
    raise AttributeError(f"module 'dtcomm.extensions' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_PACKAGES})
