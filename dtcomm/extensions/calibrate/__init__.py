"""Plans of tensor parallelism: proposed for a model, or with codecs that were measured on it.

`propose_plan` finds which layers of a model can be cut. `calibrate` measures how much compression each layer tolerates.
Pass the result to `dtcomm.tp.compress` as ``plan``. `emulate` has the ranks in one
process, for measurements of your own.

Example::

    calibration = calibrate(model, batches, ranks=2, budget=0.01)
    calibration.write("plan.json")
    state = dtcomm.tp.compress(model, mesh, plan="plan.json")
"""

from dtcomm.extensions.calibrate.calibration import Calibration, calibrate
from dtcomm.extensions.calibrate.emulate import EmulatedLayer, emulate, restore
from dtcomm.extensions.calibrate.propose import Proposal, ProposedLayer, propose_plan

__all__ = [
    "Calibration", "EmulatedLayer", "Proposal", "ProposedLayer", "calibrate", "emulate", "propose_plan",
    "restore",
]  # fmt: skip
