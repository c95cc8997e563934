"""The torch.distributed backend "dtcomm": ``init_process_group("dtcomm")`` and nothing else to change.

CPU tensors travel over the native engine where ranks share a host and over hierarchical schedules where they do
not. What the engine does not do is handed to Gloo, CUDA tensors to NCCL, and ``report()`` names all of it.
"""

from dtcomm.backend.fallback_report import Report, report

__all__ = ["Report", "report"]
