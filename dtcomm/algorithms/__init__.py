"""Algorithms: pure functions from a number of ranks to a schedule.

`build` makes the schedule of a collective by an algorithm's name, and `available` lists the names. A module here is an
algorithm, or a family of them; `registry` is the one list of names.
"""

from dtcomm.algorithms.registry import available, build, collectives, require

__all__ = ["available", "build", "collectives", "require"]
