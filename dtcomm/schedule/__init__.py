"""Schedules: collectives as data, and their readers (verifier, printer, simulator, lowering)."""

from dtcomm.schedule.ir import Schedule, Transfer
from dtcomm.schedule.lower import lower
from dtcomm.schedule.program import Program
from dtcomm.schedule.simulate import simulate
from dtcomm.schedule.text import parse
from dtcomm.schedule.verify import verify

__all__ = ["Program", "Schedule", "Transfer", "lower", "parse", "simulate", "verify"]
