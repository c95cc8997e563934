"""The transport of torch 2.15: two endpoints in one process, as its own documentation shows them."""

from __future__ import annotations

import asyncio
import importlib
import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.torch_version import TorchVersion

from dtcomm.errors import DtcommError, PeerLost
from dtcomm.extensions.weights.transport import RemoteBuffer, tcp_transport

pytestmark = pytest.mark.skipif(
    TorchVersion(torch.__version__) < "2.15", reason="torch.distributed._transport came with torch 2.15"
)


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """torch's registry, with the entry point of an installed dtcomm."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    text = (Path(__file__).parents[4] / "pyproject.toml").read_text()
    (entry,) = re.findall(r'\[project.entry-points."(torch.distributed.transports)"\]\n(.*)"(.*)"', text)
    metadata = tmp_path / "dtcomm-0.1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: dtcomm\nVersion: 0.1.0\n")
    (metadata / "entry_points.txt").write_text("[{}]\n{}{}\n".format(*entry))
    monkeypatch.syspath_prepend(str(tmp_path))
    registry = importlib.import_module("torch.distributed._transport")
    monkeypatch.setattr(registry._registry, "_registered_transports", {})
    assert "dtcomm" in registry.available_transports()
    return registry


@pytest.fixture
def ends(registry: Any) -> Iterator[tuple[Any, Any]]:
    """Two endpoints that are connected both ways, made by torch's registry."""
    one, other = (registry.new_transport("dtcomm", "cpu", connections=3, timeout=20.0) for _ in range(2))
    assert isinstance(one, registry.Transport) and one.supported() and not one.connected()
    urls = one.bind(), other.bind()
    assert one.connect(urls[1]) == 0 and other.connect(urls[0]) == 0 and one.connected() and other.connected()
    yield one, other
    for end in (one, other):
        end.close()
        assert not end.connected()


def exposed(end: Any, tensor: torch.Tensor) -> RemoteBuffer:
    """What the peer learns of the memory, through its bytes."""
    return RemoteBuffer.deserialize(end.register_memory(tensor).to_remote_buffer().serialize())


@pytest.mark.parametrize("numel", [1, 5, 5 << 20])  # of one byte; of several pieces and connections
def test_writes_and_reads(ends: tuple[Any, Any], numel: int) -> None:
    one, other = ends
    weights = torch.randn(numel).bfloat16()
    received, again = torch.zeros_like(weights), torch.zeros_like(weights)
    source, target = one.register_memory(weights), one.register_memory(again)
    assert isinstance(source, importlib.import_module("torch.distributed._transport").Memory)
    remote = exposed(other, received)
    work = one.write(source.to_view(), remote, async_op=True)
    assert work.wait() and work.is_completed() and work.is_success() and work.get_future().wait() == []
    assert torch.equal(received, weights)
    assert one.read(target.to_mutable_view(), remote) == 0
    assert torch.equal(again, weights)


def test_ranks_connect_through_a_store(registry: Any) -> None:
    store = dist.HashStore()
    with ThreadPoolExecutor(2) as threads:
        one, other = threads.map(
            lambda rank: registry.new_transport_rank(
                "dtcomm", "cpu", store=store, rank=rank, peer_rank=1 - rank, bootstrap_timeout=20.0
            ),
            (0, 1),
        )
    received = torch.zeros(3)
    with one, other:
        assert one.write(one.register_memory(torch.ones(3)).to_view(), exposed(other, received)) == 0
    assert received.tolist() == [1.0] * 3


def test_views_and_asyncio(ends: tuple[Any, Any]) -> None:
    one, other = ends
    source, target = torch.arange(64, dtype=torch.uint8), torch.zeros(8, dtype=torch.uint8)
    remote, memory = exposed(one, source), other.register_memory(target)

    async def read() -> None:
        await other.read_async(memory.to_mutable_view(2, 4), remote, timeout=20.0)
        await asyncio.gather(
            *(other.read_async(memory.to_mutable_view(at, 1), remote, timeout=20.0) for at in (0, 7))
        )

    asyncio.run(read())
    assert target.tolist() == [0, 0, 0, 1, 2, 3, 0, 0]
    assert other.write(memory.to_view(3, 0), remote) == 0  # nothing


def test_what_does_not_fit_is_refused_and_changes_nothing(ends: tuple[Any, Any]) -> None:
    one, other = ends
    small, large = torch.ones(4), torch.zeros(9)
    memory, remote = one.register_memory(small), exposed(other, large)
    assert one.register_memory(small) is memory
    with pytest.raises(ValueError, match="not inside 16 bytes"):
        memory.to_view(8, 9)
    with pytest.raises(TypeError, match="to_mutable_view"):
        one.read(memory.to_view(), remote)
    with pytest.raises(ValueError, match="16 bytes; remote_buffer has 8"):
        one.write(memory.to_view(), RemoteBuffer(remote.endpoint, remote.key, 8))
    with pytest.raises(ValueError, match="memory of the peer"):
        one.write(memory.to_view(), exposed(one, large))
    big = one.register_memory(torch.ones(100))
    for view, wrong in (
        (memory, RemoteBuffer(remote.endpoint, "00" * 8, 16)),
        (big, RemoteBuffer(remote.endpoint, remote.key, 400)),
    ):
        with pytest.raises(DtcommError, match="refused a transfer: no such memory"):
            one.write(view.to_view(), wrong)
        with pytest.raises(DtcommError, match="refused a transfer: no such memory"):
            one.read(view.to_mutable_view(), wrong)
    assert large.tolist() == [0] * 9
    assert one.write(memory.to_view(), remote) == 0 and large.tolist() == [1] * 4 + [0] * 5
    view = memory.to_view()
    one.unregister_memory(memory)
    one.unregister_memory(memory)
    with pytest.raises(TypeError, match="this transport has registered"):
        one.write(view, remote)
    with pytest.raises(ValueError, match="registered memory"):
        memory.to_view()
    for data in (b"", b"[]", b"{}", remote.serialize()[:-1], remote.serialize().replace(b"1", b"2", 1)):
        with pytest.raises(ValueError, match="describes no memory"):
            RemoteBuffer.deserialize(data)
    for tensor in (torch.ones(4, 4).t()[:2], torch.ones(0)):
        with pytest.raises(ValueError, match="contiguous"):
            one.register_memory(tensor)


def test_a_peer_that_closes_is_reported(ends: tuple[Any, Any]) -> None:
    one, other = ends
    memory, remote = one.register_memory(torch.ones(4)), exposed(other, torch.zeros(4))
    assert one.write(memory.to_view(), remote) == 0
    other.close()
    work = one.write(memory.to_view(), remote, async_op=True)
    with pytest.raises(PeerLost):
        work.wait()
    with pytest.raises(RuntimeError, match="PeerLost"):
        work.get_future().wait()
    assert work.is_completed() and not work.is_success() and not one.connected()
    with pytest.raises(RuntimeError, match="closed, or its peer was lost"):
        one.write(memory.to_view(), remote)


def test_strangers_and_other_arguments_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    with pytest.raises(ValueError, match="expected the CPU"):
        tcp_transport("cuda:0")
    with pytest.raises(ValueError, match="connections=0"):
        tcp_transport(connections=0)
    with tcp_transport() as one, tcp_transport() as other:
        url = json.loads(other.bind())
        with pytest.raises(OSError, match="refused the connection"):
            one.connect(json.dumps({**url, "token": url["token"] ^ 1}).encode())
        assert not one.connected()
        assert one.connect(json.dumps(url).encode()) == 0
        with pytest.raises(RuntimeError, match="connected already"):
            one.connect(json.dumps(url).encode())
