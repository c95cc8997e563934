"""Schedules: collectives as data, and their readers (verifier, printer, simulator, lowering)."""

from dtcomm.schedule.ir import Schedule, Transfer
from dtcomm.schedule.lower import lower
from dtcomm.schedule.program import Program
from dtcomm.schedule.text import parse

__all__ = ["Program", "Schedule", "Transfer", "lower", "parse"]
