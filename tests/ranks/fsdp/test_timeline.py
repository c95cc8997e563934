"""A timeline of FSDP's steps: the same interface as DDP's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from torch.distributed.device_mesh import init_device_mesh

from dtcomm import fsdp, profiling
from dtcomm.launch.ranks import run_ranks
from tests.ranks.fsdp.models import sharded, train


def timed(rank: int, ranks: int, folder: str) -> str:
    model = sharded(init_device_mesh("cpu", (ranks,)))
    state = fsdp.compress(model, gradients="int8", parameters="fp16")
    with pytest.raises(ValueError, match="no step was kept"):
        state.trace(f"{folder}/t.json")
    state.timeline.start(3)
    train(model, rank, 5)
    kept = state.timeline.steps
    assert [step.number for step in kept] == [1, 2, 3]  # the last step lasts until the next forward
    for step in kept:
        labels = [each.label for each in step.messages]
        assert labels.count("blocks.0 gradients") == 1 and "(root) parameters" in labels
        assert step.length and step.forward and step.backward
        for each in step.messages:
            assert each.ready <= each.started <= each.finished and each.wire_bytes
            assert each.waited.begin <= each.waited.end
            assert step.begin <= each.ready < step.end
        assert 0 < step.exposed <= step.length
        # Backward overlaps with a module's reduce-scatter: it waits once two more have started, or at its end.
        reduced = [one for one in step.messages if one.label.endswith("gradients")]
        assert reduced == sorted(reduced, key=lambda one: one.ready) and len(reduced) == 3
        assert reduced[1].launched < reduced[2].ready < reduced[0].waited.begin
    assert {span.phase for each in kept[0].messages for span in each.spans} == {"encode", "reduce", "decode"}
    assert "(root) gradients" in str(state.timeline.summary())
    text = profiling.prometheus(state)
    assert 'dtcomm_calls_total{what="gradients"} 15' in text and "dtcomm_communication_share" in text
    return state.trace(f"{folder}/t.json")


def test_a_timeline_of_fsdp(tmp_path: Path) -> None:
    for rank, path in enumerate(run_ranks(timed, 2, str(tmp_path))):
        about = json.loads(Path(path).read_text())["dtcomm"][0]
        assert (about["what"], about["rank"]) == ("fsdp", rank)
