"""The hook in frameworks that wrap the model in DDP themselves: Hugging Face Accelerate and Trainer, Lightning.

None of them is imported here: objects are recognised by their attributes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from dtcomm.ddp.state import State

Compress = Callable[[DistributedDataParallel], State]


class Attached:
    """Compresses a model as soon as a framework has wrapped it in DDP; `dtcomm.ddp.attach` returns it.

    Args:
        compress: Called with the DDP model; returns the state of the hook.
        ddp_options: Keyword arguments of DDP that the framework uses, or None.
    """

    def __init__(self, compress: Compress, ddp_options: Any = None) -> None:
        self._compress, self._ddp_options = compress, ddp_options
        self._state: State | None = None

    @property
    def state(self) -> State:
        """The state of the hook; RuntimeError before the framework has wrapped the model."""
        if self._state is None:
            raise RuntimeError(
                "state: the model is not wrapped in DDP yet: call prepare(model), train() or fit() first, "
                "on more than one rank"
            )
        return self._state

    # Accelerate keeps DDP's options in an object with the following two methods. This one replaces it.

    def to_kwargs(self) -> dict[str, Any]:
        """Return DDP's options."""
        return {} if self._ddp_options is None else dict(self._ddp_options.to_kwargs())

    def register_comm_hook(self, model: DistributedDataParallel) -> None:
        """Compress the model that was just wrapped."""
        self._state = self._compress(model)


def attach(owner: Any, compress: Compress) -> Attached:
    """See `dtcomm.ddp.attach`; ``compress`` registers the hook at a DDP model."""
    accelerator = getattr(owner, "accelerator", owner)
    if hasattr(accelerator, "ddp_handler"):
        return _attach_to_accelerator(accelerator, compress)
    if hasattr(getattr(owner, "strategy", None), "setup"):
        return _attach_to_lightning(owner.strategy, compress)
    raise TypeError(
        "owner: expected an accelerate.Accelerator, a transformers.Trainer or a lightning.Trainer, "
        f"got {type(owner).__name__}"
    )


def _attach_to_accelerator(accelerator: Any, compress: Compress) -> Attached:
    ddp_options = accelerator.ddp_handler
    hook = getattr(ddp_options, "comm_hook", "no")
    if str(getattr(hook, "value", hook)) != "no":
        raise ValueError(f"owner: its DDP options ask for the communication hook {hook} already")
    attached = Attached(compress, ddp_options)
    accelerator.ddp_handler = attached
    return attached


def _attach_to_lightning(strategy: Any, compress: Compress) -> Attached:
    """Wrap the strategy's setup: Lightning silently ignores its own ``ddp_comm_hook`` if the model is not on a GPU."""
    if getattr(strategy, "_ddp_comm_hook", None) is not None:
        raise ValueError("owner: its strategy has a ddp_comm_hook already")
    attached = Attached(compress)
    original_setup = strategy.setup

    def setup(trainer: Any) -> None:
        original_setup(trainer)
        if isinstance(strategy.model, DistributedDataParallel):
            attached.register_comm_hook(strategy.model)

    strategy.setup = setup
    return attached
