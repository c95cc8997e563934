"""The engine over sockets and over UCX: the same results, the same errors and nothing left open."""

import contextlib
import os
import re
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import dtcomm.collectives as C
from dtcomm import _C, algorithms, env
from dtcomm.codecs import codec
from dtcomm.errors import CollectiveMismatch, CollectiveTimeout, DtcommError, PayloadCorrupt, PeerLost
from dtcomm.launch.ranks import run_ranks, send_to_parent, spawn_ranks
from dtcomm.runtime.bootstrap import between_hosts
from dtcomm.runtime.bootstrap.cpu import CpuBootstrap
from dtcomm.runtime.bootstrap.tcp import Listener
from dtcomm.runtime.native import native_plan
from dtcomm.runtime.types import OpSpec, TensorSpec
from tests.support.stopwatch import Stopwatch
from tests.support.ucx import requires_ucx
from tests.unit.runtime.every_collective import OVER_GLOO, calls

SOCKETS = {"DTCOMM_TRANSPORT": "sockets"}
REMOTE = pytest.mark.parametrize("transport", ["sockets", pytest.param("ucx", marks=requires_ucx)])


def compare_transports(rank: int, world_size: int, transport: str) -> dict[str, Any]:
    report = {}
    variables_of = {
        "memory": {"DTCOMM_RUNTIME": "native"},
        transport: {"DTCOMM_RUNTIME": "auto", "DTCOMM_TRANSPORT": transport},
    }
    results = {}
    for name, variables in variables_of.items():
        os.environ.update(variables)
        results[name], report[name] = calls(rank, world_size), C.info()
        C.release()
    report["different"] = [
        i
        for i, (a, b) in enumerate(zip(results["memory"], results[transport], strict=True))
        if not torch.equal(a, b)
    ]
    return report


@REMOTE
@pytest.mark.parametrize("world_size", [2, 3])
def test_same_bits_and_bytes_as_in_shared_memory(world_size: int, transport: str) -> None:
    for report in run_ranks(compare_transports, world_size, transport):
        assert report["memory"]["transport"] == "memory" and report[transport]["transport"] == transport
        assert f"DTCOMM_TRANSPORT={transport}" in report[transport]["reason"]
        assert report["different"] == []
        assert report["memory"]["wire_bytes"] == report[transport]["wire_bytes"]


def reduce_by_levels(rank: int, world_size: int, mixed: bool) -> list[torch.Tensor]:
    """Return results and residuals of hierarchies with a codec for each level."""
    os.environ["DTCOMM_HOST_ID"] = f"host {rank // 2}"
    generator = torch.Generator().manual_seed(rank)
    results = []
    for spec in ("none/int4", "fp16/int8", "int8/none", "bf16/int8:round=stochastic"):
        for dtype in (torch.float32, torch.bfloat16):
            for op in ("sum", "avg"):
                x = torch.randn(70_001, generator=generator).to(dtype)
                residual = torch.randn(70_001, generator=generator) * 0.01
                C.all_reduce(x, op, codec=spec, algorithm="hierarchical", residual=residual)
                results += [x, residual]
    assert C.info()["runtime"] == ("native" if mixed else "process_group")
    if mixed:
        assert C.info()["transport"] == "memory and sockets"
    return results


def test_each_level_of_a_hierarchy_has_its_own_codec() -> None:
    mixed = run_ranks(reduce_by_levels, 4, True)
    over_gloo = run_ranks(reduce_by_levels, 4, False, env=OVER_GLOO)
    for native, gloo in zip(mixed, over_gloo, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(native, gloo, strict=True))
    for rank in mixed:
        assert all(torch.equal(a, b) for a, b in zip(rank[::2], mixed[0][::2], strict=True))


def reduce_unequal_sizes(rank: int, world_size: int) -> str:
    C.all_reduce(torch.ones(10))
    try:
        C.all_reduce(torch.ones(1000 + rank % 2))
    except CollectiveMismatch as error:
        return str(error)
    return "no error"


@REMOTE
def test_mismatch_names_the_ranks_and_their_calls(transport: str) -> None:
    for text in run_ranks(reduce_unequal_sizes, 3, env={"DTCOMM_TRANSPORT": transport}):
        assert "1000 float32" in text and "1001 float32" in text
        assert all(f"rank {rank} (host" in text for rank in range(3))


def broadcast_and_leave(rank: int, world_size: int) -> float:
    """Rank 0 returns from a broadcast and leaves the communicator before rank 1 arrives."""
    x = torch.full((3_000_000,), 7.0) if rank == 0 else torch.zeros(3_000_000)
    C.all_reduce(torch.ones(1))
    if rank == 1:
        time.sleep(0.3)
    C.broadcast(x, 0)
    C.release()
    return float(x.sub(7).abs().max())


