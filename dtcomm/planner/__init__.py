"""The planner: chooses algorithms, and predicts whether a codec pays.

`select` is what ``algorithm="auto"`` calls, and `compression_pays` what latency paths ask. Both read a `Table` of
constants and measurements (`cost_model`), which ``dtcomm tune`` writes. `levels_of` groups ranks by the rates
of their links. `dtcomm.extensions.jobs` predicts on hardware that need not exist.
"""

from dtcomm.planner.cost_model import Measured, Table, Topology, parse, predict
from dtcomm.planner.links import levels_of
from dtcomm.planner.select_algorithm import (
    CHOOSERS,
    Decision,
    PayoffVerdict,
    collective_seconds,
    compression_pays,
    explain,
    select,
)

__all__ = [
    "CHOOSERS",
    "Decision",
    "Measured",
    "PayoffVerdict",
    "Table",
    "Topology",
    "collective_seconds",
    "compression_pays",
    "explain",
    "levels_of",
    "parse",
    "predict",
    "select",
]
