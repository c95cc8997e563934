"""`attach` takes the options of `compress`, and refuses wrong ones before the framework wraps the model."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest

from dtcomm import ddp


def test_attach_has_the_options_of_compress() -> None:
    of_compress, of_attach = (
        list(inspect.signature(function).parameters.values()) for function in (ddp.compress, ddp.attach)
    )
    assert of_attach[1:] == of_compress[1:]
    for parameter in of_attach:
        assert f"        {parameter.name}: " in (ddp.attach.__doc__ or ""), parameter.name


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"spec": "int9"}, "unknown codec 'int9'"),
        ({"feedback": "twice"}, "feedback: 'twice'"),
        ({"residual": "int4"}, "residual: 'int4'; valid: fp32, bf16, int8"),
        ({"warmup": -1}, "warmup=-1: want 0 or more"),
        ({"sample_every": -1}, "sample_every=-1"),
        ({"timeline": -1}, "timeline=-1: want 0 or more"),
        ({"budget": 0.1}, "budget, candidates and check_every go with 'auto'"),
        ({"spec": "auto", "budget": -1.0}, "budget=-1.0: want a relative error above 0"),
        ({"spec": "auto", "check_every": 0}, "check_every=0: want 1 or more steps"),
        ({"spec": "int8/int4", "algorithm": "ring"}, "'ring' has no levels"),
    ],
)
def test_wrong_options_do_not_change_the_accelerator(options: dict[str, Any], message: str) -> None:
    accelerator = SimpleNamespace(ddp_handler=None)
    with pytest.raises(ValueError, match=message):
        ddp.attach(accelerator, **options)
    assert accelerator.ddp_handler is None


def test_accelerate_s_options_of_ddp_are_kept() -> None:
    options = SimpleNamespace(comm_hook="no", to_kwargs=lambda: {"gradient_as_bucket_view": True})
    accelerator = SimpleNamespace(ddp_handler=options)
    attached = ddp.attach(accelerator, "int8", False, residual="bf16")
    assert accelerator.ddp_handler is attached
    assert attached.to_kwargs() == {"gradient_as_bucket_view": True}
    options.comm_hook = "fp16"
    with pytest.raises(ValueError, match="communication hook fp16 already"):
        ddp.attach(SimpleNamespace(ddp_handler=options))