@REMOTE
def test_messages_arrive_after_their_sender_has_left(transport: str) -> None:
    assert run_ranks(broadcast_and_leave, 2, env={"DTCOMM_TRANSPORT": transport}) == [0.0, 0.0]


def reduce_with_transport(rank: int, world_size: int, transport: str, bad_interface: bool) -> str:
    os.environ.update({"DTCOMM_HOST_ID": f"host {rank}", "DTCOMM_TRANSPORT": transport})
    try:
        with mock.patch.dict(os.environ):
            if bad_interface:
                os.environ["GLOO_SOCKET_IFNAME"] = "nowhere0"
            with mock.patch.object(CpuBootstrap, "_private_group", lambda self: self._group):
                C.all_reduce(torch.ones(10))
    except DtcommError as error:
        return str(error)
    info = C.info()
    return f"{info['runtime']} {info['transport']}: {info['reason']}"


def test_fallbacks_are_reported_and_forced_transports_refused() -> None:
    for text in run_ranks(reduce_with_transport, 2, "auto", True):
        assert text.startswith("process_group messages of the group's backend: rank 0 (host ")
        assert "GLOO_SOCKET_IFNAME=nowhere0: no such interface has an address" in text
    for text in run_ranks(reduce_with_transport, 2, "sockets", True):
        assert text.startswith("DTCOMM_TRANSPORT=sockets, but rank 0 (host ")
    for text in run_ranks(reduce_with_transport, 2, "memory", False):
        assert text.startswith("DTCOMM_TRANSPORT=memory, but ") and text.endswith("the ranks are on 2 hosts")


def test_a_listener_accepts_only_ranks_with_its_token() -> None:
    listener, peer = Listener(), Listener()
    forged = {**listener.info(), "token": 1}
    names = ["rank 0", "rank 1"]
    accepted: dict[str, Any] = {}

    def answer() -> None:
        accepted.update(listener.connect(0, {1: peer.info()}, names, 5.0))  # type: ignore[arg-type]

    thread = threading.Thread(target=answer)
    thread.start()
    with pytest.raises(ConnectionError, match="rank 0 refused the connection"):
        peer.connect(1, {0: forged}, names, 5.0)
    for fd in peer.connect(1, {0: listener.info()}, names, 5.0)[0]:
        os.close(fd)
    thread.join(5)
    assert list(accepted) == [1]
    os.close(accepted[1][0])  # type: ignore[index]
    with pytest.raises(TimeoutError, match="of rank 1 not all have connected"):
        listener.connect(0, {1: peer.info()}, names, 0.05)
    where = peer.info()
    peer.close()
    with pytest.raises(OSError, match=r"rank 0 cannot be reached at .*refused"):
        listener.connect(1, {0: where}, names, 1.0)
    listener.close()


def test_connections_that_send_no_greeting_do_not_delay_the_ranks() -> None:
    listener, peer = Listener(), Listener()
    address = (listener.info()["address"], listener.info()["port"])
    unknown = [socket.create_connection(address) for _ in range(3)]
    unknown[1].sendall(b"GET")
    names, accepted = ["rank 0", "rank 1"], {}

    def answer() -> None:
        accepted.update(listener.connect(0, {1: peer.info()}, names, 30.0))

    watch = Stopwatch()
    thread = threading.Thread(target=answer)
    thread.start()
    for connection in unknown:  # closed although no peer has connected
        connection.settimeout(20)
        with connection:
            assert connection.recv(1) == b""
    unknown = [socket.create_connection(address) for _ in range(3)]
    connected = peer.connect(1, {0: listener.info()}, names, 30.0)
    thread.join(25)
    assert list(accepted) == [1] and watch.elapsed().within(cpu_s=1.0, wall_s=15.0)
    for fd in (*accepted[1], *connected[0]):
        os.close(fd)
    for closeable in (*unknown, listener, peer):
        closeable.close()


