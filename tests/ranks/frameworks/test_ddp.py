"""`ddp.attach` to an Accelerator: before its model is wrapped, with its own options of DDP, to what is no DDP."""

from __future__ import annotations

import pytest
import torch

from dtcomm import ddp
from dtcomm.launch.ranks import run_ranks
from tests.ranks.frameworks.sessions import forget_accelerate, make_net, set_environment


def attach_to_accelerator(rank: int, n: int) -> None:
    set_environment(rank, n)
    from accelerate import Accelerator
    from accelerate.utils import DistributedDataParallelKwargs

    forget_accelerate()
    options = DistributedDataParallelKwargs(gradient_as_bucket_view=True)
    accelerator = Accelerator(cpu=True, kwargs_handlers=[options])
    attached = ddp.attach(accelerator, "int8")
    with pytest.raises(RuntimeError, match="not wrapped in DDP yet"):
        attached.state  # noqa: B018
    model = accelerator.prepare(make_net())
    assert model.gradient_as_bucket_view
    accelerator.backward(model(torch.ones(1, 32)).sum())
    report = attached.state.report()
    assert report.steps == 1 and report.messages > 0
    with pytest.raises(TypeError, match="got Sequential"):
        ddp.attach(model.module)


def test_an_accelerator_keeps_its_own_options_of_ddp() -> None:
    pytest.importorskip("accelerate", reason="pip install accelerate")
    run_ranks(attach_to_accelerator, 2)
