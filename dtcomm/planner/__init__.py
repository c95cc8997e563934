"""The planner: what a collective will cost, and which algorithm to take."""

from dtcomm.planner.choice import CHOOSERS, select
from dtcomm.planner.cost import Table, predict
from dtcomm.planner.topology import Topology

__all__ = ["CHOOSERS", "Table", "Topology", "predict", "select"]
