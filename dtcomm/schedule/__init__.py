"""Schedules: collectives as data.

A `Schedule` lists which rank sends which chunk to which rank in which step. The functions here read that one value:
`verify` proves it, `str` prints it and `parse` reads the text back. `simulate` predicts its time, and `lower` turns it
into the `Program` of one rank, which is all that a runtime executes. `Builder` writes a schedule by following chunks
from rank to rank; `dtcomm.algorithms` has the built-in ones.
"""

from dtcomm.schedule.builder import Builder
from dtcomm.schedule.builder import Chunk as Chunk
from dtcomm.schedule.ir import Schedule, Transfer, parse
from dtcomm.schedule.lower import Program, lower
from dtcomm.schedule.simulate import simulate
from dtcomm.schedule.verify import verify

__all__ = ["Builder", "Program", "Schedule", "Transfer", "lower", "parse", "simulate", "verify"]
