"""The layers of stages, and the arguments of `dtcomm.pipeline.compress`."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

from dtcomm.pipeline import compress, split_layers


def test_layers_are_divided(caplog: pytest.LogCaptureFixture) -> None:
    assert split_layers(6, 3) == [range(2), range(2, 4), range(4, 6)]
    assert not caplog.records
    with caplog.at_level(logging.WARNING, "dtcomm"):
        for _ in range(2):
            assert [len(part) for part in split_layers(11, 4)] == [3, 3, 3, 2]
    (record,) = caplog.records
    assert "4 stages do not divide 11 layers: 3 stages have 3 layers, the others 2" in record.getMessage()
    with pytest.raises(ValueError, match="stages=5: there are 4 layers; valid: 1 to 4 stages"):
        split_layers(4, 5)


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Any:
    store = dist.FileStore(str(tmp_path_factory.mktemp("store") / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield lambda: PipelineStage(nn.Linear(4, 4), 0, 1, torch.device("cpu"))
    dist.destroy_process_group()


def test_a_single_stage_runs(stage: Any) -> None:
    state = compress(only := stage(), "int8")
    schedule = ScheduleGPipe(only, 2, loss_fn=nn.functional.mse_loss)
    with pytest.raises(RuntimeError, match="no step has ended yet"):
        state.bubble_fraction()
    x = torch.randn(4, 4)
    schedule.step(x, target=x)
    assert 0 <= state.bubble_fraction() < 1
    report = state.report()
    assert report.steps == 1 and report.messages == 0
    with pytest.raises(ValueError, match="stage 0 is compressed already"):
        compress(only)
    state.detach()
    compress(only)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"codec": "int2"}, ValueError, "codec: int2 loses 66% of the activations.*differences=True"),
        ({"codec": "int9"}, ValueError, "codec: .*int9"),
        (
            {"backward_codec": "sign", "feedback": False},
            ValueError,
            "backward_codec: sign loses .* of the gradients.*feedback=T",
        ),
        (
            {"codec": "topk:ratio=0.01", "differences": True, "feedback": False},
            ValueError,
            "codec: topk.* of the gradients",
        ),
        ({"codec": "exact"}, ValueError, "codec: exact.* is for sums"),
        (
            {"codec": "lossless"},
            ValueError,
            "codec: lossless has payloads of a length that depends on the da",
        ),
        ({"codec": "int8/int4"}, ValueError, "codec: 'int8/int4' names a codec for each level of hosts"),
        ({"backward_codec": "lossless"}, ValueError, "backward_codec: lossless has payloads"),
        ({"feedback": "ef21"}, ValueError, "feedback: 'ef21'; valid for pipelines: True, False, 'auto'"),
        (
            {"differences": True, "dynamic_shapes": True},
            ValueError,
            "differences: .*valid with dynamic_shapes",
        ),
    ],
)
def test_wrong_arguments_are_named(stage: Any, options: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        compress(stage(), **options)


def test_what_is_no_stage_is_refused(stage: Any) -> None:
    with pytest.raises(TypeError, match=r"stages: expected stages of torch.*pipelining, got Linear"):
        compress([nn.Linear(1, 1)])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="stages: expected at least one stage"):
        compress([])
    state = compress(stage(), "int2", backward_codec="int8", differences=True)
    with pytest.raises(ValueError, match="a sample twice"):
        state.set_samples([1, 2, 1])
    with pytest.raises(ValueError, match=r"samples: expected integers \[batch\]"):
        state.set_samples(torch.zeros(2, 2))
