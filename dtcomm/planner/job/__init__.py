"""Plans whole training jobs: which layout over data, tensor, pipeline, context and expert parallelism is fastest.

`models` has the shapes, `layout` what is planned, `compute` and `network` the seconds of computing and of collectives,
`step` and `memory` the prediction for one layout, `search` the best layouts, and `across_sites` training over a
wide-area link. ``dtcomm plan --model llama-70b`` prints what they find.
"""

from dtcomm.planner.job.across_sites import SiteMethod, WideArea, across_sites
from dtcomm.planner.job.experts import ExpertRoutes, ExpertTraffic
from dtcomm.planner.job.findings import Finding, findings
from dtcomm.planner.job.layout import AXES, RECOMPUTE, SCHEDULES, Job, Layout
from dtcomm.planner.job.memory import JobMemory, job_memory
from dtcomm.planner.job.models import PRESETS, ModelShape, find_model, is_preset, model_of_size
from dtcomm.planner.job.network import Network
from dtcomm.planner.job.search import JobPlan, Misfit, layouts, search
from dtcomm.planner.job.step import JobStep, job_step

__all__ = [
    "AXES",
    "PRESETS",
    "RECOMPUTE",
    "SCHEDULES",
    "ExpertRoutes",
    "ExpertTraffic",
    "Finding",
    "Job",
    "JobMemory",
    "JobPlan",
    "JobStep",
    "Layout",
    "Misfit",
    "ModelShape",
    "Network",
    "SiteMethod",
    "WideArea",
    "across_sites",
    "find_model",
    "findings",
    "is_preset",
    "job_memory",
    "job_step",
    "layouts",
    "model_of_size",
    "search",
]
