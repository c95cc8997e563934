"""`dtcomm.fsdp.attach` takes the options of `compress`; on one process both say that they compress nothing."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dtcomm import fsdp
from tests.unit.ddp.test_attach import fake_accelerator


def test_attach_has_the_options_of_compress() -> None:
    of_compress, of_attach = (
        list(inspect.signature(function).parameters.values()) for function in (fsdp.compress, fsdp.attach)
    )
    assert [option for option in of_attach[1:] if option.name != "log"] == of_compress[1:]
    for parameter in of_attach:
        assert f"    {parameter.name}: " in (fsdp.attach.__doc__ or ""), parameter.name


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"gradients": "int9"}, ValueError, "int9"),
        ({"parameters": "topk"}, ValueError, "topk"),
        ({"preset": "zero"}, ValueError, "zero"),
        ({"residual": "int4", "feedback": True}, ValueError, "residual: 'int4'"),
        ({"allow_inaccurate": 1}, TypeError, "allow_inaccurate: expected a bool"),
    ],
)
def test_wrong_options_do_not_change_the_accelerator(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    accelerator = fake_accelerator()
    prepare = accelerator.prepare
    with pytest.raises(error, match=message):
        fsdp.attach(accelerator, **options)
    assert accelerator.prepare is prepare and not accelerator.hooks


def test_one_process_compresses_nothing_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    accelerator = fake_accelerator(processes=1)
    attached = fsdp.attach(accelerator, preset="loco")
    accelerator.prepare(torch.nn.Linear(4, 4))
    compressed = fsdp.compress(torch.nn.Linear(4, 4), "int8")
    for state in (attached.state, compressed):
        assert str(state.report()).startswith("nothing is compressed: the process group has one rank")
        assert state.state_dict()["unused"] == state.report().uncompressed
        state.load_state_dict(state.state_dict())
    assert [record.message for record in caplog.records] == [
        "dtcomm.fsdp: nothing is compressed: the process group has one rank"
    ] * 2


def test_a_model_that_the_framework_does_not_shard_is_named(caplog: pytest.LogCaptureFixture) -> None:
    accelerator = fake_accelerator()
    attached = fsdp.attach(accelerator)
    with pytest.raises(RuntimeError, match="not wrapped in FSDP yet"):
        _ = attached.state
    ddp_model = torch.nn.parallel.DistributedDataParallel.__new__(torch.nn.parallel.DistributedDataParallel)
    torch.nn.Module.__init__(ddp_model)
    accelerator.prepare(ddp_model)
    assert "wrapped the model in DDP, not in FSDP" in caplog.text
    with pytest.raises(RuntimeError, match=r"use dtcomm\.ddp\.attach"):
        _ = attached.state


def test_lightning_s_trainer_is_recognised_by_its_strategy() -> None:
    def setup(trainer: Any) -> None: ...

    strategy = SimpleNamespace(
        setup=setup, save_checkpoint=setup, load_checkpoint=setup, remove_checkpoint=setup, model=None
    )
    trainer = SimpleNamespace(strategy=strategy, world_size=2, state=SimpleNamespace(fn=None))
    fsdp.attach(trainer)
    assert strategy.setup is not setup
