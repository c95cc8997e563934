"""The planner: what a collective will cost, and which algorithm to take."""

from dtcomm.planner.compression_payoff import PayoffVerdict, compression_pays
from dtcomm.planner.cost_model import Measured, Table, parse, predict
from dtcomm.planner.hardware import Topology
from dtcomm.planner.select_algorithm import CHOOSERS, Decision, explain, select

__all__ = [
    "CHOOSERS",
    "Decision",
    "Measured",
    "PayoffVerdict",
    "Table",
    "Topology",
    "compression_pays",
    "explain",
    "parse",
    "predict",
    "select",
]
