"""The timeline of the hook, and the ranges that torch.profiler shows."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from dtcomm import ddp, profiling
from dtcomm.launch.ranks import run_ranks
from dtcomm.work.statistics import takes_phase_times
from tests.unit.ddp.models import SMALL_BUCKETS, backward, train, wrapped


def train_with_timeline(rank: int, world_size: int, spec: str, folder: str) -> dict[str, Any]:
    model = wrapped(**SMALL_BUCKETS)
    state = ddp.compress(model, spec, timeline=4)
    with pytest.raises(ValueError, match="no step was recorded"):
        state.trace(f"{folder}/t.json")
    train(model, rank, range(6))
    with model.no_sync():
        backward(model, rank, 6)
    backward(model, rank, 7)
    model.zero_grad()
    assert takes_phase_times()
    steps = state.timeline.steps
    assert [step.number for step in steps] == [3, 4, 5, 6]
    accumulated = steps[-1]
    assert (len(accumulated.forward), len(accumulated.backward)) == (2, 2)
    for step in steps[1:]:
        assert [message.label for message in step.messages] == ["bucket 0", "bucket 1"]
        assert step.begin <= step.forward[0][0] <= step.forward[0][1] <= step.backward[0][0]
        for message in step.messages:
            assert step.backward[-1][0] <= message.ready <= message.launched
            assert message.ready <= message.started <= message.finished <= message.done
            assert message.wire_bytes > 0 and spec in message.codec
            for span in message.spans:
                assert span.busy_ns <= span.end_ns - span.begin_ns
                assert (
                    span.phase == "factors"
                    or message.started <= span.begin_ns <= span.end_ns <= message.finished
                )
        last = max(message.done for message in step.messages)
        assert step.exposed == max(0, last - step.backward[-1][1])
    phases = {span.phase for message in steps[-1].messages for span in message.spans}
    path = state.trace(f"{folder}/t.json")
    state.timeline.stop()
    assert not takes_phase_times()
    train(model, rank, range(2))
    assert state.timeline.steps == steps
    names = {metric.name for metric in state.metrics()}
    assert {"dtcomm_scaling_efficiency", "dtcomm_message_seconds", "dtcomm_wire_bytes_total"} <= names
    profiling.write_prometheus(state, f"{folder}/rank{rank}.prom", {"rank": str(rank)})
    return {"path": path, "phases": sorted(phases)}


@pytest.mark.parametrize("runtime", ["native", "process_group"])
def test_timeline_has_the_phases_of_a_codec(tmp_path: Path, runtime: str) -> None:
    results = run_ranks(train_with_timeline, 2, "int8", str(tmp_path), env={"DTCOMM_RUNTIME": runtime})
    for rank, result in enumerate(results):
        assert result["path"].endswith(f"t.rank{rank}.json")
        assert set(result["phases"]) == {"encode", "reduce", "decode"}
        assert json.loads(Path(result["path"]).read_text())["dtcomm"][0]["what"] == "ddp"
    assert "dtcomm_steps_total" in (tmp_path / "rank1.prom").read_text()


def test_timeline_has_the_phases_of_powersgd(tmp_path: Path) -> None:
    for result in run_ranks(train_with_timeline, 2, "powersgd:rank=2", str(tmp_path)):
        assert "factors" in result["phases"]


def train_with_profiler(rank: int, world_size: int) -> list[tuple[str, float]]:
    model = wrapped(**SMALL_BUCKETS)
    ddp.compress(model, "int8")
    train(model, rank, range(2))
    with torch.profiler.profile() as profile:
        model(torch.zeros(4, 48)).sum().backward()
    return [
        (event.name, event.time_range.elapsed_us()) for event in profile.events() if "dtcomm" in event.name
    ]


def test_profiler_shows_buckets_and_waits() -> None:
    for ranges in run_ranks(train_with_profiler, 2):
        assert [name for name, _ in ranges] == [
            "dtcomm::bucket 0",
            "dtcomm::bucket 1",
            "dtcomm::waiting for communication",
        ]
        assert all(took > 0 for _, took in ranges)


LATE = 0.3  # seconds


def train_with_late_peer(
    rank: int, world_size: int, spec: str, options: dict[str, Any]
) -> tuple[float, float]:
    """Return the longest time in the hook and the exposed time of a step, on a rank whose peer is late."""
    model = wrapped(**SMALL_BUCKETS)
    state = ddp.compress(model, spec, timeline=10, **options)
    train(model, rank, range(3))
    if rank == 1:
        time.sleep(LATE)
    train(model, rank, range(3, 5))
    late = state.timeline.steps[3]
    return max(message.launched - message.ready for message in late.messages) * 1e-9, late.exposed * 1e-9


CASES: dict[str, tuple[str, dict[str, Any], str]] = {
    "none": ("none", {}, "native"),
    "sampled": ("int8", {"sample_every": 1}, "native"),
    "EF21": ("topk:ratio=0.05", {"feedback": "ef21"}, "native"),
    "DGC between hosts": ("dgc:ratio=0.05", {}, "process_group"),
    "PowerSGD": ("powersgd:rank=2", {}, "native"),
    "PowerSGD between hosts": ("powersgd:rank=2", {}, "process_group"),
}


@pytest.mark.parametrize("case", CASES)
def test_the_caller_never_waits_in_the_hook(case: str) -> None:
    """If rank 1 is late, rank 0's hook returns at once, and rank 0 waits only after its backward pass."""
    spec, options, runtime = CASES[case]
    (hook, exposed), _ = run_ranks(train_with_late_peer, 2, spec, options, env={"DTCOMM_RUNTIME": runtime})
    assert hook < LATE / 2
    assert exposed > LATE / 2
