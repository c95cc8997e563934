"""Ranks of a Gloo group that act as if each had a CUDA device, with NCCL between them (`fake_cuda_tensor`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from dtcomm.runtime.bootstrap import cuda
from dtcomm.runtime.communicator import get_communicator_for
from dtcomm.runtime.torchdist.runtime import TorchDistRuntime
from tests.support.fake_cuda_tensor import FakeCudaTensor, fake_cuda_device
from tests.support.stream_checker import RecordedStreams
from tests.support.thread_transport import ThreadTransport


@contextmanager
def fake_cuda_rank(streams: RecordedStreams, leave_out: str = "") -> Iterator[None]:
    """Give this rank a fake CUDA device within the block. All ranks enter it; each is checked by its ``streams``."""
    replacements: dict[str, Any] = {
        "backend_of": lambda group, device: "nccl",
        "describe_gpu": lambda device: {"trouble": "is a fake"},
    }
    original_functions = {name: vars(cuda)[name] for name in replacements}
    original_backend_runtime = cuda.CudaBootstrap._backend_runtime

    def backend_runtime(joining: Any, own: Any, backend: str) -> TorchDistRuntime:
        gloo = joining._private_backend("gloo")

        def post(sends: Sequence[tuple[Any, int]], receives: Sequence[tuple[Any, int]]) -> None:
            works = [gloo.recv([_host_tensor(into)], peer, 0) for into, peer in receives]
            works += [gloo.send([_host_tensor(payload)], peer, 0) for payload, peer in sends]
            for work in works:
                work.wait()

        return TorchDistRuntime(ThreadTransport(own, joining.rank, post, leave_out), own, joining.rank)

    cuda.CudaBootstrap._backend_runtime = backend_runtime  # type: ignore[assignment]
    vars(cuda).update(replacements)
    try:
        with fake_cuda_device(streams):
            # Only this thread is checked, and the first asynchronous operation would start in another one.
            get_communicator_for(None, FakeCudaTensor(torch.ones(1)), "tensor").connect()
            yield
    finally:
        cuda.CudaBootstrap._backend_runtime = original_backend_runtime  # type: ignore[method-assign]
        vars(cuda).update(original_functions)


def _host_tensor(tensor: torch.Tensor) -> torch.Tensor:
    return getattr(tensor, "host", tensor)
