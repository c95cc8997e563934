"""A gradient about to be reduced: in what, what is added to it, and what is measured and kept when that is done."""

from __future__ import annotations

from typing import Any

import torch

from dtcomm.compress.error_sample import ErrorSample
from dtcomm.fsdp.spec import Recipe
from dtcomm.fsdp.state import State, fitting


class Reduction:
    """`options` are what a collective takes besides its tensors; `done` is called once it is over, on any thread.

    module: whose gradient it is; kind: what the report calls it. watched: the guard may have changed the recipe, and
    errors are measured; of one collective a module.
    """

    def __init__(
        self, state: State, module: str, gradient: torch.Tensor, kind: str = "gradients", watched: bool = True
    ) -> None:
        self._state, self._watched = state, watched
        self._key = module if kind == "gradients" else f"{module}, {kind}"
        self.traffic = state.traffic(module, kind, state.gradients)
        recipe = state.watching.in_force(module, state.gradients) if watched else state.gradients
        which = fitting(recipe, gradient, self.traffic)
        lossy = not all(each.lossless(gradient.dtype) for each in recipe.codecs()) and not self.traffic.why
        self._kept = state.take_residual(self._key, gradient) if lossy else None
        self._residual = self._kept
        self._sample: ErrorSample | None = None
        if lossy and watched and state.watching.sampling:
            self._measure(module, recipe, gradient)
        self.options: dict[str, Any] = {
            "codec": which,
            "seed": state.next_seed(),
            "residual": self._residual,
            "async_op": True,
        }

    def _measure(self, module: str, recipe: Recipe, gradient: torch.Tensor) -> None:
        if self._residual is None:  # into which what is lost is written
            self._residual = torch.zeros(gradient.numel(), dtype=torch.float32, device=gradient.device)
        self._sample = self._state.watching.take(module, recipe, gradient, self._residual)

    def done(self) -> None:
        """The collective is over."""
        if self._sample is not None and self._residual is not None:
            self.traffic.relative_error = self._state.watching.measured(self._sample, self._residual)
        self._state.give_residual(self._key, self._kept)
