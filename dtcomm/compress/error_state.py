"""What one rank keeps from step to step, by parameter: residuals or references, and velocities.

A parameter is handed to a collective by `Memory.hand`, which says what to average and what to add to it, and given
back by `Memory.take`, once the mean is there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dtcomm.compress.bucket_layout import Segment
from dtcomm.compress.dgc import DGC, Velocities
from dtcomm.compress.ef21 import References
from dtcomm.compress.residuals import Residuals, averaged
from dtcomm.compress.spec import Scheme
from dtcomm.device.streams import record_streams

REPAID = 32  # steps over which what is owed to a parameter that is no longer compressed is given back
FEEDBACKS = ("residual", "ef21", "diana")
DIANA_RATE = 0.5


@dataclass
class Handed:
    """One lossy segment under way: `gradient` is to become the mean, `sent` (often itself) travels with `residual`
    added to it, None without feedback. `postponed`: what is lost is added to what is kept afterwards. `before`: what
    was offered, where that is asked for. On a device, where nobody waits to see which it is, `owed` is what was kept
    back, and `moved` (a bool without dimensions) says whether there was anything to offer."""

    segment: Segment
    gradient: torch.Tensor
    sent: torch.Tensor
    residual: torch.Tensor | None
    postponed: bool = False
    before: torch.Tensor | None = None
    owed: torch.Tensor | None = None
    moved: torch.Tensor | None = None


class Memory:
    """feedback: True or "residual" (error feedback), "ef21", "diana", or False: nothing; form: how residuals are kept.

    schemes: all that may be asked for; where DGC is one of them its momentum goes to every parameter. ValueError where
    they do not go together.
    """

    def __init__(
        self, feedback: bool | str = True, form: str = "fp32", schemes: Sequence[Scheme] = ()
    ) -> None:
        kind = "residual" if feedback is True else feedback
        if kind is not False and kind not in FEEDBACKS:
            raise ValueError(f"feedback: {feedback!r}; valid: True, False, {', '.join(map(repr, FEEDBACKS))}")
        momenta = {scheme.momentum for scheme in schemes if isinstance(scheme, DGC)}
        if len(momenta) > 1:
            raise ValueError(f"dgc: momenta {sorted(momenta)} in one model; valid: one")
        if momenta and kind != "residual":
            raise ValueError(
                f"feedback: {feedback!r} does not go with dgc, which keeps residuals; valid: True"
            )
        self.kind = kind
        self._momentum = momenta.pop() if momenta else None
        self._residuals = Residuals(form)
        self._references = None
        if kind in ("ef21", "diana"):
            self._references = References(1.0 if kind == "ef21" else DIANA_RATE)
        self._velocities = Velocities()
        self._repaying: dict[
            str, int
        ] = {}  # steps that are left; the residual stays whole until the last one

    def repay(self, name: str) -> None:
        """A parameter is no longer compressed: give back what is owed to it with its next gradients, in equal parts.

        All at once it would be a leap: sparse schemes may owe a hundred gradients.
        """
        if name in self._residuals:
            self._repaying[name] = REPAID

    def hand(
        self,
        segment: Segment,
        gradient: torch.Tensor,
        ranks: int,
        *,
        unused: bool = False,
        sampled: bool = False,
    ) -> Handed:
        """What to give to the collective of so many ranks for a lossy segment. `unused`: it may be that no rank has
        used the parameter; `sampled`: what is lost is measured, even where it is not kept."""
        name, scheme = segment.name, segment.codec
        self._keep_the_rest(name)
        if self.kind is False:
            lost = torch.zeros(gradient.numel(), dtype=torch.float32, device=gradient.device)
            return Handed(segment, gradient, gradient, lost if sampled else None)
        if self._references is not None:
            return Handed(segment, gradient, *self._references.before(name, gradient))
        # For a parameter that no rank used DDP drops the result, and with it what the residuals gave to it: where a
        # gradient is all zeros its residual waits for one that is not.
        if not gradient.is_cpu:
            return self._hand_there(segment, gradient, ranks, unused and name in self._residuals)
        if unused and name in self._residuals and is_zero(gradient):
            lost = torch.zeros(gradient.numel(), dtype=torch.float32, device=gradient.device)
            return Handed(segment, gradient, gradient, lost, postponed=True)
        residual = self._residuals.get(name, gradient)
        if not isinstance(scheme, DGC):
            self.plain(segment, gradient)
            return Handed(segment, gradient, gradient, residual)
        bound = scheme.clip / ranks**0.5
        velocity = self._velocities.step(name, gradient, scheme.momentum, bound)
        if velocity is None:
            return Handed(segment, gradient, gradient, residual)
        gradient.zero_()  # all of it is in the residual, in fp32
        return Handed(segment, gradient, gradient, residual.add_(velocity), before=residual.clone())

    def _hand_there(self, segment: Segment, gradient: torch.Tensor, ranks: int, may_wait: bool) -> Handed:
        """With residuals on a device: the same choices, made there."""
        name, scheme = segment.name, segment.codec
        residual = self._residuals.get(name, gradient)
        used = owed = None
        if may_wait:
            used = gradient.any()
            owed = torch.where(used, 0.0, residual)
            residual.masked_fill_(~used, 0.0)
        if not isinstance(scheme, DGC):
            self.plain(segment, gradient, used)
            return Handed(segment, gradient, gradient, residual, owed=owed)
        bound = scheme.clip / ranks**0.5
        velocity, moved = self._velocities.step_there(name, gradient, scheme.momentum, bound, used)
        gradient.masked_fill_(moved, 0.0)
        residual.add_(torch.where(moved, velocity, 0.0))
        return Handed(segment, gradient, gradient, residual, before=residual.clone(), owed=owed, moved=moved)

    def plain(self, segment: Segment, gradient: torch.Tensor, moves: torch.Tensor | None = None) -> None:
        """What a segment needs that is not DGC's own, where others are: the same momentum; and what it is owed.

        ``moves``: on a device, whether the momentum is to.
        """
        if self._momentum is None and not self._repaying:
            return
        start = 0
        for member in segment.members:
            part = gradient[start : start + member.numel]
            start += member.numel
            if member.name in self._repaying:
                self._repay(member.name, part)
            if self._momentum is None or not part.is_floating_point():
                continue
            if part.is_cpu:
                velocity = self._velocities.step(member.name, part, self._momentum)
                if velocity is not None:
                    part.copy_(velocity)
            else:
                there, moved = self._velocities.step_there(member.name, part, self._momentum, 0.0, moves)
                part.copy_(torch.where(moved, there, part))

    def _repay(self, name: str, gradient: torch.Tensor) -> None:
        # One pass over memory: what is left is not written down, it is a share of the whole.
        gradient.add_(self._residuals.get(name, gradient), alpha=1 / REPAID)
        self._repaying[name] -= 1
        if not self._repaying[name]:
            del self._repaying[name]
            self._residuals.reset(name)

    def _keep_the_rest(self, name: str) -> None:
        """Repaying ends before its time: what is still owed is the residual."""
        if left := self._repaying.pop(name, 0):
            self._residuals.scale(left / REPAID, [name])

    def take(self, handed: Handed, key: int) -> None:
        """The mean is there. `key` chooses the random numbers of rounding what is kept."""
        name, residual = handed.segment.name, handed.residual
        if self.kind is False or residual is None:
            return
        if not residual.is_cpu:  # made on the stream that gradients come from, and this may be another
            kept = (None, None) if self._references is None else self._references.get(name)
            given = (handed.gradient, handed.sent, residual, handed.before, handed.owed, handed.moved)
            record_streams(*given, self._velocities.get(name), *kept)
        if self._references is not None:
            self._references.after(name, handed.gradient, handed.sent, residual)
        elif handed.postponed:
            self._residuals.add(name, residual, key)
        else:
            if handed.before is not None:
                # Sent is what left this rank, and not what the encoding of a sum may have cost beside it.
                went = (handed.before - residual).abs() > handed.before.abs() / 2
                self._velocities.mask(name, went if handed.moved is None else went & handed.moved)
            if handed.owed is not None:
                residual.add_(handed.owed)
            self._residuals.put(name, key)

    def scale(self, factor: float) -> None:
        """Multiply all of it, as the loss scale of mixed-precision training was."""
        self._residuals.scale(factor)
        self._velocities.scale(factor)
        if self._references is not None:
            self._references.scale(factor)

    def reset(self, name: str) -> None:
        """What was kept for ``name`` is given up; on all ranks at the same time."""
        self._residuals.reset(name)
        self._repaying.pop(name, None)
        self._velocities.reset(name)
        if self._references is not None:
            self._references.reset(name)

    def nbytes(self) -> dict[str, int]:
        """What is held between the steps, and within one beside it, by what it is; nothing that is nothing."""
        held = {
            f"residuals in {self._residuals.form}": self._residuals.nbytes(),
            "references": 0 if self._references is None else self._references.nbytes(),
            "velocities": self._velocities.nbytes(),
            "fp32 within a step": self._residuals.most_open,
        }
        return {what: size for what, size in held.items() if size}

    def held(self) -> int:
        """Bytes between the steps."""
        references = 0 if self._references is None else self._references.nbytes()
        return self._residuals.nbytes() + self._velocities.nbytes() + references

    def state_dict(self) -> dict[str, Any]:
        """This rank's, as entries of a checkpoint; see ``compress.checkpoint``. What is being given back is in it as
        far as it is still owed.
        """
        residuals = self._residuals.state_dict()
        for name, left in self._repaying.items():
            residuals[name] *= left / REPAID
        references = {} if self._references is None else self._references.state_dict()
        return {
            "residuals": residuals,
            "velocities": self._velocities.state_dict(),
            "references": references,
        }

    def load(
        self,
        saved: Mapping[str, Any] | Sequence[Mapping[str, Any]],
        residuals: Mapping[str, torch.Tensor],
        rank: int,
        world_size: int,
    ) -> None:
        """From the states that `share_of` took the residuals from.

        With another number of ranks the sum of residuals is kept, and the mean of velocities and of references.
        """
        states = [saved] if isinstance(saved, Mapping) else list(saved)
        same = states[0]["world_size"] == world_size
        own = states[0] if isinstance(saved, Mapping) else states[rank if same else 0]
        self._residuals.load_state_dict(residuals)
        self._repaying.clear()
        velocities = [state.get("velocities", {}) for state in states]
        self._velocities.load_state_dict(own.get("velocities", {}) if same else averaged(velocities))
        if self._references is not None:
            self._references.load_state_dict(own.get("references", {}), same_world=same)


def is_zero(gradient: torch.Tensor) -> bool:
    """Whether every element is 0, at next to no cost where the first or the last is not."""
    return gradient.numel() == 0 or not (bool(gradient[0]) or bool(gradient[-1]) or bool(gradient.any()))
