"""The planner: what a collective will cost, and which algorithm to take."""

from dtcomm.planner.cost_model import Measured, Table, parse, predict
from dtcomm.planner.select_algorithm import CHOOSERS, Decision, explain, select
from dtcomm.planner.topology import Topology

__all__ = ["CHOOSERS", "Decision", "Measured", "Table", "Topology", "explain", "parse", "predict", "select"]
