"""The bootstrap for CUDA tensors refuses ranks that differ and names them. No GPU is needed."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from dtcomm.errors import CollectiveMismatch
from dtcomm.kernels import dispatch
from dtcomm.launch.ranks import run_ranks
from dtcomm.runtime.bootstrap import cuda
from dtcomm.runtime.bootstrap.cuda import CudaBootstrap

CUDA = torch.device("cuda", 0)


def join(rank: int, world_size: int, differ: str) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda, "describe_gpu", lambda device: {})
        patch.setattr(cuda, "backend_of", lambda *_: ("gloo", "nccl")[differ == "backend" and rank])
        patch.setattr(dispatch, "installed", lambda: not (differ == "kernels" and rank))
        patch.setattr(CudaBootstrap, "_choose_runtime", lambda *_: None)
        bootstrap = CudaBootstrap(CUDA, rank, list(range(world_size)), dist.group.WORLD, "test")
        try:
            bootstrap.join()
        except CollectiveMismatch as error:
            return str(error)
        return "joined"


@pytest.mark.parametrize(
    ("differ", "says"),
    [
        ("nothing", "joined"),
        ("backend", 'disagree on the group\'s backend for cuda: rank 0: "gloo"; rank 1: "nccl"'),
        ("kernels", "whether dtcomm._cuda is built: rank 0: true; rank 1: false"),
    ],
)
def test_ranks_that_differ_are_refused_on_all_ranks(differ: str, says: str) -> None:
    for outcome in run_ranks(join, 2, differ):
        assert says in outcome
