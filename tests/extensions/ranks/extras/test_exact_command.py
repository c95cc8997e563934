"""``dtcomm exact check``: the expected bits are right, our sums have them, and sums that round more often do not."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch

from dtcomm.cli.main import main
from dtcomm.extensions.extras import exact_command


@pytest.fixture(scope="module")
def cases() -> exact_command.Cases:
    return exact_command.make()


def numbers(cases: exact_command.Cases, name: str) -> torch.Tensor:
    return torch.from_numpy(cases[name].copy()).view(exact_command.FORMATS[name[:4]].dtype)


def test_expected_bits_are_the_nearest_numbers(cases: exact_command.Cases) -> None:
    assert exact_command.digest(cases) == exact_command.DIGEST
    ties = 0
    for name in ("fp32.wide.8", "fp32.ties.3", "bf16.cancelling.3", "fp16.subnormal.64", "fp32.subnormal.3"):
        terms = numbers(cases, f"{name}.inputs").double().t().tolist()
        for op, divisor in (("sum", 1), ("avg", len(terms[0]))):
            results = numbers(cases, f"{name}.{op}")
            kind = torch.int32 if results.dtype == torch.float32 else torch.int16
            low, high = (
                torch.nextafter(results, torch.full_like(results, limit)) for limit in (-torch.inf, torch.inf)
            )
            for column, result, *around in zip(terms, results, low, high, strict=True):
                exact = sum(map(Fraction, column), Fraction(0)) / divisor
                if result.isinf():
                    assert abs(exact) > torch.finfo(results.dtype).max
                    continue
                error = abs(Fraction(float(result)) - exact)
                for other in around:
                    if other.isfinite():
                        distance = abs(Fraction(float(other)) - exact)
                        even = int(result.view(kind)) % 2 == 0
                        assert error < distance or (error == distance and even)
                        ties += error == distance
    assert ties > 100


def test_our_sums_have_these_bits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "sums.npz")
    assert main(["exact", "check", "--make", path, "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)[path]
    assert figures["sha256"] == exact_command.DIGEST and not figures["wrong"] and figures["sums"] > 400
    arrays = {
        key: array[..., :40] for key, array in exact_command.read(Path(path)).items() if ".wide.8." in key
    }
    arrays["fp32.wide.8.avg"] = arrays["fp32.wide.8.avg"] ^ (np.arange(40) == 7)
    np.savez(path, **arrays)
    assert main(["exact", "check", path]) == 1
    output = capsys.readouterr().out
    assert "other cases" in output and "fp32.wide.8 avg on 8 ranks, ring: 1 wrong elements" in output
    assert "fp32.wide.8 sum" not in output and "bf16" not in output


def test_sums_in_floating_point_do_not(cases: exact_command.Cases) -> None:
    for kind in ("plain", "wide", "subnormal", "outliers", "cancelling", "ties"):
        found = set()
        for terms in exact_command.TERMS:
            name = f"fp32.{kind}.{terms}"
            inputs = numbers(cases, f"{name}.inputs")
            for dtype in (torch.float32, torch.float64):
                total = inputs.to(dtype).sum(0).float()
                if not torch.equal(total, numbers(cases, f"{name}.sum")):
                    found.add(dtype)
        assert torch.float32 in found, kind
        # fp64 is wide enough for numbers of similar size.
        assert (torch.float64 in found) == (kind in ("wide", "cancelling", "ties")), kind


def test_files_that_are_not_cases(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "sums.npz"
    path.write_bytes(b"no archive")
    whole = {"fp32.plain.2.inputs": np.zeros((2, 3), np.uint32), "fp32.plain.2.sum": np.zeros(3, np.uint32)}
    for arrays, words in (
        (None, "cannot read"),
        ({}, "has no cases"),
        ({"fp8.plain.2.inputs": np.zeros((2, 3), np.uint32)}, "is not an array"),
        (whole, "is not complete"),
        ({**whole, "fp32.plain.2.avg": np.zeros(4, np.uint32)}, "is not complete"),
    ):
        if arrays is not None:
            np.savez(path, **arrays)
        assert main(["exact", "check", str(path)]) == 1
        assert words in capsys.readouterr().err
