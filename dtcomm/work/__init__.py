"""Handles of asynchronous operations, and the threads that complete their futures.

:class:`Work` is what callers of ``async_op=True`` get. An executor returns the kind that matches how its operations
complete: :class:`NativeWork`, :class:`StreamWork` or :class:`QueuedWork`. :class:`CompositeWork` combines handles,
:class:`DeferredWork` stands for an operation that has not started yet, and :class:`TorchWork` gives any of them the
interface of ``torch.distributed.Work``. Every package may import this one, and it imports no executor: integrations
combine handles without importing the runtime.
"""

from dtcomm.work.handles import (
    COMPLETED,
    CompositeWork,
    DeferredWork,
    NativeWork,
    QueuedWork,
    StreamWork,
    TensorsFuture,
    TorchWork,
    Work,
    release_completed,
)
from dtcomm.work.statistics import PHASES, Span, Statistics

__all__ = [
    "COMPLETED",
    "PHASES",
    "CompositeWork",
    "DeferredWork",
    "NativeWork",
    "QueuedWork",
    "Span",
    "Statistics",
    "StreamWork",
    "TensorsFuture",
    "TorchWork",
    "Work",
    "release_completed",
]
