"""The backend is registered when torch is imported, in either order of imports, and dtcomm does not import torch."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

USE = "import torch.distributed as dist; assert 'dtcomm' in dist.Backend.backend_list; print('known')"
ORDERS = {
    "dtcomm first": f"import dtcomm; {USE}",
    "torch first": f"import torch.distributed; import dtcomm; {USE}",
    "a part of dtcomm": f"import dtcomm.errors; import torch; {USE}",
    "called by torch": f"import dtcomm_autoload as r; r.register(); r.register(); {USE}",
    "without torch": "import sys, dtcomm; assert 'torch' not in sys.modules; print('known')",
}


@pytest.fixture(scope="module")
def programs() -> Iterator[dict[str, subprocess.Popen[str]]]:
    """Run the programs concurrently; most of their time is the import of torch."""
    before = "import os; os.environ['TORCH_DEVICE_BACKEND_AUTOLOAD'] = '0'; "
    started = {
        order: subprocess.Popen(
            [sys.executable, "-c", before + code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for order, code in ORDERS.items()
    }
    yield started
    for program in started.values():
        program.kill()
        program.communicate()


@pytest.mark.parametrize("order", ORDERS)
def test_backend_is_registered(order: str, programs: dict[str, subprocess.Popen[str]]) -> None:
    output, error = programs[order].communicate()
    assert output.strip().endswith("known"), error


BROKEN = {
    "half removed": "from dtcomm import a_part_that_was_removed",
    "built for another Python": "raise ImportError('compiled for Python 3.9')",
    "damaged": "this is no Python",
}


def installed(folder: Path, init: str) -> Path:
    """An environment in which dtcomm is installed with the entry point of pyproject.toml; ``init`` is its __init__."""
    root = Path(__file__).parents[3]
    line = next(
        line for line in (root / "pyproject.toml").read_text().splitlines() if line.endswith(':register"')
    )
    metadata = folder / "dtcomm-0.1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: dtcomm\nVersion: 0.1.0\n")
    (metadata / "entry_points.txt").write_text("[torch.backends]\n" + line.replace('"', "") + "\n")
    shutil.copy(root / "dtcomm_autoload.py", folder)
    (folder / "dtcomm").mkdir()
    (folder / "dtcomm" / "__init__.py").write_text(init)
    return folder


@pytest.mark.skipif(
    not hasattr(dist.Backend, "_ensure_backend_registered"),
    reason="this torch asks no entry point for a backend",
)
def test_torch_finds_the_backend_when_a_group_is_created(tmp_path: Path) -> None:
    root = Path(__file__).parents[3]
    (entry,) = re.findall(
        r'"torch.distributed.backends"\]\n(.*)"(.*)"', (root / "pyproject.toml").read_text()
    )
    metadata = tmp_path / "dtcomm-0.1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: dtcomm\nVersion: 0.1.0\n")
    (metadata / "entry_points.txt").write_text("[torch.distributed.backends]\n" + "".join(entry) + "\n")
    code = (
        "import sys, torch.distributed as dist; assert 'dtcomm' not in sys.modules\n"
        "dist.init_process_group('dtcomm', store=dist.HashStore(), rank=0, world_size=1)\n"
        "print(type(dist.group.WORLD).__name__)"
    )
    path = os.pathsep.join([str(root), str(tmp_path)])
    environment = {**os.environ, "PYTHONPATH": path, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    program = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, cwd=tmp_path
    )
    assert program.stdout == "DtcommProcessGroup\n", program.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "warnings_are_errors"), [*((how, False) for how in BROKEN), ("half removed", True)]
)
def test_broken_installation_does_not_break_torch(
    how: str, warnings_are_errors: bool, tmp_path: Path
) -> None:
    environment = {**os.environ, "PYTHONPATH": str(installed(tmp_path / "site", BROKEN[how]))}
    environment.pop("TORCH_DEVICE_BACKEND_AUTOLOAD", None)
    # Only this warning: torch has others.
    code = "import warnings; warnings.filterwarnings('error', 'dtcomm'); " if warnings_are_errors else ""
    program = subprocess.run(
        [sys.executable, "-c", code + "import torch; print(torch.ones(1).item())"],
        capture_output=True,
        text=True,
        env=environment,
        cwd=tmp_path,
    )
    assert (program.returncode, program.stdout) == (0, "1.0\n"), program.stderr
    assert program.stderr.count("dtcomm is installed but cannot be imported") == 1
    assert "pip uninstall dtcomm" in program.stderr
