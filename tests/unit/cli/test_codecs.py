"""`dtcomm codecs`: the table, the measurements in it, and refused arguments."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dtcomm.cli import codecs as codecs_command
from dtcomm.cli.codecs import Sample, distributions, measure_error
from dtcomm.cli.perf import args as perf_args
from dtcomm.codecs import codec, names
from dtcomm.codecs import spec as registry
from dtcomm.codecs.spec import CODECS
from dtcomm.kernels import available, use

FAST = ("--no-speed", "--numel", "4096")


def output_of(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert codecs_command.main([*FAST, *argv]) == 0
    return capsys.readouterr().out


def rows_by_spec(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, dict[str, Any]]:
    """Return the rows of the JSON by spec."""
    return {row["codec"]: row for row in json.loads(output_of(capsys, "--json", *argv))["codecs"]}


def test_every_codec_of_the_registry_has_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    rows = rows_by_spec(capsys)
    assert {*names(), "lossless"} <= set(rows)
    for spec, row in rows.items():
        layout = codec(spec)
        assert row["family"] == layout.name
        if not layout.variable_length:
            assert row["bits_per_element"] * layout.granularity == 8 * layout.wire_bytes(layout.granularity)
        assert list(row["errors"]) == ["Gaussian", "Laplace", "Student-t"]
        assert all(error["relative_l2"] is not None for error in row["errors"].values())


def test_every_codec_is_in_one_tier_and_five_variants_are_in_the_first(
    capsys: pytest.CaptureFixture[str],
) -> None:
    first, *others = registry.TIERS.values()
    assert first == ("none", "bf16:round=stochastic", "int8", "int4", "fp8_e4m3")
    assert all(str(codec(spec)) == spec for spec in first)
    named = [name for name in [*first, *(name for names in others for name in names)] if ":" not in name]
    assert sorted(named) == sorted([*CODECS, *registry.VARIABLE_LENGTH])
    rows = list(rows_by_spec(capsys).values())
    assert [row["codec"] for row in rows[:5]] == list(first)
    assert [title for title, _ in itertools.groupby(row["tier"] for row in rows)] == list(registry.TIERS)
    assert (
        registry.tier("int8:block=64") == "for special cases"
        and registry.tier("sign:block=64") == "for research"
    )
    table = output_of(capsys)
    assert [line.strip() for line in table.splitlines() if line.strip() in registry.TIERS] == list(
        registry.TIERS
    )


def test_the_size_of_lossless_is_that_of_a_gaussian_tensor(capsys: pytest.CaptureFixture[str]) -> None:
    """An exponent's code takes 3 bits instead of 8; few exponents are stored apart."""
    argv = ["--codec", "lossless", "--numel", "64", "--size", "64K", "--json"]
    assert codecs_command.main(argv) == 0
    (row,) = json.loads(capsys.readouterr().out)["codecs"]
    assert 27 < row["bits_per_element"] < 27.5 and row["encode_gbps"] > 0 and row["decode_gbps"] > 0
    assert all(error["relative_l2"] == 0 for error in row["errors"].values())


def test_codecs_of_an_imported_module_have_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(registry, "REGISTERED", {})
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "codecs_of_a_test.py").write_text(
        "from dtcomm import codecs\n"
        "from tests.support.python_codecs import bf16_bytes, decode_bf16, encode_bf16\n"
        "codecs.custom('mine', encode_bf16, decode_bf16, bf16_bytes)\n"
    )
    rows = rows_by_spec(capsys, "--import", "codecs_of_a_test", "--codec", "mine", "--codec", "bf16")
    mine, native = rows["mine"], rows["bf16"]
    assert mine["errors"] == native["errors"] and mine["bits_per_element"] == 16
    assert codec("mine") in codecs_command.default_codecs()
    options = perf_args.parse(["all_reduce", "--import", "codecs_of_a_test", "--codec", "mine,int8"])
    assert [variant.codec for variant in options.variants] == ["mine", "int8"]


def test_every_option_but_rare_ones_is_shown() -> None:
    assert set(codecs_command.VARIANTS) <= set(CODECS)
    shown_options = {option for layout in codecs_command.default_codecs() for option in layout.options()}
    assert {option for entry in CODECS.values() for option in entry.options()} - shown_options <= {
        "scale",
        "scope",
    }


def test_the_printed_table_has_a_row_for_each_codec(capsys: pytest.CaptureFixture[str]) -> None:
    lines = output_of(capsys, "--codec", "fp16", "--codec", "int8", "--also", "int8:block=64").splitlines()
    rows = [line.split() for line in lines if line.strip()[:4] in ("fp16", "int8")]
    assert [row[:3] for row in rows] == [
        ["fp16", "16", "32"],
        ["int8", "8.5", "32"],
        ["int8:block=64", "8.25", "64"],
    ]
    assert all(len(row) == 7 for row in rows)


