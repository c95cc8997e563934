"""`attach` takes the options of `compress`, and refuses wrong ones before the framework wraps the model."""

from __future__ import annotations

import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from dtcomm import ddp


def test_attach_has_the_options_of_compress() -> None:
    of_compress, of_attach = (
        list(inspect.signature(function).parameters.values()) for function in (ddp.compress, ddp.attach)
    )
    assert [parameter for parameter in of_attach[1:] if parameter.name != "log"] == of_compress[1:]
    with pytest.raises(TypeError, match="residuals"):
        ddp.attach(fake_accelerator(), residuals="int8")  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"codec": "int9"}, "unknown codec or compressor 'int9'"),
        ({"feedback": "twice"}, "feedback: 'twice'"),
        ({"residual": "int4"}, "residual: 'int4'; valid: fp32, bf16, int8"),
        ({"warmup": -1}, "warmup=-1: expected 0 or more"),
        ({"sample_every": -1}, "sample_every=-1"),
        ({"timeline": -1}, "timeline=-1: expected 0 or more"),
        ({"candidates": ["int4"]}, "candidates"),
        ({"codec": "auto", "candidates": "int8"}, "candidates='int8': expected a list of specs"),
        ({"codec": "int8/int4", "algorithm": "ring"}, "'ring' has no levels"),
    ],
)
def test_wrong_options_do_not_change_the_accelerator(options: dict[str, Any], message: str) -> None:
    accelerator = fake_accelerator()
    prepare = accelerator.prepare
    with pytest.raises(ValueError, match=message):
        ddp.attach(accelerator, **options)
    assert accelerator.prepare is prepare and not accelerator.hooks


def fake_accelerator(processes: int = 2, hook: str = "no") -> SimpleNamespace:
    """Return what `attach` uses of an Accelerator."""
    hooks: dict[str, Any] = {}
    return SimpleNamespace(
        ddp_handler=SimpleNamespace(comm_hook=hook),
        num_processes=processes,
        prepare=lambda *objects: objects,
        prepare_model=lambda model: model,
        register_save_state_pre_hook=lambda hook: hooks.update(save=hook),
        register_load_state_pre_hook=lambda hook: hooks.update(load=hook),
        hooks=hooks,
    )


def test_a_hook_that_the_accelerator_has_already_is_refused() -> None:
    with pytest.raises(ValueError, match="communication hook fp16 already"):
        ddp.attach(fake_accelerator(hook="fp16"))


@pytest.mark.parametrize("spec", ["int8", "auto", "powersgd:rank=2"])
def test_one_process_compresses_nothing_and_says_so(spec: str, caplog: pytest.LogCaptureFixture) -> None:
    accelerator = fake_accelerator(processes=1)
    attached = ddp.attach(accelerator, spec)
    model = torch.nn.Linear(64, 64)
    assert accelerator.prepare(model, 1) == (model, 1)
    report = attached.state.report()
    assert str(report).startswith("nothing is compressed: the process group has one rank")
    assert report.steps == 0
    saved = attached.state.state_dict()
    assert saved["unused"] == report.uncompressed and saved["world_size"] == 1
    attached.state.load_state_dict(saved)
    attached.state.observe(1.0)
    assert attached.state.events == () and attached.state.metrics()
    lines = [record.message for record in caplog.records]
    assert lines == ["dtcomm.ddp: nothing is compressed: the process group has one rank"]


def test_compress_accepts_a_model_without_ddp_on_one_process(caplog: pytest.LogCaptureFixture) -> None:
    state = ddp.compress(torch.nn.Linear(64, 64), "int8")
    assert "one rank" in str(state.report()) and "one rank" in caplog.text
    with pytest.raises(TypeError, match="expected a DistributedDataParallel, got int"):
        ddp.compress(3)  # type: ignore[arg-type]


def test_one_process_says_that_it_does_not_use_a_saved_state(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    accelerator = fake_accelerator(processes=1)
    ddp.attach(accelerator, "int8")
    accelerator.hooks["save"]([], [], str(tmp_path))
    assert not list(tmp_path.iterdir())
    accelerator.hooks["load"]([], str(tmp_path))
    assert len(caplog.records) == 1
    (tmp_path / "dtcomm").mkdir()
    (tmp_path / "dtcomm" / "rank0-of-2.pt").write_bytes(b"")
    accelerator.hooks["load"]([], str(tmp_path))
    assert "is not used, and the residuals in it are lost" in caplog.text


def test_each_of_several_models_is_compressed_once() -> None:
    accelerator = fake_accelerator()
    accelerator.prepare_model = DistributedDataParallel
    accelerator.prepare = lambda *models: tuple(accelerator.prepare_model(model) for model in models)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        ddp.attach(accelerator, "int8")
        first, second = accelerator.prepare(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
        assert [len(model._comm_hooks) for model in (first, second)] == [1, 1]
    finally:
        dist.destroy_process_group()
