"""Summaries of training steps: exposed communication, medians and advice."""

from __future__ import annotations

import json

import pytest

from dtcomm.profiling.summary import summarize
from dtcomm.profiling.timeline import Timeline
from dtcomm.profiling.trace import StepRecord, union_length
from tests.unit.profiling.steps import MS, step


def test_the_union_of_intervals() -> None:
    assert union_length([(5, 7), (0, 3), (1, 4), (7, 9)]) == 8
    assert union_length([]) == 0


def test_exposed_hidden_and_waits() -> None:
    record = step(0)
    assert record.communication == 59 * MS  # from 31 to 90
    assert record.exposed == 30 * MS  # from the end of backward, at 60, to 90
    assert record.hidden == 29 * MS
    assert [message.waited.end - message.waited.begin for message in record.messages] == [10 * MS, 20 * MS]
    assert StepRecord.from_dict(json.loads(json.dumps(record.to_dict()))) == record


def test_a_summary_contains_medians_shares_and_phases() -> None:
    summary = summarize([step(n) for n in range(5)])
    assert (summary.steps, summary.step_ms, summary.forward_ms, summary.backward_ms) == (5, 100, 20, 40)
    assert summary.share == pytest.approx(0.3)
    assert summary.efficiency == pytest.approx(1 - 0.302)
    first, second = summary.messages
    assert (first.ready_ms, first.queued_ms, first.took_ms, first.exposed_ms) == (10, 1, 39, 10)
    assert second.phases == {"encode": 3.5, "wire": 31.5}
    assert "bucket 1" in str(summary)
    json.dumps(summary.to_dict())


def test_exposed_communication_gives_advice() -> None:
    advice = summarize([step(n) for n in range(3)]).advice
    assert advice.startswith("communication is exposed for 30% of a step (30.0 ms); compress more")


def test_micro_batches_are_counted() -> None:
    summary = summarize([step(n, micro_batches=4) for n in range(3)])
    assert summary.micro_batches == 4
    assert summary.share == pytest.approx(30 / 220)


def test_hidden_communication_gives_no_advice() -> None:
    steps = [step(n) for n in range(3)]
    for record in steps:
        record.assign_waits(round(record.messages[-1].done - 2 * MS))
        record.messages[0].waited = record.messages[0].waited._replace(begin=0, end=0)
    summary = summarize(steps)
    assert (summary.exposed_ms, summary.advice) == (2, "")


def test_unfinished_steps_cannot_be_summarized() -> None:
    unfinished = step(0)
    unfinished.end = 0
    with pytest.raises(ValueError, match="none of 1 steps is complete"):
        summarize([unfinished])


def test_a_timeline_that_is_off_says_how_to_turn_it_on() -> None:
    timeline = Timeline("ddp")
    with pytest.raises(ValueError, match="timeline is off; pass timeline=100"):
        timeline.summary()
    timeline.start()
    with pytest.raises(ValueError, match="none of 0 steps is complete"):
        timeline.summary()
    timeline.stop()
