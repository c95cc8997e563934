"""Plans of tensor parallelism whose codecs were measured on the model.

`calibrate` measures how much compression each layer tolerates. Pass the result to `dtcomm.tp.compress` as ``plan``.
`emulate` has the ranks in one process, for measurements of your own.

Example::

    calibration = calibrate(model, batches, ranks=2, budget=0.01)
    calibration.write("plan.json")
    state = dtcomm.tp.compress(model, mesh, plan="plan.json")
"""

from dtcomm.extensions.calibrate.calibration import Calibration, calibrate
from dtcomm.extensions.calibrate.emulate import EmulatedLayer, emulate, restore

__all__ = ["Calibration", "EmulatedLayer", "calibrate", "emulate", "restore"]
