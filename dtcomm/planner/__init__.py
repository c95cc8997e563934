"""The planner: predicts what a collective costs, and chooses algorithms.

`select` is what ``algorithm="auto"`` calls, and `compression_pays` what latency paths ask. Both read a `Table` of
constants and measurements (`cost_model`), which ``dtcomm tune`` writes. `plan_links` groups ranks by the rates of their
links and says on which of these a codec pays. ``dtcomm plan`` predicts collectives and
training steps on hardware that need not exist: `hardware` describes it, `estimate` and `sweep` predict collectives by
`traffic_profile` or NCCL's own model (`nccl_model`), `training_model` predicts training steps and memory, on CPU ranks
with `core_costs`, and the package `job` searches the layouts of whole jobs.
"""

from dtcomm.planner.cost_model import Measured, Table, parse, predict
from dtcomm.planner.hardware import Topology
from dtcomm.planner.select_algorithm import (
    CHOOSERS,
    Decision,
    PayoffVerdict,
    collective_seconds,
    compression_pays,
    explain,
    select,
)
from dtcomm.planner.uneven_links import LinkPlan, LinkRates, levels_of, plan_links

__all__ = [
    "CHOOSERS",
    "Decision",
    "LinkPlan",
    "LinkRates",
    "Measured",
    "PayoffVerdict",
    "Table",
    "Topology",
    "collective_seconds",
    "compression_pays",
    "explain",
    "levels_of",
    "parse",
    "plan_links",
    "predict",
    "select",
]
