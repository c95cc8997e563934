"""Kernels: what runs a codec. `ops` has the verbs, `library` what torch.compile makes of them and a differentiable
round trip; `available`, `current`, `use`: which kernel runs."""

from dtcomm.kernels.dispatch import available, current, use

__all__ = ["available", "current", "use"]
