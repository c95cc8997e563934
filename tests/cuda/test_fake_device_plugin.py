"""Runs bodies of the GPU tests on CPU tensors that pass for CUDA tensors, so that GPU time is not lost to typos."""

import subprocess
import sys
from pathlib import Path

import pytest

from dtcomm.kernels import dispatch

HERE = Path(__file__).parent
# Parameters of each body that take little time. Not included: tests with ranks in separate processes, and
# properties that only a real device has.
BODIES = {
    "test_fused.py": "sanitizer or graph or queued or (virtual_ranks and all_gather and bfloat16 and 2)",
    "test_epilogue.py": "sanitizer or graph or symmetric_sum_of_virtual_ranks and 3",
    "test_device.py": "sanitizer or stream or too_many or exact_types or more_payloads or (graph_replays and mx)",
    "test_waiting.py": "virtual_ranks",
    "test_communication.py": "guard",
    "test_compressors.py": "sum_steps or position_steps or low_rank_passes or low_rank_kernels",
}


@pytest.mark.skipif("avx2" not in dispatch.available(), reason="AVX2's kernels stand in for CUDA's")
def test_gpu_tests_pass_on_fake_device() -> None:
    chosen = " or ".join(f"({name} and ({few}))" for name, few in BODIES.items())
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "tests.cuda.fake_device_plugin",
        "-p",
        "no:cacheprovider",
    ]
    command += ["-m", "gpu", "-k", chosen, "-v", *(str(HERE / name) for name in BODIES)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=HERE.parent.parent, timeout=600)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    for name in BODIES:  # a selection that matches no test would pass
        assert f"{name}::" in done.stdout
