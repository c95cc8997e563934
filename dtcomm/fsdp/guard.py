"""The guard of a sharded model: what DDP's looks for (`dtcomm.compress.guard`), module by module.

Every so many steps each rank measures what its gradients' encodings lose; before the next forward pass the ranks
average a few floats of it, and all act on the mean alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from dtcomm.codecs import Codec
from dtcomm.collectives import all_reduce
from dtcomm.compress.error_sample import ErrorSample, l2_norm
from dtcomm.compress.guard import Event, Guard
from dtcomm.compress.guard_monitor import make_monitor
from dtcomm.device.streams import AsyncHostCopy
from dtcomm.fsdp.spec import Recipe

ROOT = "(root)"  # a guard takes no name for all modules


class Watching:
    """guard: limits and actions, None: errors are measured for the report alone. every: steps from one measurement to
    the next; 0: nothing is measured. ValueError where `every` is negative.
    """

    def __init__(self, guard: Guard | None, every: int) -> None:
        if every < 0:
            raise ValueError(f"sample_every: expected 0 (never) or more, got {every!r}")
        self._watch = make_monitor(guard)
        self._every = every
        self._pending = False
        self._device: torch.device | None = None  # of gradients
        self._heard: AsyncHostCopy | None = None  # what ranks told each other, on its way from there
        self.steps = 0
        self.sampling = False

    @property
    def events(self) -> tuple[Event, ...]:
        """What the guard saw and did, in order; the same on all ranks of the group."""
        return tuple(self._watch.events)

    def observe(self, loss: float | torch.Tensor) -> None:
        """This step's loss on this rank."""
        self._watch.observe_loss(loss)

    def begin(self, group: dist.ProcessGroup | None) -> list[str]:
        """A forward pass begins, on every rank of ``group``: judge what the last one told; on a device, where nobody
        waits for it, one pass later.

        Returns the modules whose residuals are to be given up. CompressionHarmful where the guard says stop.
        """
        watch = self._watch
        if self._heard is not None:
            heard, self._heard = self._heard, None
            watch.evaluate(self.steps, heard.get())
        if self._pending:
            watch.begin_step(self.steps)
            if (told := watch.stats_tensor(self._device)) is not None:
                all_reduce(told, "avg", group=group)
                if told.is_cpu:
                    watch.evaluate(self.steps, told)
                else:
                    self._heard = AsyncHostCopy(told)
        resets = ["" if name == ROOT else name for name in watch.pop_resets()]
        self._pending = self._every > 0 and self.steps % self._every == 0
        self.sampling = self._every > 0 and self.steps % self._every == 0
        self.steps += 1
        return resets

    def in_force(self, module: str, recipe: Recipe) -> Recipe:
        """What `module` is compressed with now, where `recipe` was asked for."""
        step = max(0, self.steps - 1)  # which has begun
        inside, between = (
            each and self._watch.scheme_for(module or ROOT, each, step)
            for each in (recipe.inside, recipe.between)
        )
        assert isinstance(inside, Codec) and (between is None or isinstance(between, Codec))
        return Recipe(inside, between, recipe.word)

    def take(
        self, module: str, recipe: Recipe, gradient: torch.Tensor, residual: torch.Tensor
    ) -> ErrorSample:
        """Return a sample of a gradient that is about to be encoded."""
        norm = l2_norm(gradient)
        self._device = gradient.device
        self._watch.register_sample(module or ROOT, recipe.inside)
        self._watch.report_nonfinite(~torch.isfinite(norm))
        return ErrorSample.take(module or ROOT, recipe.inside, norm, gradient, residual)

    def measured(self, sample: ErrorSample, lost: torch.Tensor) -> float | torch.Tensor:
        """|lost| over |offered|, of the elements that were looked at; of a device's, it stays there."""
        self._watch.record_error(sample, lost)
        offered = torch.linalg.vector_norm(sample.encoder_input)
        found = torch.where(offered > 0, torch.linalg.vector_norm(lost[:: sample.stride]) / offered, 0.0)
        return float(found) if found.is_cpu else found

    def state_dict(self) -> dict[str, Any]:
        """Plain values: the step, and decisions that are in force."""
        return {"steps": self.steps, "watch": self._watch.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """What `state_dict` gave; nothing where a state has none."""
        self.steps, self._pending, self._heard = state.get("steps", 0), False, None
        self._watch.load_state_dict(state.get("watch", {}))
