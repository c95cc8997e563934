"""The hook in frameworks that wrap the model in DDP themselves: Hugging Face Accelerate and Trainer, Lightning.

None of them is imported here: what is done goes by what an object has.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from dtcomm.ddp.state import State

Compress = Callable[[DistributedDataParallel], State]


class Attached:
    """What will compress a model as soon as there is a DDP around it."""

    def __init__(self, compress: Compress, options: Any = None) -> None:
        self._compress, self._options = compress, options
        self._state: State | None = None

    @property
    def state(self) -> State:
        """The compressor's state; RuntimeError before the framework has wrapped the model."""
        if self._state is None:
            raise RuntimeError(
                "state: the model is not wrapped in DDP yet: call prepare(model), train() or fit() first, "
                "on more than one rank"
            )
        return self._state

    # Accelerate keeps DDP's options in an object with these two methods, in whose place this one goes.

    def to_kwargs(self) -> dict[str, Any]:
        """DDP's options."""
        return {} if self._options is None else dict(self._options.to_kwargs())

    def register_comm_hook(self, model: DistributedDataParallel) -> None:
        """Compress the model that has just been wrapped."""
        self._state = self._compress(model)


def attach(owner: Any, compress: Compress) -> Attached:
    """See `dtcomm.ddp.attach`."""
    accelerator = getattr(owner, "accelerator", owner)
    if hasattr(accelerator, "ddp_handler"):
        return _to_accelerator(accelerator, compress)
    if hasattr(getattr(owner, "strategy", None), "setup"):
        return _to_lightning(owner.strategy, compress)
    raise TypeError(
        "owner: expected an accelerate.Accelerator, a transformers.Trainer or a lightning.Trainer, "
        f"got {type(owner).__name__}"
    )


def _to_accelerator(accelerator: Any, compress: Compress) -> Attached:
    options = accelerator.ddp_handler
    hook = getattr(options, "comm_hook", "no")
    if str(getattr(hook, "value", hook)) != "no":
        raise ValueError(f"owner: its DDP options ask for the communication hook {hook} already")
    attached = Attached(compress, options)
    accelerator.ddp_handler = attached
    return attached


def _to_lightning(strategy: Any, compress: Compress) -> Attached:
    """Lightning's own ``ddp_comm_hook`` is passed over, without a word, where the model is not on a GPU."""
    if getattr(strategy, "_ddp_comm_hook", None) is not None:
        raise ValueError("owner: its strategy has a ddp_comm_hook already")
    attached = Attached(compress)
    before = strategy.setup

    def setup(trainer: Any) -> None:
        before(trainer)
        if isinstance(strategy.model, DistributedDataParallel):
            attached.register_comm_hook(strategy.model)

    strategy.setup = setup
    return attached
