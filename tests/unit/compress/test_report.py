"""The report that all integrations share: columns, totals, legend, payoff, plain values, and who prints."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch

from dtcomm.compress.payoff import exposed_ms
from dtcomm.compress.report import COLUMNS, MESSAGE_COLUMNS, Payoff, Report, Reporting, describe_uncompressed
from dtcomm.compress.traffic import ParameterTotals, Row, Traffic, group_rows, group_traffic, message_rows


def make_row(codec: str = "int8", **options: Any) -> Row:
    values: dict[str, Any] = {
        "codec": codec,
        "dtype": "float32",
        "reason": "",
        "names": ("a", "b"),
        "numel": 2000,
        "calls": 3,
        "wire_bytes": 1000,
        "plain_bytes": 4000,
        "relative_error": 0.005,
    }
    return Row(**{**values, **options})


def make_report(*rows: Row, **options: Any) -> Report:
    values: dict[str, Any] = {
        "policy": "int8",
        "feedback": True,
        "steps": 3,
        "messages": 6,
        "wire_bytes": sum(row.wire_bytes for row in rows),
        "plain_bytes": sum(row.plain_bytes for row in rows),
        "seconds": 0.25,
        "residual_bytes": 8000,
        "rows": rows,
    }
    return Report(**{**values, **options})


PAYOFF = Payoff(
    compressed_ms=2.0, uncompressed_ms=6.0, source="predicted", basis="by a model", scope="a step"
)


def test_text_has_every_column_a_row_for_each_codec_and_totals() -> None:
    rows = (
        make_row(),
        make_row("none", names=("c",), numel=10, wire_bytes=40, plain_bytes=40, reason="small"),
    )
    head, table_head, first, second, total, *rest = str(make_report(*rows)).splitlines()
    assert head == "dtcomm DDP: int8, feedback on, rank 0 of 1"
    assert [name for name in COLUMNS if name in table_head] == list(COLUMNS)
    assert first.split() == "gradients int8 float32 2 2,000 3 1000 B 3.9 KiB 75.0% 5.0e-03 a … b".split()
    assert second.split() == "gradients none float32 1 10 3 40 B 40 B 0.0% 5.0e-03 small".split()
    assert total.split() == "total 3 2,010 6 1.0 KiB 3.9 KiB 74.3%".split()
    assert (
        rest[1]
        == "this run: 3 steps, 6 messages: sent 1.0 KiB instead of 3.9 KiB in 0.250 s; 7.8 KiB of residuals"
    )


def test_legend_explains_each_column_that_is_shown() -> None:
    report = make_report(make_row())
    text = " ".join(str(report).split())
    assert all(f"{name}: {meaning}" in text for name, meaning in COLUMNS.items())
    assert "ms: mean time" not in text
    traffic = Traffic(codec="int8", what="gradients", dtype="float32", calls=2, seconds=0.004)
    with_messages = make_report(make_row(), by_message=message_rows([("layer", traffic)]))
    text = " ".join(str(with_messages).split())
    assert all(f"{name}: {meaning}" in text for name, meaning in MESSAGE_COLUMNS.items())
    assert "2.00" in text


@pytest.mark.parametrize(
    ("codec", "error", "feedback", "says"),
    [
        (
            "powersgd:rank=4",
            0.86,
            True,
            "0.86 (powersgd:rank=4) means that one call sends a part with 51% of the norm",
        ),
        ("powersgd:rank=4", 0.86, True, "The rest is in the residuals and is sent in later steps"),
        ("topk:ratio=0.01", 0.96, "ef21", "a part with 28% of the norm"),
        ("sign", 0.6, False, "Without error feedback the rest is lost"),
    ],
)
def test_a_large_relative_error_is_explained(
    codec: str, error: float, feedback: bool | str, says: str
) -> None:
    report = make_report(make_row(codec, relative_error=error), make_row(), feedback=feedback)
    assert any(says in line for line in report.legend())
    assert not any("relative error of" in line for line in make_report(make_row()).legend())


@pytest.mark.parametrize(
    ("compressed", "uncompressed", "verdict"),
    [(1.0, 2.0, "paid"), (2.0, 1.0, "did not pay"), (1.0, 1.01, "made no difference")],
)
def test_payoff_says_whether_it_paid_and_where_the_times_come_from(
    compressed: float, uncompressed: float, verdict: str
) -> None:
    measured = Payoff(
        compressed_ms=compressed,
        uncompressed_ms=uncompressed,
        source="measured",
        scope="a step",
        baseline="plain DDP",
    )
    expected = f"{compressed:.3g} ms of a step, {uncompressed:.3g} ms with plain DDP (both measured)"
    assert str(measured) == f"compression {verdict}: {expected}"
    predicted = replace(PAYOFF, measured_ms=2.5, exposed_ms=0.5)
    assert str(predicted) == (
        "compression paid: 2 ms of a step, 6 ms with codec none (both by a model); measured with compression: 2.5 ms, "
        "of which 0.5 ms exposed"
    )
    assert str(predicted) in str(make_report(make_row(), payoff=predicted))


def test_plain_values_have_everything_and_survive_json() -> None:
    traffic = Traffic(codec="int8", what="gradients", relative_error=torch.tensor(0.25))
    report = make_report(
        make_row(),
        integration="FSDP",
        payoff=PAYOFF,
        modules={"layer": {"gradients": traffic}},
        by_message=message_rows([("layer", traffic)]),
        notes=("a note",),
        events={"loss: none": 1},
    )
    values = json.loads(report.to_json())
    assert values == report.to_dict()
    assert values["rows"][0]["names"] == ["a", "b"] and values["rows"][0]["saved_bytes"] == 3000
    assert values["payoff"]["verdict"] == "paid" and values["payoff"]["source"] == "predicted"
    assert values["modules"]["layer"]["gradients"]["relative_error"] == 0.25
    assert values["by_message"][0]["name"] == "layer" and values["notes"] == ["a note"]
    assert values["legend"] == report.legend() and values["events"] == {"loss: none": 1}
    text = str(report)
    assert text.splitlines()[-1] != "" and "a note" in text and "guard: loss: none 1x" in text


def test_what_was_not_compressed_is_the_first_line_of_text_and_rich(
    capsys: pytest.CaptureFixture[str],
) -> None:
    refused = make_row("none", reason="int8 does not take float64", refused=True)
    sentence = describe_uncompressed([refused])
    assert sentence == (
        "nothing is compressed although asked for: gradients of all 2 parameters (int8 does not take float64)"
    )
    assert describe_uncompressed([refused, make_row(names=("c", "d", "e"), numel=6000)], "layers") == (
        "not compressed although asked for: gradients of 2 of 5 layers with 25% of the elements, a … b "
        "(int8 does not take float64)"
    )
    assert describe_uncompressed([make_row()]) == ""
    # A layer may send some of its sums uncompressed.
    assert describe_uncompressed([replace(refused, calls=1), make_row()], "layers") == (
        "not compressed although asked for: gradients of all 2 layers in 1 of 4 calls (int8 does not take float64)"
    )
    report = make_report(refused, uncompressed=sentence)
    assert str(report).splitlines()[0] == sentence
    rich = pytest.importorskip("rich")
    rich.print(report)
    assert capsys.readouterr().out.startswith("nothing is compressed")


class _State(Reporting):
    def __init__(self, rank: int) -> None:
        self.rank = rank

    def report(self) -> Report:
        return make_report(make_row(), rank=self.rank, world_size=2)


def test_the_first_rank_prints_unless_all_are_asked(capsys: pytest.CaptureFixture[str]) -> None:
    _State(1).print_report()
    assert capsys.readouterr().out == ""
    _State(0).print_report()
    assert capsys.readouterr().out == f"{_State(0).report()}\n"
    _State(1).print_report(all_ranks=True)
    assert "rank 1 of 2" in capsys.readouterr().out


def test_steps_are_those_of_this_run() -> None:
    report = make_report(make_row(), steps=3, earlier_steps=100)
    assert "this run (after 100 steps of earlier runs): 3 steps, 6 messages" in str(report)


def test_calls_of_a_row_are_the_messages_that_carried_one_of_its_parameters() -> None:
    totals = {
        "a": ParameterTotals(numel=8, codec="int8", messages={1: 10, 2: 5}),
        "b": ParameterTotals(numel=8, codec="int8", messages={1: 10}),
        "c": ParameterTotals(numel=4, codec="none", messages={2: 5}),
    }
    rows = {row.codec: row for row in group_rows(totals.items(), "differences of weights")}
    assert (rows["int8"].calls, rows["none"].calls) == (15, 5)
    assert rows["int8"].what == "differences of weights"


def test_modules_with_the_same_codec_form_one_row_with_the_largest_error() -> None:
    traffic = [
        (
            name,
            Traffic(codec="int8", what="gradients", dtype="float32", numel=10, calls=2, relative_error=error),
        )
        for name, error in (("a", 0.1), ("b", 0.3), ("c", None))
    ]
    other = Traffic(codec="none", what="parameters", reason="exclude: c", calls=1)
    first, second = group_traffic([*traffic, ("c", other)])
    assert (first.names, first.numel, first.calls, first.relative_error) == (("a", "b", "c"), 30, 6, 0.3)
    assert (second.what, second.reason, second.refused) == ("parameters", "exclude: c", False)


def test_traffic_prints_as_one_readable_line() -> None:
    traffic = Traffic(codec="int8", calls=2, wire_bytes=1024, plain_bytes=4096, relative_error=0.005)
    assert str(traffic) == "2 calls in int8: sent 1.0 KiB instead of 4.0 KiB, relative error 5.0e-03"


def test_metrics_have_labels_for_what_was_communicated() -> None:
    rows = (make_row(), make_row(what="parameters", wire_bytes=7, relative_error=None))
    metrics = {(m.name, m.labels.get("what")): m.value for m in make_report(*rows, events={"x": 2}).metrics()}
    assert metrics["dtcomm_wire_bytes_total", "gradients"] == 1000
    assert metrics["dtcomm_wire_bytes_total", "parameters"] == 7
    assert metrics["dtcomm_guard_events_total", None] == 2
    assert ("dtcomm_relative_error", "parameters") not in metrics


@pytest.mark.parametrize(
    ("ready", "durations", "backward", "expected"),
    [
        ([0.0, 5.0], [2.0, 3.0], 8.0, 0.0),
        ([2.0, 5.0], [4.0, 3.0], 5.0, 4.0),
        ([5.0, 1.0], [1.0, 1.0], 5.0, 1.0),
    ],
)
def test_exposed_time_is_what_remains_after_backward(
    ready: list[float], durations: list[float], backward: float, expected: float
) -> None:
    assert exposed_ms(ready, durations, backward) == expected
