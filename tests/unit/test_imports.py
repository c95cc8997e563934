"""Every file follows the import rules, and the checkers report planted violations."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import import_rules, structure

ROOT = Path(__file__).parents[2]
PYTHON = import_rules.python_files(ROOT)
CXX = import_rules.cxx_files(ROOT)
HEADERS = frozenset(CXX)


@pytest.mark.parametrize("path", PYTHON)
def test_python_files_follow_the_import_rules(path: str) -> None:
    violations = import_rules.check_python(path, (ROOT / path).read_text())
    assert not violations, "\n".join(violations)


def test_only_tests_of_extensions_import_extensions() -> None:
    files = {path.relative_to(ROOT).as_posix(): path.read_text() for path in structure.python_files("tests")}
    violations = [line for path, text in files.items() for line in import_rules.check_test(path, text)]
    assert not violations, "\n".join(violations)
    planted = "def f():\n    from dtcomm.extensions.jobs import hardware\n"
    assert len(import_rules.check_test("tests/unit/test_planted.py", planted)) == 1
    assert (
        len(import_rules.check_test("tests/unit/test_planted.py", "from tests.extensions import unit")) == 1
    )
    assert import_rules.check_test("tests/extensions/unit/test_planted.py", planted) == []


@pytest.mark.parametrize("path", CXX)
def test_cxx_files_follow_the_include_rules(path: str) -> None:
    violations = import_rules.check_cxx(path, (ROOT / "csrc" / path).read_text(), HEADERS)
    assert not violations, "\n".join(violations)


def test_every_file_is_covered() -> None:
    assert "dtcomm/__init__.py" in PYTHON and len(PYTHON) > 10
    assert "core/types.h" in CXX and len(CXX) > 5
    assert {import_rules.part_of(path) for path in PYTHON} <= set(import_rules.PYTHON_RULES)
    assert {path.split("/")[0] for path in CXX} <= set(import_rules.CXX_RULES)


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("dtcomm/schedule/ir.py", "import torch"),
        ("dtcomm/schedule/ir.py", "def f():\n    import numpy as np"),
        ("dtcomm/schedule/ir.py", "from dtcomm.algorithms import ring"),
        ("dtcomm/schedule/ir.py", "from ..algorithms import ring"),
        ("dtcomm/algorithms/ring.py", "from dtcomm import codecs"),
        ("dtcomm/codecs/base.py", "from dtcomm.kernels import ops"),
        ("dtcomm/codecs/base.py", "from .. import kernels"),
        ("dtcomm/kernels/ops.py", "import dtcomm.runtime.native"),
        ("dtcomm/kernels/ops.py", "import importlib\nimportlib.import_module('dtcomm.runtime')"),
        ("dtcomm/kernels/ops.py", "import importlib\nimportlib.import_module(name)"),
        ("dtcomm/runtime/native/__init__.py", "from dtcomm.algorithms import build"),
        ("dtcomm/work/handles.py", "from dtcomm.runtime.types import Buffers"),
        ("dtcomm/collectives.py", "from dtcomm.compress import feedback"),
        ("dtcomm/collectives.py", "from dtcomm import _C"),
        ("dtcomm/ddp.py", "from dtcomm.runtime.communicator import Communicator"),
        ("dtcomm/ddp.py", "import rich"),
        ("dtcomm/ddp.py", "import dtcomm"),
        ("dtcomm/ddp.py", "from dtcomm import all_reduce"),
        ("dtcomm/cli/perf/__init__.py", "import pandas"),
        ("dtcomm/errors.py", "from dtcomm.env import KERNEL"),
        ("dtcomm/env.py", "import torch"),
        ("dtcomm/__init__.py", "import rich"),
        ("dtcomm/tp/layers.py", "from dtcomm.extensions import extras"),
        ("dtcomm/cli/main.py", "from dtcomm.extensions.elastic import command"),
        ("dtcomm/launch/worker.py", "import importlib\nimportlib.import_module('dtcomm.extensions.jobs')"),
        ("dtcomm/newcomer/file.py", ""),
        ("dtcomm/newcomer.py", ""),
    ],
)
def test_planted_python_violations_are_reported(path: str, text: str) -> None:
    assert len(import_rules.check_python(path, text)) == 1


@pytest.mark.parametrize(
    ("path", "text"),
    [
        (
            "dtcomm/schedule/ir.py",
            "import dataclasses\nfrom . import text\nfrom dtcomm.errors import ScheduleError",
        ),
        ("dtcomm/algorithms/ring.py", "from ..schedule.ir import Schedule"),
        ("dtcomm/kernels/cpu.py", "from dtcomm import _C\nfrom dtcomm import env"),
        ("dtcomm/kernels/triton_epilogue.py", "def f():\n    import triton"),
        ("dtcomm/collectives.py", "from dtcomm.runtime.communicator import X\nimport torch.distributed"),
        ("dtcomm/fsdp/collectives.py", "from dtcomm.work import Work"),
        (
            "dtcomm/cli/main.py",
            "import importlib\nimportlib.import_module(name)\nfrom dtcomm import __version__",
        ),
        ("dtcomm/launch/worker.py", "def f():\n    import dtcomm"),
        (
            "dtcomm/cli/demo/__init__.py",
            "import matplotlib.pyplot\nfrom dtcomm.launch.ranks import run_ranks",
        ),
    ],
)
def test_allowed_python_imports_are_accepted(path: str, text: str) -> None:
    assert import_rules.check_python(path, text) == []


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("core/x.h", '#include "codec/codec.h"'),
        ("core/x.h", "#include <unistd.h>"),
        ("codec/x.h", "#include <cuda_fp16.h>"),
        ("codec/x.h", '  #  include "cpu/kernels.h"'),
        ("codec/x.h", '#include "codec.h"'),
        ("codec/x.h", "#include <cpu/kernels.h>"),
        ("codec/x.h", "#include CODEC_HEADER"),
        ("cpu/x.cpp", '#include "engine/engine.h"'),
        ("cpu/x.cpp", "#include <torch/extension.h>"),
        ("cuda/x.cu", "#include <c10/cuda/CUDAStream.h>"),
        ("cuda/x.cu", '#include "cpu/source/combine.h"'),
        ("cuda/x.cu", "#include <immintrin.h>"),
        ("engine/x.cpp", '#include "cpu/other.h"'),
        ("engine/x.cpp", "#include <pybind11/pybind11.h>"),
        ("engine/x.cpp", "#include <Python.h>"),
        ("engine/x.cpp", "#include <cuda_runtime.h>"),
        ("engine/x.cpp", '#include "../python/bindings.h"'),
        ("python/x.cpp", "#include <cuda_runtime_api.h>"),
        ("python/x.cpp", "#include <ATen/ATen.h>"),
        ("tests/x.cpp", '#include "python/bindings.h"'),
        ("newcomer/x.cpp", ""),
    ],
)
def test_planted_cxx_violations_are_reported(path: str, text: str) -> None:
    headers = HEADERS | {"cpu/other.h", "engine/engine.h"}
    assert len(import_rules.check_cxx(path, text, headers)) == 1


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("codec/x.h", '#include <cstring>\n#include "core/types.h"\n// #include <torch/torch.h>'),
        ("cpu/x.cpp", '#include <immintrin.h>\n#include "codec/codec.h"'),
        ("engine/x.cpp", '#include <sys/mman.h>\n#include "cpu/kernels.h"'),
        ("cuda/x.cu", '#include <cuda_runtime.h>\n#include "codec/codec.h"'),
        ("python/x.cpp", '#include <pybind11/pybind11.h>\n#include "cpu/kernels.h"\n#include "build_info.h"'),
    ],
)
def test_allowed_cxx_includes_are_accepted(path: str, text: str) -> None:
    assert import_rules.check_cxx(path, text, HEADERS) == []


FRESH_IMPORTS = """
import importlib, json, sys, torch, torch.distributed
before = set(sys.modules)
import dtcomm
added = set(sys.modules) - before
for package in sys.argv[1:]:
    importlib.import_module(package)