def reduce_through_relay(
    numel: int, tamper: Any, checksum: bool
) -> tuple[list[torch.Tensor], list[BaseException]]:
    """All-reduce between two communicators of this process; one direction passes through ``tamper``."""
    shape = OpSpec(
        "all_reduce", "sum", (TensorSpec(numel, torch.float32, codec("none")),), "two_shot", 0, (), checksum
    )
    schedule = algorithms.build("two_shot", "all_reduce", 2)
    near = [socket.socketpair() for _ in range(2)]

    def relay(source: socket.socket, target: socket.socket, change: Any) -> None:
        try:
            while data := source.recv(4096):
                target.sendall(change(bytearray(data)))
        except OSError:
            pass
        for end in (source, target):
            try:
                end.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass

    ends = [pair[1] for pair in near]
    relays = [
        threading.Thread(target=relay, args=(ends[0], ends[1], tamper)),
        threading.Thread(target=relay, args=(ends[1], ends[0], lambda data: data)),
    ]
    natives = [
        _C.NativeCommunicator(
            rank=rank, ranks=2, max_boxes=8, slot_bytes=64 * 1024, timeout_s=10.0, yield_us=50.0
        )
        for rank in range(2)
    ]
    addresses = [native.address() for native in natives]
    tensors = [torch.full((numel,), rank + 1.0) for rank in range(2)]
    failures: list[BaseException] = []

    def run(rank: int) -> None:
        plan = native_plan(shape, schedule, rank, _C.Variants(piece_bytes=16 * 1024), 64 * 1024, 8, False)
        pointer = tensors[rank].data_ptr()
        try:
            natives[rank].run(plan, pointer, pointer, 0, 1)
        except DtcommError as error:
            failures.append(error)

    for rank, native in enumerate(natives):
        fd = near[rank][0].detach()
        native.attach(
            [
                _C.Address(
                    **address, sockets=[fd] if peer != rank else [], other_host=True, name=f"rank {peer}"
                )
                for peer, address in enumerate(addresses)
            ]
        )
    threads = [*relays, *(threading.Thread(target=run, args=(rank,)) for rank in range(2))]
    for thread in threads:
        thread.start()
    for thread in threads[2:]:
        thread.join(20)
    for native in natives:
        native.close()
    for thread in relays:
        thread.join(20)
    for end in ends:
        end.close()
    return tensors, failures


class BitFlip:
    """Flips a bit of the byte at offset ``at`` of the stream."""

    def __init__(self, at: int) -> None:
        self.at, self.passed = at, 0

    def __call__(self, data: bytearray) -> bytearray:
        if self.passed <= self.at < self.passed + len(data):
            data[self.at - self.passed] ^= 4
        self.passed += len(data)
        return data


def test_checksum_detects_a_flipped_byte() -> None:
    tensors, failures = reduce_through_relay(50_000, lambda data: data, True)
    assert failures == [] and all(tensor.eq(3).all() for tensor in tensors)
    at = 40_000  # in some payload: heads are 48 bytes a message, and these have 16 KiB
    _, failures = reduce_through_relay(50_000, BitFlip(at), True)
    assert failures and all(isinstance(error, PayloadCorrupt) for error in failures)
    assert "what rank 0 sent to rank 1 arrived damaged: chunk" in str(failures[0])
    tensors, failures = reduce_through_relay(50_000, BitFlip(at), False)
    assert failures == [] and not tensors[1].eq(3).all(), "without a checksum no rank sees it"


def test_invalid_frame_closes_the_connection() -> None:
    _, failures = reduce_through_relay(50_000, BitFlip(2), False)  # of the first frame's kind
    assert any(isinstance(error, PeerLost) and "it sent an invalid frame" in str(error) for error in failures)


def reduce_until_failure(rank: int, world_size: int, children: bool) -> None:
    x = torch.ones(1_000_000)
    C.all_reduce(x)
    if children and os.fork() == 0:
        time.sleep(10)
        os._exit(0)
    send_to_parent("ready")
    try:
        while True:
            watch = Stopwatch()
            C.all_reduce(x, codec="int8", algorithm="ring")
    except DtcommError as error:
        send_to_parent((type(error).__name__, str(error), watch.elapsed()))
        with pytest.raises(type(error)):
            C.all_reduce(x)


