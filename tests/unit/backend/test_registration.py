"""The backend is registered when torch is imported, in either order of imports, and dtcomm does not import torch."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

USE = "import torch.distributed as dist; assert 'dtcomm' in dist.Backend.backend_list; print('known')"
ORDERS = {
    "dtcomm first": f"import dtcomm; {USE}",
    "torch first": f"import torch.distributed; import dtcomm; {USE}",
    "a part of dtcomm": f"import dtcomm.errors; import torch; {USE}",
    "called by torch": f"import dtcomm._torch_backend_entry as r; r.register(); r.register(); {USE}",
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