extensions = [name for name in sys.modules if name.startswith("dtcomm.extensions")]
print(json.dumps({"added": sorted({name.split(".")[0] for name in added}), "extensions": extensions}))
"""


def test_imports_of_the_core_load_no_extension_and_no_optional_library() -> None:
    """`import dtcomm` loads no terminal or plotting library and no compiler; no package of the core an extension."""
    packages = sorted(
        f"dtcomm.{path.parent.name}"
        for path in ROOT.glob("dtcomm/*/__init__.py")
        if path.parent.name != "extensions"
    )
    assert len(packages) > 15
    # Where dtcomm is installed torch itself imports it (entry point torch.backends): not here, or nothing is seen.
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    run = subprocess.run(
        [sys.executable, "-c", FRESH_IMPORTS, *packages],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    assert "dtcomm" in found["added"] and found["extensions"] == []
    assert not set(found["added"]) & {"triton", "rich", "matplotlib", "hypothesis", "pytest"}


def test_no_modules_import_each_other() -> None:
    files = structure.python_files("dtcomm") + sorted((ROOT / "dtcomm").rglob("*.pyi"))
    assert structure.circles(structure.import_graph(files)) == []


def test_a_circle_through_a_function_is_found() -> None:
    modules = frozenset({"dtcomm.a", "dtcomm.b", "dtcomm.c"})
    texts = {
        "dtcomm.a": "def f():\n    from dtcomm.b import g\n    return g\n",
        "dtcomm.b": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from . import a\n",
        "dtcomm.c": "from dtcomm import a, b\n",
    }
    graph = {
        name: structure.module_imports(name, text, modules, is_package=False) for name, text in texts.items()
    }
    assert structure.circles(graph) == [["dtcomm.a", "dtcomm.b"]]
