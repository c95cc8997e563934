"""Shows the communication of a training run: timelines, traces, profiler ranges, metrics and advice.

    state = dtcomm.ddp.compress(model, "int8", timeline=100)    # record the last 100 steps
    ...
    print(state.timeline.summary())                             # shares, efficiency, advice
    state.trace("trace.json")                                   # one file per rank, for Perfetto; `dtcomm trace` merges
    dtcomm.profiling.write_prometheus(state, "/var/lib/node_exporter/dtcomm.prom")
    state.log(wandb, step)                                      # or a SummaryWriter, a logger of Lightning

Everything with a ``metrics()`` method can be written for Prometheus and given to a logger (`log_metrics`).
"""

from __future__ import annotations

from dtcomm.profiling.metrics import Metric as Metric
from dtcomm.profiling.metrics import log_metrics, prometheus, write_prometheus
from dtcomm.profiling.summary import Summary
from dtcomm.profiling.timeline import Timeline
from dtcomm.profiling.trace import MessageRecord as MessageRecord
from dtcomm.profiling.trace import StepRecord as StepRecord
from dtcomm.profiling.trace import merge

__all__ = ["Summary", "Timeline", "log_metrics", "merge", "prometheus", "write_prometheus"]
