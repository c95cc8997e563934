"""Algorithms: short pure functions from a number of ranks to a schedule."""

from dtcomm.algorithms.registry import available, build, collectives, require

__all__ = ["available", "build", "collectives", "require"]
