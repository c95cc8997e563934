"""Differences to a shared reference: what is sent is how the gradient differs from what all ranks know already.

Every rank keeps an estimate h_i of its own gradient and all of them their mean h. Sent is C(g_i - h_i); the gradient
becomes h + mean C(g_i - h_i), and both estimates move by `rate` of what arrived. So the errors shrink with the
differences, where error feedback only makes up for them later.

rate 1: EF21 (Richtarik, Sokolov, Fatkhullin 2021, arXiv:2106.05203), for codecs that are biased, topk above all.
rate below 1: DIANA (Mishchenko, Gorbunov, Takac, Richtarik 2019, arXiv:1901.09269), for unbiased ones, that is with
stochastic rounding; there the rate is to be no more than 1 / (1 + the codec's relative variance).

What arrived of a rank is what it sent less what its encodings lost, those of sums included: so h stays the mean of
all h_i.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from dtcomm.compress.residuals import checked
from dtcomm.device.streams import match_device


class References:
    """``name -> `` this rank's estimate and the shared one, fp32 [numel], zeros at first sight."""

    def __init__(self, rate: float = 1.0) -> None:
        if not 0 < rate <= 1:
            raise ValueError(f"feedback: rate is {rate!r}; valid: above 0, at most 1")
        self.rate = rate
        self._local: dict[str, torch.Tensor] = {}
        self._shared: dict[str, torch.Tensor] = {}

    def before(self, name: str, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What is handed to the collective: a tensor to average in place, and what is added to it."""
        local = _kept(self._local, name, gradient)
        _kept(self._shared, name, gradient)
        difference = local.neg()
        # The estimate moves before the collective, which overwrites the gradient, and takes its losses back after it.
        local.lerp_(gradient.float(), self.rate)
        # Sums are to stay fp32: what is rounded off a 16-bit mean would be missing from the shared estimate for good.
        return (gradient if gradient.dtype == torch.float32 else gradient.float()), difference

    def after(self, name: str, gradient: torch.Tensor, sent: torch.Tensor, residual: torch.Tensor) -> None:
        """The collective is through: ``sent`` is the mean of what arrived, ``residual`` what was lost here."""
        shared = _kept(self._shared, name, gradient)
        whole = shared + sent
        shared.add_(sent, alpha=self.rate)
        self._local[name].sub_(residual, alpha=self.rate)
        gradient.copy_(whole)
        finite = torch.isfinite(whole).all()  # on all ranks alike, which hold the same bits
        if not whole.is_cpu:  # nobody waits to see: zeros are what it starts with
            for estimate in (shared, self._local[name]):
                estimate.masked_fill_(~finite, 0.0)
        elif not finite:
            self.reset(name)

    def get(self, name: str) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """This rank's estimate and the shared one, as they are."""
        return self._local.get(name), self._shared.get(name)

    def __contains__(self, name: str) -> bool:
        return name in self._local

    def scale(self, factor: float) -> None:
        """Multiply every estimate, as the loss scale of mixed-precision training was."""
        for estimate in (*self._local.values(), *self._shared.values()):
            estimate.mul_(factor)

    def reset(self, name: str) -> None:
        """Start anew; all ranks at the same time."""
        self._local.pop(name, None)
        self._shared.pop(name, None)

    def nbytes(self) -> int:
        return sum(4 * kept.numel() for kept in (*self._local.values(), *self._shared.values()))

    def state_dict(self) -> dict[str, dict[str, torch.Tensor]]:
        """Copies, on the CPU."""
        return {
            side: {name: kept.to("cpu", copy=True) for name, kept in estimates.items()}
            for side, estimates in (("local", self._local), ("shared", self._shared))
        }

    def load_state_dict(self, state: Mapping[str, Mapping[str, torch.Tensor]], *, same_world: bool) -> None:
        """From a rank's own state; with another number of ranks all estimates start as the shared one, their mean."""
        self._shared = checked(state.get("shared", {}), "reference")
        self._local = checked(state.get("local" if same_world else "shared", {}), "reference")


def _kept(estimates: dict[str, torch.Tensor], name: str, like: torch.Tensor) -> torch.Tensor:
    estimate = estimates.get(name)
    if estimate is None:
        estimate = torch.zeros(like.numel(), dtype=torch.float32, device=like.device)
    elif estimate.numel() != like.numel():
        raise ValueError(
            f"the reference of {name!r} has {estimate.numel()} elements, its gradient {like.numel()}: "
            "was the state saved from another model?"
        )
    estimate = estimates[name] = match_device(estimate, like)
    return estimate
