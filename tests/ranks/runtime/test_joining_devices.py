"""Ranks with CUDA tensors meet: what they have to have in common, said by name. There need be no GPU for that."""

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


def meet(rank: int, world_size: int, differ: str) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda, "describe_gpu", lambda device: {})
        patch.setattr(cuda, "backend_of", lambda *_: ("gloo", "nccl")[differ == "backend" and rank])
        patch.setattr(dispatch, "low_rank_backend", lambda: ("cuda", "torch")[differ == "factors" and rank])
        patch.setattr(CudaBootstrap, "_choose_runtime", lambda *_: None)
        joining = CudaBootstrap(CUDA, rank, list(range(world_size)), dist.group.WORLD, "met")
        try:
            joining.join()
        except CollectiveMismatch as error:
            return str(error)
        return "met"


@pytest.mark.parametrize(
    ("differ", "says"),
    [
        ("nothing", "met"),
        ("backend", 'disagree on the group\'s backend for cuda: rank 0: "gloo"; rank 1: "nccl"'),
        ("factors", 'cuda where dtcomm._cuda is built, else torch: rank 0: "cuda"; rank 1: "torch"'),
    ],
)
def test_ranks_that_differ_are_refused_by_all(differ: str, says: str) -> None:
    for said in run_ranks(meet, 2, differ):
        assert says in said
