"""The all-reduce for inference engines: the bits of dtcomm.all_reduce, the choice by size, and the engines' slot."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import dtcomm
from dtcomm import planner, tp
from dtcomm.codecs import codec
from dtcomm.collectives.groups import DeviceGroup
from dtcomm.launch.ranks import run_ranks
from dtcomm.tp.inference import SumChoice
from tests.ranks.runtime.test_on_streams import communicator_of_fake_device
from tests.support.fake_cuda_ranks import fake_cuda_rank
from tests.support.fake_cuda_tensor import DEVICE, to_fake_cuda
from tests.support.rank_tests import on_ranks
from tests.support.stream_checker import RecordedStreams

FEATURES = 256
SPECS = "none int8 fp8_e4m3 int4:block=128,spikes=1 int8:round=stochastic exact topk:ratio=0.1".split()


def activations(rank: int, tokens: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(tokens, FEATURES, generator=torch.Generator().manual_seed(rank)).to(dtype)


def compare_with_all_reduce(rank: int, ranks: int, backend: str = "") -> None:
    if backend:
        communicator_of_fake_device(backend)
    for spec in SPECS:
        for algorithm in ("one_shot", "two_shot"):
            all_reduce = tp.AllReduce(codec=spec, algorithm=algorithm, compress_from=0)
            assert (all_reduce.rank, all_reduce.world_size) == (rank, ranks)
            for tokens, dtype in ((3, torch.bfloat16), (70, torch.float32)):
                x = activations(rank, tokens, dtype)
                before = x.clone()
                # Stochastic rounding draws by the number of the call, so the expected sum has that of the first one.
                y, out = all_reduce(x), torch.full_like(x, torch.nan)
                if "stochastic" not in spec:
                    expected = x.clone()
                    dtcomm.all_reduce(expected, codec=spec, algorithm=algorithm)
                    assert torch.equal(y, expected), (spec, algorithm, tokens)
                    assert all_reduce(x, out) is out and torch.equal(out, expected), (spec, algorithm)
                assert torch.equal(x, before)
                assert y.shape == x.shape and y.dtype == dtype
                assert all_reduce(x, x) is x
                if "stochastic" not in spec:
                    assert torch.equal(x, y)
    strided = activations(rank, 8).t()
    expected = strided.contiguous()
    dtcomm.all_reduce(expected)
    assert torch.equal(tp.AllReduce()(strided), expected)


def accepted_on_device(rank: int, world_size: int) -> list[bool]:
    """What the slot accepts on a device with fused kernels for every sum, which the meta device stands for."""
    answers = []
    for codec_name, options in (("int8", {}), ("int8", {"compress_from": 1 << 20}), ("none", {})):
        slot = tp.CustomAllReduce(None, "cpu", codec=codec_name, **options)
        slot._all_reduce.device = torch.device("meta")
        slot._all_reduce.why_no_fused_kernel = lambda numel, dtype: ""
        answers += [
            slot.should_custom_ar(torch.empty(nbytes // 2, dtype=torch.bfloat16, device="meta"))
            for nbytes in (1 << 19, 2 << 20, 4 << 20)
        ]
    return answers


def test_the_engine_keeps_the_sums_that_are_too_small_for_the_codec() -> None:
    for answers in run_ranks(accepted_on_device, 2):
        assert answers == [False, False, True, False, True, True, True, True, True]


@pytest.mark.parametrize("ranks", [2, 3])
def test_sums_are_those_of_all_reduce(ranks: int) -> None:
    run_ranks(compare_with_all_reduce, ranks)


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_sums_over_the_runtimes_of_devices(backend: str) -> None:
    run_ranks(compare_with_all_reduce, 2, backend)


@on_ranks(1)
def test_one_rank_copies(rank: int, ranks: int) -> None:
    x = activations(rank, 3)
    y = tp.AllReduce(codec="int8", compress_from=0)(x)
    assert torch.equal(x, y) and y.data_ptr() != x.data_ptr()
    slot = tp.CustomAllReduce()
    assert slot.disabled and "one rank" in slot.reason and slot.custom_all_reduce(x) is None


def limits_on_gpus(rank: int, ranks: int) -> list[tuple[str, bool, str, bool, str]]:
    """Return what is done with 1 MiB and 8 MiB on fake GPUs between which fused kernels would run, by codec."""
    found = []
    with (
        fake_cuda_rank(RecordedStreams()),
        mock.patch.object(DeviceGroup, "runtime", ("peer", "")),
        mock.patch.object(DeviceGroup, "why_no_fused_kernel", lambda *_: ""),
    ):
        for spec in ("int8", "int4", "fp8_e4m3"):
            slot = tp.CustomAllReduce(None, DEVICE, codec=spec)
            row: list[Any] = [spec]
            for size in (2**20, 2**23):
                x = to_fake_cuda(torch.empty(size // 2, dtype=torch.bfloat16))
                row += [slot.should_custom_ar(x), slot._all_reduce.choose(x.numel(), x.dtype).reason]
            found.append(tuple(row))
        dtcomm.release()
    return found


def test_sums_of_gpus_are_compressed_from_where_tune_has_found_them_faster(tmp_path: Path) -> None:
    limits = (("int8", 2, 1, 2.0**20), ("int4", 2, 1, math.inf), ("fp8_e4m3", 4, 1, 1024.0))
    (tmp_path / "tune.json").write_text(json.dumps(planner.Table(compress_from=limits).as_dict()))
    env = {"DTCOMM_TUNE": str(tmp_path / "tune.json"), "DTCOMM_RUNTIME": "process_group"}
    slower = "int4 was not faster at any size that dtcomm tune has measured"
    small = "1048576 bytes, less than compress_from = 4194304"
    for found in run_ranks(limits_on_gpus, 2, env=env):
        assert found == [
            ("int8", True, "", True, ""),
            ("int4", False, slower, False, slower),
            ("fp8_e4m3", False, small, True, ""),  # measured with other ranks
        ]


@pytest.mark.parametrize("ranks", [2, 3])
@on_ranks()
def test_the_choice_depends_on_the_size(rank: int, ranks: int) -> None:
    all_reduce = tp.AllReduce(codec="int8", max_bytes=1 << 20, compress_from=64 * 1024)
    small = all_reduce.choose(1024, torch.bfloat16)
    assert small.codec == codec("none") and small.algorithm == "direct"
    assert small.reason == "2048 bytes, less than compress_from = 65536"
    large = all_reduce.choose(32 * 1024, torch.bfloat16)
    algorithm = "one_shot" if ranks == 2 else "direct"
    assert large == SumChoice(codec=codec("int8"), algorithm=algorithm, reason="")
    # A small sum is exact, a large one is not.
    for tokens, exact in ((4, True), (400, False)):
        x = activations(rank, tokens)
        expected = x.clone()
        dtcomm.all_reduce(expected)
        assert torch.equal(all_reduce(x), expected) == exact
    # Every rank gets the planner's answer.
    planned = tp.AllReduce(codec="int8")
    for numel in (64, 1 << 20):
        answers = [None] * ranks
        torch.distributed.all_gather_object(answers, str(planned.choose(numel, torch.float32)))
        assert len(set(answers)) == 1
    assert tp.AllReduce(codec="topk", compress_from=0).choose(10, torch.float32).codec == codec("topk")
    wrong = {
        "max_bytes: expected a positive": {"max_bytes": 0},
        "algorithm: 'ring'; valid: auto, one_shot, two_shot": {"algorithm": "ring"},
        "compress_from: expected bytes or None, got -1": {"compress_from": -1},
        "unknown codec 'int9'": {"codec": "int9"},
        "device: ": {"device": "meta"},
    }
    for message, arguments in wrong.items():
        with pytest.raises(ValueError, match=message):
            tp.AllReduce(**arguments)
    x = activations(rank, 4)
    refused = {
        "inp: expected fp32, fp16 or bf16": (x.double(), None, TypeError),
        "inp: has 1048578 bytes, more than max_bytes": (torch.zeros(524289).bfloat16(), None, ValueError),
        "out: expected torch.bfloat16": (x, x.float(), ValueError),
        "out: expected a contiguous tensor": (x, torch.empty(FEATURES, 4).bfloat16().t(), ValueError),
        "out: overlaps the memory of inp": (*torch.zeros(9).bfloat16().unfold(0, 8, 1).unbind(), ValueError),
    }
    for message, (inp, out, error) in refused.items():
        with pytest.raises(error, match=message):
            all_reduce(inp, out)
    assert all_reduce(x[:0]).shape == (0, FEATURES)


@on_ranks(2)
def test_the_slot_of_inference_engines(rank: int, ranks: int) -> None:
    """The calls of vLLM's CudaCommunicator.all_reduce and of the engines' graph capture."""
    slot = tp.CustomAllReduce(None, "cpu", 1 << 20, codec="int8", compress_from=64 * 1024)
    assert not slot.disabled and slot.reason == "" and slot.max_size == 1 << 20
    for tokens in (1, 64, 512):
        x = activations(rank, tokens)
        expected = tp.AllReduce(codec="int8", compress_from=64 * 1024)(x)
        with slot.capture():
            assert slot.should_custom_ar(x)
            y = slot.custom_all_reduce(x)
        slot.register_graph_buffers()
        assert y is not None and torch.equal(y, expected)
        assert torch.equal(slot.all_reduce(x, out=torch.empty_like(x), registered=True), expected)
    for refused in (activations(rank, 4096), x.double(), x.t(), x[:0], x.to("meta")):
        assert not slot.should_custom_ar(refused) and slot.custom_all_reduce(refused) is None
    slot.close()
    assert slot.disabled and not slot.should_custom_ar(x)
