"""The report that all integrations share: columns, totals, legend, payoff, plain values, and who prints."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch

from dtcomm.compress.payoff import Payoff, StepPairs
from dtcomm.compress.report import COLUMNS, MESSAGE_COLUMNS, Report, describe_uncompressed
from dtcomm.compress.reporting import Reporting
from dtcomm.compress.traffic import ParameterTotals, Row, Traffic, group_rows, group_traffic, message_rows


def make_row(codec: str = "int8", **options: Any) -> Row:
    values: dict[str, Any] = {"codec": codec, "dtype": "float32", "reason": "", "names": ("a", "b")}
    counts = {"numel": 2000, "calls": 3, "wire_bytes": 1000, "plain_bytes": 4000, "relative_error": 0.005}
    return Row(**{**values, **counts, **options})


def make_report(*rows: Row, **options: Any) -> Report:
    values: dict[str, Any] = {"policy": "int8", "feedback": True, "steps": 3, "messages": 6, "rows": rows}
    values |= {key: sum(getattr(row, key) for row in rows) for key in ("wire_bytes", "plain_bytes")}
    return Report(**{**values, "seconds": 0.25, "residual_bytes": 8000, **options})


PAYOFF = Payoff(compressed_ms=2.0, uncompressed_ms=6.0, scope="a step")


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
    assert rest[1] == "this run: 3 steps, 6 messages"


def test_summary_is_six_lines_that_end_in_the_verdict() -> None:
    rows = (
        make_row(),
        make_row("none", names=("c",), numel=10, wire_bytes=40, plain_bytes=40, reason="policy: ndim<2"),
    )
    report = make_report(*rows, payoff=PAYOFF, events={"loss: warn": 1}, leaving_bytes=512)
    assert report.summary().splitlines() == [
        "dtcomm DDP: int8, feedback on, rank 0 of 1, 3 steps",
        "  sent        1.0 KiB instead of 3.9 KiB (3.9 times fewer), 512 B left this host, in 0.25 s of collectives",
        "  compressed  99.01% of the bytes; all but 1 tensors (ndim<2)",
        "  memory      7.8 KiB of residuals",
        "  errors      0.50% of gradients in int8; guard: loss: warn 1x",
        "  verdict     paid: 4 ms per step saved (2 ms of a step, 6 ms with codec none)",
    ]
    plain = make_report(make_row("none", wire_bytes=4000), residual_bytes=0)
    assert [line.split(maxsplit=1)[1] for line in plain.summary().splitlines()[3:]] == [
        "none",
        "not sampled",
        "nothing is compressed",
    ]
    assert make_report().summary().endswith("nothing was sent yet")


def test_legend_explains_each_column_and_takes_at_most_two_lines_of_the_text() -> None:
    traffic = Traffic(codec="int8", what="gradients", dtype="float32", calls=2, seconds=0.004)
    for messages, columns in (((), COLUMNS), (message_rows([("layer", traffic)]), MESSAGE_COLUMNS)):
        report = make_report(make_row("sign", relative_error=0.6), by_message=messages)
        assert all(f"{name}: {meaning}" in report.legend()[0] for name, meaning in columns.items())
        *_, verdict, first, second = str(report).splitlines()
        assert verdict.split(maxsplit=1) == ["verdict", report.unmeasured]
        assert first.startswith("rel. error: ") and second.startswith("rel. error 0.60 (sign)")
        assert max(map(len, (first, second))) <= 160
    assert "rel. error: " not in str(make_report())  # an empty report has no legend


@pytest.mark.parametrize(
    ("codec", "error", "feedback", "says"),
    [
        ("powersgd:rank=4", 0.86, True, "0.86 (powersgd:rank=4): one call sends a part with 51% of the norm"),
        ("powersgd:rank=4", 0.86, True, "the residuals keep the rest for later steps"),
        ("topk:ratio=0.01", 0.96, "ef21", "a part with 28% of the norm"),
        ("sign", 0.6, False, "without error feedback the rest is lost"),
    ],
)
def test_a_large_relative_error_is_explained(
    codec: str, error: float, feedback: bool | str, says: str
) -> None:
    report = make_report(make_row(codec, relative_error=error), make_row(), feedback=feedback)
    assert any(says in line for line in report.legend())
    assert not any("(int8)" in line for line in make_report(make_row()).legend())


@pytest.mark.parametrize(
    ("compressed", "uncompressed", "won", "pairs", "verdict"),
    [
        (1.0, 2.0, 0, 0, "paid"),
        (2.0, 1.0, 0, 0, "did not pay"),
        (1.0, 1.01, 0, 0, "made no difference"),
        (1.0, 2.0, 18, 20, "paid"),
        (2.0, 1.0, 2, 20, "did not pay"),
        (1.0, 2.0, 12, 20, "made no difference"),  # chance wins as often
        (1.0, 2.0, 2, 20, "made no difference"),  # medians and pairs contradict each other
        (1.0, 2.0, 3, 3, "made no difference"),  # too few
        (1.0, 1.01, 20, 20, "made no difference"),
    ],
)
def test_payoff_claims_only_what_was_measured(
    compressed: float, uncompressed: float, won: int, pairs: int, verdict: str
) -> None:
    measured = {"compressed_ms": compressed, "uncompressed_ms": uncompressed}
    payoff = Payoff(**measured, scope="a step", baseline="plain DDP", pairs=pairs, won=won)
    counted = f", faster in {won} of {pairs} pairs of steps" if pairs else ""
    gain = {
        "paid": f": {uncompressed - compressed:.3g} ms per step saved",
        "did not pay": ": 1 ms per step lost",
    }
    times = f" ({compressed:.3g} ms of a step, {uncompressed:.3g} ms with plain DDP{counted})"
    remedy = "" if verdict == "paid" else "; remove it"
    assert str(payoff) == f"{verdict}{gain.get(verdict, '')}{times}{remedy}"
    report = make_report(make_row(), payoff=payoff)
    assert str(payoff) in str(report) and report.unmeasured not in str(report)


def test_pairs_of_steps_take_turns_and_time_the_second_step_of_each() -> None:
    pairs = StepPairs(8, "a step", "plain DDP", list)
    steps, seconds = [], 9.0  # a step that is not timed takes long
    for step in range(60):
        changed = pairs.begin_step(step, 4, seconds)
        steps.append(pairs.compresses)
        seconds = 9.0 if changed else 1.0 if pairs.compresses else 3.0
    # After warm-up and three more.
    assert all(steps[:7]) and all(steps[39:]) and steps[7:39].count(True) == 16
    assert all(sum(steps[at : at + 4]) == 2 for at in range(7, 39, 4))
    payoff = pairs.payoff
    assert payoff is not None and (payoff.compressed_ms, payoff.uncompressed_ms) == (1000, 3000)
    assert (payoff.won, payoff.verdict) == (8, "paid")


def test_plain_values_have_everything_and_survive_json() -> None:
    traffic = Traffic(codec="int8", what="gradients", relative_error=torch.tensor(0.25))
    fields: dict[str, Any] = {"integration": "FSDP", "payoff": PAYOFF, "events": {"loss: uncompressed": 1}}
    fields |= {"modules": {"layer": {"gradients": traffic}}, "notes": ("a note",)}
    report = make_report(make_row(), by_message=message_rows([("layer", traffic)]), **fields)
    values = json.loads(report.to_json())
    assert values == report.to_dict()
    assert values["rows"][0]["names"] == ["a", "b"] and values["rows"][0]["saved_bytes"] == 3000
    assert values["payoff"]["verdict"] == "paid" and values["payoff"]["pairs"] == 0
    assert values["modules"]["layer"]["gradients"]["relative_error"] == 0.25
    assert values["by_message"][0]["name"] == "layer" and values["notes"] == ["a note"]
    assert values["legend"] == report.legend() and values["events"] == {"loss: uncompressed": 1}
    text = str(report)
    assert text.splitlines()[-1] != "" and "a note" in text and "guard: loss: uncompressed 1x" in text


def test_what_was_not_compressed_is_the_first_line() -> None:
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


class _State(Reporting):
    def __init__(self, rank: int) -> None:
        self.rank = rank

    def detach(self) -> None:
        """Do nothing."""

    def report(self) -> Report:
        return make_report(make_row(), rank=self.rank, world_size=2)


def test_the_first_rank_prints_unless_all_are_asked(capsys: pytest.CaptureFixture[str]) -> None:
    _State(1).print_report()
    assert capsys.readouterr().out == ""
    _State(0).print_report()
    assert capsys.readouterr().out == f"{_State(0).report().summary()}\n"
    _State(0).print_report(verbose=True)
    assert capsys.readouterr().out == f"{_State(0).report()}\n"
    _State(1).print_report(all_ranks=True)
    assert "rank 1 of 2" in capsys.readouterr().out


def test_steps_are_those_of_this_run() -> None:
    report = make_report(make_row(), steps=3, earlier_steps=100)
    assert "this run after 100 steps of earlier runs: 3 steps, 6 messages" in str(report)


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
    counts: dict[str, Any] = {"dtype": "float32", "numel": 10, "calls": 2}
    traffic = [
        (name, Traffic(codec="int8", what="gradients", relative_error=error, **counts))
        for name, error in (("a", 0.1), ("b", 0.3), ("c", None))
    ]
    other = Traffic(codec="none", what="parameters", reason="exclude: c", calls=1)
    first, second = group_traffic([*traffic, ("c", other)])
    assert (first.names, first.numel, first.calls, first.relative_error) == (("a", "b", "c"), 30, 6, 0.3)
    assert (second.what, second.reason, second.refused) == ("parameters", "exclude: c", False)


def test_traffic_prints_as_one_readable_line() -> None:
    traffic = Traffic(codec="int8", calls=2, wire_bytes=1024, plain_bytes=4096, relative_error=0.005)
    assert str(traffic) == "2 calls in int8: sent 1.0 KiB instead of 4.0 KiB, relative error 5.0e-03"


def test_metrics_have_labels_for_what_was_communicated_that_stay_from_step_to_step() -> None:
    rows = (make_row(), make_row(what="parameters", wire_bytes=7, relative_error=None), make_row("none"))
    traffic = [
        ("bucket 0", Traffic(codec=spec, what="gradients", calls=2, seconds=0.002, relative_error=error))
        for spec, error in (("int8", 0.5), ("none", None))
    ]
    report = make_report(*rows, events={"x": 2}, by_message=message_rows(traffic))
    metrics = {(m.name, *m.labels.values()): m.value for m in report.metrics()}
    assert len(metrics) == len(report.metrics())
    assert metrics["dtcomm_wire_bytes_total", "gradients"] == 2000
    assert metrics["dtcomm_wire_bytes_total", "parameters"] == 7
    assert metrics["dtcomm_calls_total", "gradients"] == 4  # collectives, of which each carries several rows
    assert metrics["dtcomm_guard_events_total", "x"] == 2
    assert metrics["dtcomm_relative_error", "gradients", "int8", "float32"] == 0.005
    assert metrics["dtcomm_message_seconds", "bucket 0", "gradients"] == 0.001
    assert metrics["dtcomm_message_relative_error", "bucket 0", "gradients"] == 0.5
    assert not any(name[0] == "dtcomm_relative_error" and "none" in name for name in metrics)
