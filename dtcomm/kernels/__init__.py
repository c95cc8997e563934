"""Kernels: what runs a codec. `ops` has the verbs; `available`, `current`, `use`: which one runs."""

from dtcomm.kernels.dispatch import available, current, use

__all__ = ["available", "current", "use"]
