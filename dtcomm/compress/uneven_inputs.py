"""Which models may be trained in torch's join context, in which some ranks run out of inputs before others."""

from __future__ import annotations

from typing import Any, NoReturn

from torch import nn

from dtcomm import torch_compat

_ADVICE = (
    "let every rank take the same number of steps: stop when the first rank is out of inputs, or go on with batches "
    "whose loss is multiplied by 0"
)


class _Refusal:
    """The method ``join_hook`` of a model that cannot join; a class, so that the model can be pickled."""

    def __init__(self, model: str, integration: str) -> None:
        self._model, self._integration = model, integration

    def __call__(self, **options: Any) -> NoReturn:
        raise ValueError(
            f"Join: {self._model} is under {self._integration}, in which every rank takes part in every forward pass, "
            f"so none may join early; {_ADVICE}"
        )


def refuse_join(model: nn.Module, integration: str) -> None:
    """Let ``torch.distributed.algorithms.join.Join`` refuse a model whose ranks communicate in every forward pass.

    torch would refuse it with an AttributeError. ``integration`` says what communicates, for the message.
    """
    model.__dict__["join_hook"] = _Refusal(type(model).__name__, integration)


def require_no_sync_batch_norm(model: Any) -> None:
    """Refuse a forward pass in DDP's ``join`` of a model that averages statistics over the ranks.

    ValueError if ``join`` is active, and a layer would wait for ranks that have joined.
    """
    config = torch_compat.join_config(model)
    if config is None or not config.enable or config.throw_on_early_termination:
        return
    for name, module in model.named_modules():
        if torch_compat.is_batch_norm(module) and hasattr(module, "process_group"):
            raise ValueError(
                f"join: {name.removeprefix('module.')} is a {type(module).__name__}, which waits for all ranks in "
                f"every forward pass; pass throw_on_early_termination=True, or {_ADVICE}"
            )
