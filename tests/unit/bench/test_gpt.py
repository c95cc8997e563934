"""The models of bench.tp_accuracy: trained once, then read from a file."""

import dataclasses
from pathlib import Path

import pytest
import torch

from bench import tp_accuracy
from bench.training import gpt, text, tp_page
from dtcomm.cli.demo import train as demo


def small_corpus() -> demo.Corpus:
    symbols = torch.arange(4000, dtype=torch.uint8) % 7
    return demo.Corpus(training=symbols, held_out=symbols[:1000], files=1)


SMALL = gpt.Setting(
    shape=demo.ModelShape(vocabulary=7, context=8, layers=1, width=16, heads=2),
    steps=60,
    samples=8,
    rate=1e-2,
    corpus=small_corpus,
)


def test_a_model_learns_once_and_is_read_afterwards(tmp_path: Path) -> None:
    lines: list[str] = []
    model, corpus = gpt.trained(SMALL, lines.append, tmp_path)
    loss = gpt.held_out_loss(model, corpus, windows=16)
    assert loss < 0.5  # the symbols follow each other in a circle; without training it is log 7
    assert lines and not model.training
    lines.clear()
    again, _ = gpt.trained(SMALL, lines.append, tmp_path)
    assert lines == []
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


def test_other_settings_have_weights_of_their_own(tmp_path: Path) -> None:
    gpt.trained(dataclasses.replace(SMALL, steps=1), lambda line: None, tmp_path)
    gpt.trained(dataclasses.replace(SMALL, steps=2), lambda line: None, tmp_path)
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("name", list(gpt.SETTINGS))
def test_every_model_has_a_result_file_and_layers_that_the_plan_names(name: str) -> None:
    model = demo.GPT(gpt.SETTINGS[name].shape)
    layers = {pattern.replace("*", "0") for pattern in gpt.PLAN}
    assert layers <= dict(model.named_modules()).keys()
    assert len(set(tp_page.RESULTS.values())) == len(gpt.SETTINGS) == len(tp_page.RESULTS)


def test_the_larger_model_is_that_of_the_workloads() -> None:
    assert gpt.SETTINGS["text"].shape == text.SHAPE and gpt.SETTINGS["text"].steps == text.TEXT.steps


def test_a_calibrated_plan_is_measured_beside_one_codec_for_all_layers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Wide enough that the scales of a block do not make 2 bits as expensive as 8.
    shape = dataclasses.replace(SMALL.shape, width=32)
    monkeypatch.setattr(gpt, "BUILD", tmp_path)
    monkeypatch.setitem(gpt.SETTINGS, "gpt", dataclasses.replace(SMALL, shape=shape))
    path = tmp_path / "result.json"
    result = tp_accuracy.main(
        ["--codecs", "int8", "calibrated", "--windows", "16", "--ranks", "2", "--json", str(path)]
    )
    rows = {row["codec"]: row for row in result["rows"]}
    assert set(rows) == {"int8", "calibrated"} and 2 <= rows["calibrated"]["bits"] < 32
    assert rows["calibrated"]["less_than_bf16"] == pytest.approx(16 / rows["calibrated"]["bits"], abs=1e-3)
    assert any(line.split()[1] == "calibrated," for line in result["verdicts"])
