from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest
import torch

from dtcomm.cli import demo as demo_command
from dtcomm.cli.demo import train as demo
from dtcomm.cli.demo.train import Settings
from dtcomm.codecs import codec


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write thirty modules of one letter each, with tabs and non-ASCII characters, and a test."""
    root = tmp_path_factory.mktemp("library")
    (root / "test").mkdir()
    (root / "test" / "test_it.py").write_text("!" * 5000)
    for number in range(30):
        letter = chr(ord("a") + number % 26)
        (root / f"module{number}.py").write_text(f"\t{letter * 5000}ß字\n", encoding="utf-8")
    return root


def test_corpus_is_split_by_file_deterministically(library: Path) -> None:
    corpus = demo.load_corpus(library)
    assert corpus.files == 30
    assert corpus.training.numel() + corpus.held_out.numel() == 30 * (4 + 5000 + 3)
    assert torch.equal(corpus.training, demo.load_corpus(library).training)
    assert demo.ALPHABET.index("!") not in corpus.training.unique().tolist()
    assert int(corpus.training.max()) == demo.VOCABULARY - 1  # the symbol of all characters outside ASCII
    held_out = {int(symbol) for symbol in corpus.held_out.unique()}
    letters = {demo.ALPHABET.index(chr(ord("a") + number)) for number in range(4, 26)}
    assert not held_out & letters & {int(symbol) for symbol in corpus.training.unique()}


def test_too_little_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text("pass\n")
    with pytest.raises(ValueError, match="too little"):
        demo.load_corpus(tmp_path)


def test_batches_depend_only_on_seed_step_and_rank(library: Path) -> None:
    corpus = demo.load_corpus(library)

    def batch_of(seed: int, step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        return demo.training_batch(corpus, seed=seed, step=step, rank=rank, size=8, length=500)

    inputs, targets = batch_of(0, 1, 0)
    assert inputs.shape == targets.shape == (8, 500)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    torch.manual_seed(99)
    assert torch.equal(inputs, batch_of(0, 1, 0)[0])
    for arguments in ((1, 1, 0), (0, 2, 0), (0, 1, 1)):
        assert not torch.equal(inputs, batch_of(*arguments)[0])


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_ranks_divide_the_held_out_windows(library: Path, ranks: int) -> None:
    corpus = demo.load_corpus(library)
    shares = [
        demo.held_out_batches(corpus, windows=7, size=2, length=50, rank=rank, ranks=ranks)
        for rank in range(ranks)
    ]
    assert sum(inputs.shape[0] for share in shares for inputs, _ in share) == 7
    assert all(inputs.shape[0] <= 2 for share in shares for inputs, _ in share)


def test_outputs_do_not_depend_on_later_symbols() -> None:
    torch.manual_seed(0)
    model = demo.GPT(demo.ModelShape(vocabulary=11, context=16, layers=2, width=16, heads=2))
    symbols = torch.randint(11, (1, 16))
    changed = symbols.clone()
    changed[0, 9:] = (changed[0, 9:] + 1) % 11
    before, after = model(symbols), model(changed)
    assert torch.equal(before[:, :9], after[:, :9])
    assert not torch.equal(before[:, 9:], after[:, 9:])


@pytest.mark.parametrize(
    ("link", "text"),
    [
        ("1gbit,50us", "1 Gbit/s, 50 µs"),
        ("500mbit", "500 Mbit/s"),
        ("inside=400gbit;between=1gbit,2ms", "inside=400gbit;between=1gbit,2ms"),
    ],
)
def test_links_are_described_as_people_write_them(link: str, text: str) -> None:
    assert demo_command.describe_link(link) == text


@pytest.mark.slow
def test_demo_trains_and_writes_its_results(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # By default eight steps would be evaluated eight times, which takes far longer than training.
    monkeypatch.setattr(demo_command, "Settings", functools.partial(Settings, evaluations=2, windows=8))
    monkeypatch.setattr(demo, "STEPS_TO_VERIFY", 2)
    # A link as fast as the machine: its figures are as meaningless as those of a loaded machine, but the bits are not.
    flags = ["--steps", "8", "--codecs", "none,int8", "--link", "100gbit", "--out", str(tmp_path), "--json"]
    code = demo_command.main(flags)
    captured = capsys.readouterr()
    assert code == 0
    summary = json.loads((tmp_path / "demo.json").read_text())
    assert json.loads(captured.out) == summary
    plain, none, int8 = summary["runs"]
    assert [run["name"] for run in summary["runs"]] == ["plain DDP", "none", "int8"]
    # Two ranks add the same two numbers, in whatever order: the same run to the bit.
    assert none["losses"] == plain["losses"]
    assert len(int8["losses"]) == 8
    assert plain["bytes_per_step"] == plain["parameters"] * 4
    assert none["bytes_per_step"] == pytest.approx(plain["bytes_per_step"], rel=0.01)
    ratio = codec("int8").wire_bytes(1 << 20) / (4 << 20)
    assert int8["bytes_against_plain"] == pytest.approx(ratio, rel=0.05)
    assert int8["final_training_loss"] < int8["losses"][0] - 0.5
    assert all(run["step_ms"] > 0 for run in summary["runs"] + summary["runs_on_link"])
    assert summary["link"] == "100gbit"
    for here, there in zip(summary["runs"], summary["runs_on_link"], strict=True):
        assert there["losses"] == here["losses"]
        assert there["bytes_per_step"] == pytest.approx(here["bytes_per_step"], rel=0.01)
    assert "int8" in summary["report"] and summary["report"] in captured.err
    assert "ms with int8 instead of" in captured.err and "on this link" in captured.err
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")
    assert "held-out" in captured.err


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (["--steps", "0"], "--steps"),
        (["--codecs", "int99"], "int99"),
        (["--nproc", "0"], "--nproc"),
        (["--link", "9"], "'9' is not a rate"),
    ],
)
def test_invalid_arguments_are_named(
    arguments: list[str], names: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        demo_command.main(arguments)
    assert stop.value.code == 2
    assert names in capsys.readouterr().err
