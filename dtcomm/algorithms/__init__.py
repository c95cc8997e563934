"""Algorithms: pure functions from a number of ranks to a schedule.

`build` makes the schedule of a collective by an algorithm's name, `available` lists the names, and `register` adds one
of your own. A module here is an algorithm, or a family of them; `registry` is the one list of names.
"""

from dtcomm.algorithms.registry import available, build, register
from dtcomm.algorithms.registry import collectives as collectives
from dtcomm.algorithms.registry import is_registered as is_registered
from dtcomm.algorithms.registry import require as require

__all__ = [
    "available",
    "build",
    "register",
]
