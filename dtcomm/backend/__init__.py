"""The torch.distributed backend ``"dtcomm"``: programs only change the name in ``init_process_group("dtcomm")``.

CPU tensors are communicated by the native engine if the ranks share a host, otherwise by hierarchical schedules.
Operations that the engine does not support fall back to Gloo, and CUDA tensors to NCCL; `report` lists all fallbacks.
"""

from dtcomm.backend.process_group import BackendReport, report

__all__ = ["BackendReport", "report"]
