"""The backend is known as soon as torch is, whichever of the two is imported first, and costs no import of torch."""

from __future__ import annotations

import subprocess
import sys

import pytest

USE = "import torch.distributed as dist; assert 'dtcomm' in dist.Backend.backend_list; print('known')"
ORDERS = {
    "dtcomm first": f"import dtcomm; {USE}",
    "torch first": f"import torch.distributed; import dtcomm; {USE}",
    "a part of dtcomm": f"import dtcomm.errors; import torch; {USE}",
    "called by torch": f"import dtcomm.registration as r; r.register(); r.register(); {USE}",
    "without torch": "import sys, dtcomm; assert 'torch' not in sys.modules; print('known')",
}


@pytest.mark.parametrize("order", ORDERS)
def test_known(order: str) -> None:
    code = f"import os; os.environ['TORCH_DEVICE_BACKEND_AUTOLOAD'] = '0'; {ORDERS[order]}"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout.strip().endswith("known"), done.stderr
