from __future__ import annotations

import json

import pytest

from dtcomm.profiling.step_record import StepRecord, union_length
from dtcomm.profiling.summary import summarize
from tests.unit.profiling.steps import MS, step


def test_the_union_of_intervals() -> None:
    assert union_length([(5, 7), (0, 3), (1, 4), (7, 9)]) == 8
    assert union_length([]) == 0


def test_exposed_hidden_and_waits() -> None:
    one = step(0)
    assert one.communication == 59 * MS  # from 31 to 90
    assert one.exposed == 30 * MS  # from the end of backward, at 60, to 90
    assert one.hidden == 29 * MS
    assert [each.waited.end - each.waited.begin for each in one.messages] == [10 * MS, 20 * MS]
    assert StepRecord.from_dict(json.loads(json.dumps(one.to_dict()))) == one


def test_a_summary_has_medians_shares_and_phases() -> None:
    found = summarize([step(n) for n in range(5)])
    assert (found.steps, found.step_ms, found.forward_ms, found.backward_ms) == (5, 100, 20, 40)
    assert found.share == pytest.approx(0.3)
    assert found.efficiency == pytest.approx(1 - 0.302)
    first, second = found.messages
    assert (first.ready_ms, first.queued_ms, first.took_ms, first.exposed_ms) == (10, 1, 39, 10)
    assert second.phases == {"encode": 3.5, "wire": 31.5}
    assert "bucket 1" in str(found)
    json.dumps(found.to_dict())


def test_the_advice_is_what_its_model_says() -> None:
    """A micro-batch takes 60 ms, the rest of a step 10, and 30 are exposed."""
    found = summarize([step(n) for n in range(3)])
    assert found.predicted_share(1) == pytest.approx(0.3)
    assert found.predicted_share(4) == pytest.approx(30 / (4 * 60 + 10 + 30))
    assert found.accumulate == 10
    assert found.predicted_share(10) <= 0.05 < found.predicted_share(9)
    # 10 batches one by one take 1000 ms, together 640.
    assert "accumulating 10 micro-batches" in found.advice and "1.56 times as fast" in found.advice


def test_micro_batches_are_counted() -> None:
    found = summarize([step(n, micro_batches=4) for n in range(3)])
    assert found.micro_batches == 4
    assert found.share == pytest.approx(30 / 220)
    assert found.accumulate > 4


def test_nothing_is_advised_where_communication_hides() -> None:
    quiet = [step(n) for n in range(3)]
    for each in quiet:
        each.assign_waits(round(each.messages[-1].done - 2 * MS))
        each.messages[0].waited = each.messages[0].waited._replace(begin=0, end=0)
    found = summarize(quiet)
    assert (found.exposed_ms, found.advice, found.accumulate) == (2, "", 1)


def test_unfinished_steps_have_no_summary() -> None:
    alone = step(0)
    alone.end = 0
    with pytest.raises(ValueError, match="none is whole"):
        summarize([alone])
