"""Plans whole training jobs: which layout over data, tensor, pipeline, context and expert parallelism is fastest.

`models` has the shapes, `layout` what is planned, `rank_costs` the seconds of computing and the memory of a rank,
`network` the seconds of messages. `step` has the prediction for one layout, `search` the best layouts, and
`across_sites` training over a wide-area link. ``dtcomm plan job`` and ``dtcomm plan sites`` print what they find.
"""

from dtcomm.extensions.jobs.across_sites import SiteMethod, WideArea, across_sites
from dtcomm.extensions.jobs.layout import AXES, RECOMPUTE, SCHEDULES, Job, Layout
from dtcomm.extensions.jobs.models import PRESETS, ModelShape, find_model, model_of_size
from dtcomm.extensions.jobs.network import ExpertRoutes, ExpertTraffic, Network
from dtcomm.extensions.jobs.rank_costs import JobMemory, job_memory
from dtcomm.extensions.jobs.search import JobPlan, Misfit, search
from dtcomm.extensions.jobs.step import JobStep, job_step

__all__ = [
    "AXES", "PRESETS", "RECOMPUTE", "SCHEDULES", "ExpertRoutes", "ExpertTraffic", "Job",
    "JobMemory", "JobPlan", "JobStep", "Layout", "Misfit", "ModelShape", "Network", "SiteMethod", "WideArea",
    "across_sites", "find_model", "job_memory", "job_step", "model_of_size", "search",
]  # fmt: skip
