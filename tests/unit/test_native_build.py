"""Which build of the native modules the tests run against."""

from __future__ import annotations

import importlib.util
import os
import platform
from pathlib import Path

import pytest

import dtcomm
from dtcomm import _C


def test_modules_come_from_the_build_that_was_asked_for() -> None:
    expected = os.environ.get("DTCOMM_NATIVE_DIR", Path(dtcomm.__file__).parent)
    assert Path(_C.__file__).parent == Path(expected)


def test_build_info_describes_the_build() -> None:
    info = _C.build_info()
    assert set(info) == {"compiler", "type", "flags", "sanitize", "processor"}
    assert "-ffp-contract=off" in info["flags"].split()
    sanitized = "libasan" in os.environ.get("LD_PRELOAD", "")
    assert bool(info["sanitize"]) == sanitized


@pytest.mark.skipif(os.environ.get("DTCOMM_CUDA") != "1", reason="built only with DTCOMM_CUDA=1 (make cuda)")
@pytest.mark.skipif("DTCOMM_NATIVE_DIR" in os.environ, reason="sanitizer builds leave _cuda out")
def test_cuda_module_is_built_where_it_is_asked_for() -> None:
    spec = importlib.util.find_spec("dtcomm._cuda")
    assert spec is not None and spec.origin is not None
    assert Path(spec.origin).stat().st_size < 25e6, "small enough for wheels"


def test_a_builder_of_wheels_without_nvcc_says_that_none_has_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = Path(dtcomm.__file__).parents[1] / "wheels" / "build.py"
    spec = importlib.util.spec_from_file_location("wheels_build", script)
    assert spec is not None and spec.loader is not None
    build = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(build)
    monkeypatch.setattr(build, "nvcc_path", lambda: None)
    wheel = tmp_path / f"dtcomm-1-cp311-cp311-manylinux_2_28_{platform.machine()}.whl"
    assert build.build_with_kernels(tmp_path, [wheel], {"cp311": "python"}, tmp_path, tmp_path) == []
    assert "no wheel has CUDA kernels (_cuda): nvcc was not found" in capsys.readouterr().err
