"""What is queued on devices, on CPU tensors: over Gloo bit for bit as the engine."""

import torch
import torch.distributed as dist

import dtcomm.collectives as C
from dtcomm.runtime import communicator
from dtcomm.runtime.exchange import GroupExchange
from dtcomm.runtime.on_streams import StreamRuntime
from dtcomm.runtime.streams import HostStreams
from dtcomm.testing.ranks import run_ranks
from tests.runtime.test_process_group import calls


def serve_by_streams(piece_bytes: int) -> StreamRuntime:
    """The default group's communicator as one for devices is, but for the device."""
    made = communicator.find(None)
    made.runtime.close()
    made.plans.clear()
    group = dist.new_group(list(range(dist.get_world_size())), backend="gloo")
    made.runtime = StreamRuntime(
        GroupExchange(group, torch.device("cpu")), HostStreams(), made.rank, lambda: None, piece_bytes
    )
    return made.runtime


def both_runtimes(rank: int, world_size: int) -> dict[str, object]:
    native = calls(rank, world_size)
    C.release()
    runtime = serve_by_streams(16 * 1024)
    queued = calls(rank, world_size, timed=False)
    C.release()
    return {
        "different": [i for i, (a, b) in enumerate(zip(native, queued)) if not torch.equal(a, b)],
        "results": len(native),
        "wire_bytes": runtime.info()["wire_bytes"],
    }


def test_same_bits_as_the_engine() -> None:
    for said in run_ranks(both_runtimes, 3):
        assert said["different"] == []
        assert said["results"] > 100 and said["wire_bytes"] > 1e6
