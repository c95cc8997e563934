"""Which build of the native modules the tests run against."""

from __future__ import annotations

import importlib.util
import os
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
    assert importlib.util.find_spec("dtcomm._cuda") is not None
