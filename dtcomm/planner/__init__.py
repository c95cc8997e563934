"""The planner: what a collective will cost, and which algorithm to take."""

from dtcomm.planner.choice import CHOOSERS, Decision, explain, select
from dtcomm.planner.cost import Measured, Table, parse, predict
from dtcomm.planner.topology import Topology

__all__ = ["CHOOSERS", "Decision", "Measured", "Table", "Topology", "explain", "parse", "predict", "select"]
