"""What the communication of a training run looks like: timelines, traces, profiler ranges, metrics, advice.

    state = dtcomm.ddp.compress(model, "int8", timeline=100)    # keep the last 100 steps' times
    ...
    print(state.timeline.summary())                             # shares, efficiency, advice
    state.trace("trace.json")                                   # one file a rank, for Perfetto; `dtcomm trace` merges
    dtcomm.profiling.write_prometheus(state, "/var/lib/node_exporter/dtcomm.prom")
    dtcomm.profiling.write_tensorboard(state, writer, step)

Anything with a ``metrics()`` goes to Prometheus and TensorBoard; anything that sends can keep a `Timeline`.
"""

from __future__ import annotations

from dtcomm.profiling.metrics import Metric, prometheus, write_prometheus, write_tensorboard
from dtcomm.profiling.step_record import Message, Step
from dtcomm.profiling.summary import Summary
from dtcomm.profiling.timeline import Timeline
from dtcomm.profiling.trace import merge

__all__ = [
    "Message",
    "Metric",
    "Step",
    "Summary",
    "Timeline",
    "merge",
    "prometheus",
    "write_prometheus",
    "write_tensorboard",
]
