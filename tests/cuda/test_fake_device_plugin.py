"""Runs bodies of the GPU tests on CPU tensors that pass for CUDA tensors, so that GPU time is not lost to typos."""

import subprocess
import sys
from pathlib import Path

import pytest

from dtcomm.kernels import dispatch

HERE = Path(__file__).parent
# Parameters of each body that take little time. Not included: Triton tests, which tests/triton interprets, tests with
# ranks in processes of their own, and what only a device can show.
BODIES = {
    "test_fused.py": "sanitizer or graph or queued or (virtual_ranks and all_gather and bfloat16 and 2)",
    "test_programs.py": "sanitizer",
    "test_epilogue.py": "sanitizer or graph or symmetric_sum_of_virtual_ranks and 3",
    "test_device.py": "sanitizer or stream or too_many or themselves or more_payloads or (captured and mx)",
    "test_waiting.py": "test_virtual_ranks",
    "test_communication.py": "guard",
    "test_compressors.py": "steps_of or passes_of",
    "test_perf.py": "codecs_have_speeds or (virtual_ranks and small and (replays or every))",
}


@pytest.mark.skipif("avx2" not in dispatch.available(), reason="AVX2's kernels stand in for CUDA's")
def test_bodies_of_the_tests_on_a_device() -> None:
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
    done = subprocess.run(command, capture_output=True, text=True, cwd=HERE.parent.parent, timeout=200)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    for name in BODIES:  # a selection that matches nothing would show nothing
        assert f"{name}::" in done.stdout
