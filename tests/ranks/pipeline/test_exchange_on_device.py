"""Pipeline links on fake CUDA tensors: the CPU's bits, tensors on the device of the input, and no wait of the host."""

from __future__ import annotations

from typing import Any

import torch

import dtcomm
import dtcomm.collectives as C
from dtcomm.launch.ranks import run_ranks
from dtcomm.runtime.communicator import get_communicator_of_pair
from tests.support.fake_cuda_ranks import fake_cuda_rank
from tests.support.fake_cuda_tensor import DEVICE, host_copy, to_fake_cuda, unchecked
from tests.support.stream_checker import RecordedStreams

SHAPE = (8, 48)


def exchange(rank: int, on_device: bool, codec: str) -> list[torch.Tensor]:
    """Send an activation forward and its gradient back; return what this rank received, on the host."""
    if rank == 0:
        x = torch.randn(SHAPE, generator=torch.Generator().manual_seed(1))
        x = to_fake_cuda(x) if on_device else x
        link = dtcomm.pipeline.Sender(1, codec)
        link._send(x, link.codec)
        received = torch.empty(SHAPE, device=x.device)
        C.recv(received, 1, codec=codec)
    else:
        receiver = dtcomm.pipeline.Receiver(0, codec)
        received = receiver(SHAPE, device=DEVICE if on_device else None).detach()
        receiver.send_gradient(received * 2.0)
        link = receiver
    assert received.is_cuda == on_device
    link.flush()
    with unchecked():
        return [host_copy(received)]


def compare(rank: int, world_size: int) -> list[dict[str, Any]]:
    outcomes = []
    codecs = ("none", "int8")
    expected = [exchange(rank, False, codec) for codec in codecs]
    streams = RecordedStreams()
    with fake_cuda_rank(streams):
        # Only this thread has the device, and the first asynchronous message would start in another one.
        for sends in (rank == 0, rank == 1):
            get_communicator_of_pair(None, 1 - rank, "peer", sends, device=DEVICE).connect()
        for codec, on_host in zip(codecs, expected, strict=True):
            streams.faults.clear()
            on_device = exchange(rank, True, codec)
            same = [torch.equal(a, b) for a, b in zip(on_host, on_device, strict=True)]
            outcomes.append({"same": same, "waits": list(streams.faults)})
        C.release()
    return outcomes


def test_links_stay_on_the_device_and_do_not_wait_for_it() -> None:
    for outcomes in run_ranks(compare, 2, env={"DTCOMM_RUNTIME": "process_group"}, timeout=120):
        assert outcomes == [{"same": [True], "waits": []}] * 2
