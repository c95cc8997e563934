"""The whole path of fused kernels between processes, whose kernels run in the emulator: tp.AllReduce and the slot of
inference engines, epilogues and experts have the engine's bits and use no other runtime.

The bodies are those of tests/cuda/test_inference.py, which runs them on a device.
"""

from __future__ import annotations

import pytest
import torch

import dtcomm.collectives as C
from dtcomm import tp
from dtcomm.launch.ranks import run_ranks
from tests.cuda import test_inference as on_device
from tests.support.emulated_peers import communicator_of_emulated_peers

SPECS = ("none", "bf16", "int8", "int4", "int4:block=128", "fp8_e4m3")


def sums(rank: int) -> list[torch.Tensor]:
    """Sums of `AllReduce` and of the slot, without and with NaN and infinities in one rank's tensor."""
    results = []
    for spec in SPECS:
        for algorithm in ("one_shot", "two_shot"):
            slot = tp.CustomAllReduce(codec=spec, algorithm=algorithm, compress_from=0)
            for tokens in (1, 3):
                x = on_device.activations(rank, tokens)[:, :700].contiguous()
                assert slot.should_custom_ar(x)
                results.append(slot.custom_all_reduce(x))
                x[0, rank * 65] = (torch.nan, torch.inf, -torch.inf)[rank % 3]
                results.append(slot.all_reduce(x, out=x))
    return results


def compare(rank: int, ranks: int, nvlink: bool) -> dict[str, object]:
    bodies = {
        "sums": lambda: sums(rank),
        "quantized norms": lambda: on_device.quantized_norms(rank, "cpu"),
        "experts": lambda: on_device.experts(rank, "cpu"),
    }
    expected = {name: body() for name, body in bodies.items()}
    C.release()
    communicator = communicator_of_emulated_peers(nvlink)
    report: dict[str, object] = {"reason": communicator.runtime_reason, "runtime": communicator.runtime.name}
    for name, body in bodies.items():
        pairs = zip(expected[name], body(), strict=True)
        report[name] = [i for i, (a, b) in enumerate(pairs) if not same_bits(a, b)]
    report["unserved"] = [
        (spec, reason)
        for spec in SPECS
        if (reason := tp.AllReduce(codec=spec, compress_from=0).why_no_fused_kernel(700, torch.bfloat16))
    ]
    info = communicator.info()
    return report | {"elsewhere": info["elsewhere"]}


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.parametrize(("ranks", "nvlink"), [(2, True), (4, False)])
def test_fused_kernels_between_processes_have_the_engines_bits(ranks: int, nvlink: bool) -> None:
    reason = "; NVLink does not connect the GPUs of ranks 0 and 1"
    expected: dict[str, object] = {name: [] for name in ("sums", "quantized norms", "experts", "unserved")}
    expected |= {"reason": f"all ranks reach each other's memory{'' if nvlink else reason}"}
    expected |= {"runtime": "peer", "elsewhere": {}}
    for report in run_ranks(compare, ranks, nvlink):
        assert report == expected