def test_speeds_are_measured_with_an_available_kernel(capsys: pytest.CaptureFixture[str]) -> None:
    assert codecs_command.main(["--codec", "int8", "--numel", "64", "--size", "64K", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["speed_bytes"] == 64 << 10 and document["kernel"] in available()
    (row,) = document["codecs"]
    assert row["encode_gbps"] > 0 and row["decode_gbps"] > 0


@pytest.mark.parametrize("kernel", available())
def test_every_kernel_gives_the_same_errors(kernel: str, capsys: pytest.CaptureFixture[str]) -> None:
    specs = ("--codec", "int8", "--codec", "int8:round=stochastic,symmetric=false")
    with use(kernel):
        rows = rows_by_spec(capsys, *specs)
    with use("reference"):
        assert rows_by_spec(capsys, *specs) == rows


def test_errors_of_a_tensor_computed_by_hand() -> None:
    """The steps of int8 for [127, 0.25, ...] are one, so that only the 0.25 is lost."""
    x = torch.zeros(96)
    x[0], x[1] = 127.0, 0.25
    x[32:64] = -127.0
    energy, others = 127.0**2 + 0.0625, 32 * 127.0**2
    first = measure_error(codec("int8"), Sample(name="s", tensors={"a": x}))
    assert first.relative_l2 == pytest.approx(0.25 / math.sqrt(energy + others))
    assert first.worst_block == pytest.approx(0.25 / math.sqrt(energy))
    second = measure_error(codec("int8"), Sample(name="s", tensors={"b": x[32:]}))
    assert second.relative_l2 == 0 and second.worst_block == 0
    both = measure_error(codec("int8"), Sample(name="s", tensors={"a": x, "b": x[32:]}))
    assert both.relative_l2 == pytest.approx(0.25 / math.sqrt(energy + 2 * others))
    assert both.worst_block == first.worst_block
    assert both.numel == 160 and both.wire_bytes == first.wire_bytes + second.wire_bytes


def test_undefined_errors_are_none() -> None:
    zeros = measure_error(codec("int8"), Sample(name="s", tensors={"x": torch.zeros(50)}))
    assert (zeros.relative_l2, zeros.worst_block) == (None, 0)
    nan = torch.tensor([1.0, math.nan])
    bad = measure_error(codec("int8"), Sample(name="s", tensors={"x": nan}))
    assert (bad.relative_l2, bad.worst_block) == (None, None)
    vanished = measure_error(codec("fp16"), Sample(name="s", tensors={"x": torch.full((9,), 1e-12)}))
    assert (vanished.relative_l2, vanished.worst_block) == (1, 1)


def test_the_samples_are_reproducible() -> None:
    """Their scale is one: variances are 1, 2 and (in the limit) 3, and the kurtosis of Laplace is 6."""
    first, second = distributions(1 << 16), distributions(1 << 16)
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a.tensors[a.name], b.tensors[b.name])
    x = {sample.name: sample.tensors[sample.name].double() for sample in first}
    assert x["Gaussian"].var() == pytest.approx(1, rel=0.03)
    assert x["Laplace"].var() == pytest.approx(2, rel=0.03)
    assert (x["Laplace"] ** 4).mean() / 4 == pytest.approx(6, rel=0.1)
    assert x["Student-t"].abs().max() > 30


@pytest.fixture
def tensor_files(tmp_path: Path) -> Path:
    generator = torch.Generator().manual_seed(0)
    state = {
        "layer.weight": torch.randn(8, 100, generator=generator),
        "layer.bias": torch.randn(7, generator=generator, dtype=torch.float64),
        "step": torch.tensor(3),
        "momenta": [torch.randn(33, generator=generator).half()],
        "empty": torch.empty(0),
    }
    torch.save(state, tmp_path / "state.pt")
    torch.save(torch.randn(100, generator=generator).t(), tmp_path / "one.pt")
    np.save(tmp_path / "x.npy", np.asfortranarray(np.linspace(-1, 1, 60).reshape(6, 10)))
    np.save(tmp_path / "whole.npy", np.arange(5))
    np.save(tmp_path / "objects.npy", np.array([{}], dtype=object), allow_pickle=True)
    (tmp_path / "text.pt").write_text("this is no tensor")
    torch.save({"f": Path("x")}, tmp_path / "code.pt")
    return tmp_path


def test_tensors_of_files_are_measured(tensor_files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = tensor_files / "state.pt"
    rows = rows_by_spec(capsys, "--tensor", str(state), "--codec", "int8")
    assert rows["int8"]["errors"]["state.pt"]["numel"] == 840
    wire = sum(codec("int8").wire_bytes(n) for n in (800, 7, 33))
    assert rows["int8"]["errors"]["state.pt"]["wire_bytes"] == wire
    assert "state.pt" in output_of(capsys, "--tensor", str(state), "--codec", "int8")

    line = f"--tensor {tensor_files}/one.pt --tensor {tensor_files}/x.npy --codec bf16"
    rows = rows_by_spec(capsys, *line.split())
    assert [error["numel"] for error in rows["bf16"]["errors"].values()][3:] == [100, 60]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("missing.pt", "no such file"),
        ("text.pt", "cannot be read"),
        ("code.pt", "holds other objects than tensors"),
        ("objects.npy", "cannot be read"),
        ("whole.npy", "no floating-point tensor"),
    ],
)
def test_unreadable_files_are_refused(
    tensor_files: Path, name: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert codecs_command.main([*FAST, "--tensor", str(tensor_files / name)]) == 2
    errors = capsys.readouterr().err
    assert name in errors and message in errors and "Traceback" not in errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--codec int99", "int99"),
        ("--also int4:block=128,spikes=1,int99", "unknown codec 'int99'"),
        ("--also int8:block=33", "33"),
        ("--size many", "many"),
        ("--size 2", "at least 4 bytes"),
        ("--numel 0", "at least 1"),
        ("--json /nowhere/x.json", "no folder /nowhere"),
    ],
)
def test_wrong_arguments_are_refused(
    arguments: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        codecs_command.main(arguments.split())
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_json_is_written_to_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = tmp_path / "c.json"
    assert "int8" in output_of(capsys, "--json", str(data))
    assert {row["codec"] for row in json.loads(data.read_text())["codecs"]} >= set(names())
