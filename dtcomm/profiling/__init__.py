"""Shows the communication of a training run: timelines, traces, profiler ranges, metrics and advice.

    state = dtcomm.ddp.compress(model, "int8", timeline=100)    # record the last 100 steps
    ...
    print(state.timeline.summary())                             # shares, efficiency, advice
    state.trace("trace.json")                                   # one file per rank, for Perfetto; `dtcomm trace` merges
    dtcomm.profiling.write_prometheus(state, "/var/lib/node_exporter/dtcomm.prom")
    dtcomm.profiling.write_tensorboard(state, writer, step)

    monitor = dtcomm.profiling.RunMonitor(mesh, {"dp": state}, flops=..., peak="h100")
    monitor.step(gradient_norm=norm)                            # each step: MFU, shares of axes, slow ranks

Everything with a ``metrics()`` method can be written for Prometheus and TensorBoard, or served by a `MetricsServer`.
"""

from __future__ import annotations

from dtcomm.profiling.metrics import Metric, prometheus, write_prometheus, write_tensorboard
from dtcomm.profiling.metrics_server import MetricsServer
from dtcomm.profiling.model_flops import count_flops, peak_flops, transformer_flops
from dtcomm.profiling.run_monitor import AxisShare, RunMonitor, RunReport
from dtcomm.profiling.step_record import MessageRecord, StepRecord
from dtcomm.profiling.stragglers import RankSpeed, Straggler, find_stragglers
from dtcomm.profiling.summary import Summary
from dtcomm.profiling.timeline import Timeline
from dtcomm.profiling.trace import merge

__all__ = [
    "AxisShare",
    "MessageRecord",
    "Metric",
    "MetricsServer",
    "RankSpeed",
    "RunMonitor",
    "RunReport",
    "StepRecord",
    "Straggler",
    "Summary",
    "Timeline",
    "count_flops",
    "find_stragglers",
    "merge",
    "peak_flops",
    "prometheus",
    "transformer_flops",
    "write_prometheus",
    "write_tensorboard",
]
