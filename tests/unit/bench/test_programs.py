"""The programs of bench: common options, and the list of cases of a GPU, which needs none."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch

from bench import gpu
from bench.common import harness

PROGRAMS = (
    "accuracy",
    "collectives",
    "ddp",
    "exact",
    "gpu",
    "kernels",
    "links",
    "parallel",
    "quality",
    "threads",
)
README = Path(gpu.__file__).with_name("README.md")


@pytest.mark.parametrize("name", PROGRAMS)
def test_each_program_has_the_common_options(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        importlib.import_module(f"bench.{name}").main(["--help"])
    text = capsys.readouterr().out
    assert stopped.value.code == 0
    assert all(option in text for option in ("--repeat N", "--quick", "--json FILE"))
    assert f"python -m bench.{name} " in text
    assert f"`python -m bench.{name}`" in README.read_text(encoding="utf-8")


def test_a_quick_run_has_two_rounds() -> None:
    assert harness.parse(harness.parser(""), ["--quick"]).repeat == 2
    with pytest.raises(SystemExit):
        harness.parse(harness.parser(""), ["--repeat", "0"])


def test_rows_have_median_range_and_ratio(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    results = harness.Results(harness.parse(harness.parser(""), ["--json", str(path)]))
    results.add("title", {"bytes": 4}, {"peer": [2.0, 4.0, 6.0], "own": [1.0, 4.0, 2.0]})
    own = results.rows[1]
    assert own["median_us"] == 2e6 and own["range_us"] == [1e6, 4e6] and own["against"] == "peer"
    assert own["ratio"] == 2 and own["ratio_range"] == [1, 3]
    assert results.finish() == 0 and '"commit"' in path.read_text(encoding="utf-8")
    results.failed.append("other bits")
    assert results.finish() == 1


def test_the_cases_of_a_gpu_are_listed_without_one() -> None:
    cases = gpu.cases(gpu.make_parser().parse_args([]))
    assert [case.codec for case in cases[:3]] == list(gpu.FUSED[:3])
    assert {case.what for case in cases} == {"two_shot", "one_shot", "kernels"}
    kernels = [case for case in cases if case.what == "kernels"]
    assert {case.codec for case in kernels} == {*gpu.KERNELS, ""}
    assert sorted({case.size for case in kernels}) == [64 << 20, 1 << 30]
    assert any(case.dtype == torch.bfloat16 for case in cases)
    assert len(set(cases)) == len(cases)


def test_chosen_parts_and_codecs_limit_the_cases_of_a_gpu() -> None:
    options = gpu.make_parser().parse_args(["--parts", "kernels", "--codecs", "int4", "--mib", "1"])
    assert [(case.part, case.codec) for case in gpu.cases(options)] == [("kernels", "int4"), ("kernels", "")]
