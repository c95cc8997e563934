"""EF21 and DIANA: feedback that sends differences to a reference that all ranks share.

Every rank keeps an estimate h_i of its own gradient, and all ranks keep their mean h. A rank sends C(g_i - h_i); the
gradient becomes h + mean C(g_i - h_i), and both estimates move by ``rate`` times what arrived. The errors shrink with
the differences, whereas error feedback makes up for them later.

- rate 1: EF21 (Richtarik, Sokolov, Fatkhullin 2021, arXiv:2106.05203), for biased codecs such as topk.
- rate below 1: DIANA (Mishchenko, Gorbunov, Takac, Richtarik 2019, arXiv:1901.09269), for unbiased codecs, that is with
  stochastic rounding. The rate should be at most 1 / (1 + the codec's relative variance).

What arrived of a rank is what it sent less what its encodings lost, those of sums included, so that h stays the mean of
all h_i.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from dtcomm.compress.residuals import flat_copies
from dtcomm.streams import match_device


class References:
    """The local and the shared estimates of one rank, by parameter: fp32 [numel], zeros at first.

    Args:
        rate: The step of the estimates, above 0 and at most 1.

    Raises:
        ValueError: The rate is out of range.
    """

    def __init__(self, rate: float = 1.0) -> None:
        if not 0 < rate <= 1:
            raise ValueError(f"feedback: rate is {rate!r}; valid: above 0, at most 1")
        self.rate = rate
        self._local: dict[str, torch.Tensor] = {}
        self._shared: dict[str, torch.Tensor] = {}

    def begin(self, name: str, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a tensor to average in place, and what the collective adds to it."""
        local = _estimate(self._local, name, gradient)
        _estimate(self._shared, name, gradient)
        minus_local = local.neg()
        # The estimate moves before the collective, which overwrites the gradient; `finish` subtracts what was lost.
        local.lerp_(gradient.float(), self.rate)
        # Sums stay fp32: the rounding of a 16-bit mean would be missing from the shared estimate for good.
        return (gradient if gradient.dtype == torch.float32 else gradient.float()), minus_local

    def finish(self, name: str, gradient: torch.Tensor, mean: torch.Tensor, lost: torch.Tensor) -> None:
        """Update both estimates and the gradient.

        Args:
            name: The parameter.
            gradient: Becomes the estimate of the mean gradient.
            mean: The mean over ranks of what arrived.
            lost: What the encodings of this rank lost.
        """
        shared = _estimate(self._shared, name, gradient)
        result = shared + mean
        shared.add_(mean, alpha=self.rate)
        self._local[name].sub_(lost, alpha=self.rate)
        gradient.copy_(result)
        finite = torch.isfinite(result).all()  # the same on all ranks, which hold the same bits
        if not finite.is_cpu or not finite:  # the host does not wait for a device
            for estimate in (shared, self._local[name]):
                estimate.masked_fill_(~finite, 0.0)

    def get(self, name: str) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return the local and the shared estimate, or None before the first step."""
        return self._local.get(name), self._shared.get(name)

    def __contains__(self, name: str) -> bool:
        return name in self._local

    def scale(self, factor: float) -> None:
        """Multiply every estimate by ``factor``."""
        for estimate in (*self._local.values(), *self._shared.values()):
            estimate.mul_(factor)

    def reset(self, name: str) -> None:
        """Start the parameter's estimates from zero; to be called on all ranks in the same step."""
        self._local.pop(name, None)
        self._shared.pop(name, None)

    def nbytes(self) -> int:
        """Return the bytes of all estimates."""
        return sum(4 * estimate.numel() for estimate in (*self._local.values(), *self._shared.values()))

    def state_dict(self) -> dict[str, dict[str, torch.Tensor]]:
        """Return copies on the CPU."""
        return {
            side: {name: estimate.to("cpu", copy=True) for name, estimate in estimates.items()}
            for side, estimates in (("local", self._local), ("shared", self._shared))
        }

    def load_state_dict(
        self, state: Mapping[str, Mapping[str, torch.Tensor]], *, same_world_size: bool
    ) -> None:
        """Load a rank's own state; with another number of ranks the local estimates start as the shared one."""
        self._shared = flat_copies(state.get("shared", {}), "reference")
        self._local = flat_copies(state.get("local" if same_world_size else "shared", {}), "reference")


def _estimate(estimates: dict[str, torch.Tensor], name: str, like: torch.Tensor) -> torch.Tensor:
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
