"""What bench.gpu_fused counts, and what it says where there is no device."""

import sys

import pytest
import torch

from bench import gpu_fused


def test_bytes_are_those_of_reading_and_writing_once() -> None:
    # Two ranks, 1000 elements, a payload as large as the tensor. One shot: each reads and writes its tensor, writes its
    # payload to both and reads both.
    assert gpu_fused.moved_bytes("one_shot", 2, 1000, 4000) == 2 * (8000 + 2 * (4000 + 4000))
    # Two shots: half a payload goes out, half comes in; half a sum is written twice and read, the other read.
    assert gpu_fused.moved_bytes("two_shot", 2, 1000, 4000) == 2 * (
        8000 + 2000 + 2000 + 2 * 2000 + 2000 + 2000
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests what is said where there is no device")
def test_without_a_device_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu_fused"])
    assert gpu_fused.main() == 1
    assert "no CUDA device" in capsys.readouterr().err
