"""A timeline of FSDP's steps: the same interface as DDP's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from torch.distributed.device_mesh import init_device_mesh

from dtcomm import fsdp, profiling
from dtcomm.launch.ranks import run_ranks
from tests.ranks.fsdp.models import sharded, train


def train_with_timeline(rank: int, ranks: int, folder: str) -> str:
    model = sharded(init_device_mesh("cpu", (ranks,)))
    state = fsdp.compress(model, gradients="int8", parameters="fp16")
    with pytest.raises(ValueError, match="no step was recorded"):
        state.trace(f"{folder}/t.json")
    state.timeline.start(3)
    train(model, rank, 5)
    steps = state.timeline.steps
    assert [step.number for step in steps] == [1, 2, 3]  # the last step lasts until the next forward
    for step in steps:
        labels = [message.label for message in step.messages]
        assert labels.count("blocks.0 gradients") == 1 and "(root) parameters" in labels
        assert step.length and step.forward and step.backward
        for message in step.messages:
            assert message.ready <= message.started <= message.finished and message.wire_bytes
            assert message.waited.begin <= message.waited.end
            assert step.begin <= message.ready < step.end
        assert 0 < step.exposed <= step.length
        # Backward overlaps with a module's reduce-scatter: it waits once two more have started, or at its end.
        reductions = [message for message in step.messages if message.label.endswith("gradients")]
        assert reductions == sorted(reductions, key=lambda message: message.ready) and len(reductions) == 3
        assert reductions[1].launched < reductions[2].ready < reductions[0].waited.begin
    assert {span.phase for message in steps[0].messages for span in message.spans} == {
        "encode",
        "reduce",
        "decode",
    }
    assert "(root) gradients" in str(state.timeline.summary())
    metrics = profiling.prometheus(state)
    assert 'dtcomm_calls_total{what="gradients"} 15' in metrics and "dtcomm_communication_share" in metrics
    return state.trace(f"{folder}/t.json")


def test_fsdp_records_a_timeline(tmp_path: Path) -> None:
    for rank, path in enumerate(run_ranks(train_with_timeline, 2, str(tmp_path))):
        metadata = json.loads(Path(path).read_text())["dtcomm"][0]
        assert (metadata["what"], metadata["rank"]) == ("fsdp", rank)
