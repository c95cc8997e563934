"""Algorithms: pure functions from a number of ranks to a schedule.

`build` makes the schedule of a collective by an algorithm's name, `available` lists the names, and `register` adds one
of your own. A module here is an algorithm, or a family of them; `registry` is the one list of names.
"""

from dtcomm.algorithms.registry import available, build, collectives, is_registered, register, require

__all__ = ["available", "build", "collectives", "is_registered", "register", "require"]