@REMOTE
@pytest.mark.parametrize("sig", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_rank_is_named(sig: signal.Signals, transport: str) -> None:
    """Children that the rank forked do not hold its connections."""
    victim, kind = 1, PeerLost if sig == signal.SIGKILL else CollectiveTimeout
    children = sig == signal.SIGKILL
    with spawn_ranks(
        reduce_until_failure,
        3,
        children,
        env={"DTCOMM_TRANSPORT": transport},
        group_timeout=2.0 if sig == signal.SIGSTOP else 30.0,
    ) as ranks:
        for rank in range(3):
            assert ranks.receive(rank) == "ready"
        time.sleep(0.2)
        ranks.kill(victim, sig)
        for rank in (0, 2):
            name, text, elapsed = ranks.receive(rank)
            assert name == kind.__name__, text
            assert f"rank {victim} (" in text and f"pid {ranks.pids[victim]}" in text, text
            assert sig == signal.SIGKILL or "nothing has come from it for" in text, text
            limit = 2.0 if sig == signal.SIGKILL else 5.0
            assert elapsed.within(cpu_s=limit, wall_s=5 * limit), elapsed


def count_descriptors(rank: int, world_size: int) -> list[int]:
    counts = []
    for _ in range(3):
        C.all_reduce(torch.ones(10))
        watch = Stopwatch()
        C.release()
        assert watch.elapsed().within(cpu_s=1, wall_s=5), "releasing communicators must not wait"
        counts.append(len(list(Path("/proc/self/fd").iterdir())))
    return counts


@REMOTE
def test_released_communicators_close_their_descriptors(transport: str) -> None:
    for counts in run_ranks(count_descriptors, 2, env={"DTCOMM_TRANSPORT": transport}):
        assert counts[1] == counts[2], counts


def describe_ucx(rank: int, world_size: int) -> dict[str, Any]:
    x = torch.full((1_000_000,), rank + 1.0)
    C.all_reduce(x, codec="int8")
    C.all_reduce(y := torch.full((3,), rank + 1.0))
    assert y.eq(3).all() and (x - 3).abs().max() < 0.1
    return C.info()["ucx"]


@requires_ucx
@pytest.mark.parametrize(
    ("chosen", "transports"), [("tcp,self", {"tcp"}), ("sm,self", {"sysv", "posix", "cma"})]
)
def test_info_lists_the_devices_and_lanes_of_ucx(chosen: str, transports: set[str]) -> None:
    for info in run_ranks(describe_ucx, 2, fresh=True, env={"DTCOMM_TRANSPORT": "ucx", "UCX_TLS": chosen}):
        assert re.fullmatch(r"1\.\d+\.\d+", info["version"])
        assert info["lanes"] and set(info["lanes"]) <= set(info["devices"])
        assert {lane.split("/")[0] for lane in info["lanes"]} <= transports


def reduce_with_one_library(rank: int, world_size: int, transport: str) -> str:
    os.environ.update({"DTCOMM_HOST_ID": f"host {rank}", "DTCOMM_TRANSPORT": transport})
    missing = mock.patch.object(between_hosts, "open_ucx", side_effect=RuntimeError("UCX is not installed"))
    with missing if rank == 1 else contextlib.nullcontext():
        try:
            C.all_reduce(torch.ones(10))
        except DtcommError as error:
            return str(error)
    return f"{C.info()['transport']}: {C.info()['no_ucx']}"


@requires_ucx
def test_ucx_has_to_be_installed_on_all_ranks() -> None:
    for text in run_ranks(reduce_with_one_library, 2, "ucx"):
        assert re.match(r"DTCOMM_TRANSPORT=ucx, but rank 0 .*: rank 1 \(.*\): UCX is not installed", text), (
            text
        )
    for text in run_ranks(reduce_with_one_library, 2, "auto"):
        assert re.match(r"sockets: rank 0 \(.*\): no RDMA device", text), text


def reduce_beside_rdma(rank: int, world_size: int, devices: list[str]) -> str:
    os.environ["DTCOMM_HOST_ID"] = f"host {rank}"
    found = between_hosts.Ucx(
        between_hosts.open_ucx().version, devices if rank == 1 else ["rc_verbs/mlx5_0:1"]
    )
    with (
        mock.patch.object(between_hosts, "open_ucx", lambda: found),
        mock.patch.object(between_hosts, "_RDMA_DEVICES", Path("/")),
    ):
        C.all_reduce(torch.ones(10))
    return f"{C.info()['transport']}: {C.info().get('no_ucx')}"


@requires_ucx
def test_ucx_is_used_where_all_ranks_have_an_rdma_device() -> None:
    assert run_ranks(reduce_beside_rdma, 2, ["tcp/eth0", "dc_mlx5/mlx5_0:1"]) == ["ucx: None"] * 2
    for text in run_ranks(reduce_beside_rdma, 2, ["tcp/eth0"]):
        assert re.match(r"sockets: rank 1 \(.*\): UCX 1\..* uses no RDMA device, only tcp/eth0", text), text


def test_transport_variable_lists_its_choices() -> None:
    assert env.VARIABLES["DTCOMM_TRANSPORT"].shared
    assert env.get("DTCOMM_TRANSPORT") in env.VARIABLES["DTCOMM_TRANSPORT"].choices
