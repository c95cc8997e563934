"""What carries payloads between hosts: how many TCP connections, with how many bytes under way, or UCX.

One TCP connection carries at most a socket buffer of bytes in a round trip: with Linux's usual 4 MiB and 75 ms that is
0.4 Gbit/s, whatever the link's rate. To far ranks the engine therefore has several connections. How many follows from
the measured round trip, the kernel's limit and the rate of the link. Nothing is sent to measure it: the first
communicator takes a rate that most links do not exceed, and while its connections are busy the engine notes what they
carry together (`remember`). Communicators that are made later to the same host, as after ranks have joined or left,
take that rate. The ranks exchange what they remember with what they exchange anyway, so both ends count alike.

UCX (https://openucx.org), which the native engine opens at run time, serves where it finds RDMA devices.
"""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import math
import os
import selectors
import socket
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dtcomm import _C, env
from dtcomm.runtime.native.copy_policy import SLOTS, SOCKET_SLOT_BYTES

FAR_MS = 2.0  # round trips below are those of a site's own network, where one connection is enough
REACHED_GBIT = 5.0  # the rate of a link that was not measured
HEADROOM = 1.25  # over a measured rate, which the connections themselves may have limited
MIN_FAR_CONNECTIONS = 4  # a lost packet slows only one of them down
MAX_CONNECTIONS = 16
MAX_SLOT_BYTES = 16 * 2**20
_PROBE_SECONDS = 2.0
_USUAL_BUFFER_BYTES = 4 * 2**20
_measured_gbit: dict[str, float] = {}  # by host
_RTT_OFFSET = 68  # of tcpi_rtt in struct tcp_info: microseconds, 32 bits

_LIBRARY = "libucp.so.0"
_WHEEL = "libucx"  # the package that wheels such as libucx-cu12 install
_RDMA_DEVICES = Path("/sys/class/infiniband")
_RDMA_TRANSPORTS = ("rc", "dc", "ud", "srd")  # rc_mlx5/mlx5_0:1 and the like
# UCX reads these when its library is opened. Its handlers of fatal signals would replace those of Python and torch.
_QUIET = {"UCX_HANDLE_ERRORS": "none"}
# UCX reads these whenever a communicator is made. It connects over TCP while it makes an endpoint. If the peer closes
# its listening socket at that moment, UCX ends this process by an assertion, unless it connects without blocking.
_KEPT = {"UCX_TCP_CONN_NB": "y"}


def round_trip_ms(listeners: Sequence[Mapping[str, Any]]) -> list[float]:
    """Measure the round trip to each listener, by the kernel's figures for a connection that is closed at once.

    It is 0 for listeners that do not answer within two seconds; connecting to those fails later, with the reason.
    """
    found = _round_trips_ms(listeners)
    # Long ones once more: a busy processor may have delayed an answer.
    far = [index for index, milliseconds in enumerate(found) if is_far(milliseconds)]
    for index, again in zip(far, _round_trips_ms([listeners[index] for index in far]), strict=True):
        found[index] = min(found[index], again or found[index])
    return found


def _round_trips_ms(listeners: Sequence[Mapping[str, Any]]) -> list[float]:
    found = [0.0] * len(listeners)
    deadline = time.monotonic() + _PROBE_SECONDS
    with selectors.DefaultSelector() as selector:
        for index, listener in enumerate(listeners):
            family = socket.AF_INET6 if ":" in listener["address"] else socket.AF_INET
            probe = socket.socket(family, socket.SOCK_STREAM)
            probe.setblocking(False)
            if probe.connect_ex((listener["address"], listener["port"])) in (0, errno.EINPROGRESS):
                selector.register(probe, selectors.EVENT_WRITE, index)
            else:
                probe.close()
        try:
            while selector.get_map() and (left := deadline - time.monotonic()) > 0:
                for key, _ in selector.select(left):
                    probe = key.fileobj  # type: ignore[assignment]
                    if not probe.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                        found[key.data] = _kernel_round_trip_ms(probe)
                    selector.unregister(probe)
                    probe.close()
        finally:
            for key in list(selector.get_map().values()):
                key.fileobj.close()  # type: ignore[union-attr]
    return found


def _kernel_round_trip_ms(connection: socket.socket) -> float:
    information = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _RTT_OFFSET + 4)
    if len(information) < _RTT_OFFSET + 4:
        return 0.0
    return float(struct.unpack_from("=I", information, _RTT_OFFSET)[0]) / 1e3


def buffer_bytes() -> int:
    """Return how many bytes the kernel keeps under way on one TCP connection at most."""
    limits = []
    for name in ("tcp_wmem", "tcp_rmem"):
        try:
            limits.append(int(Path(f"/proc/sys/net/ipv4/{name}").read_text(encoding="ascii").split()[2]))
        except (OSError, ValueError, IndexError):
            limits.append(_USUAL_BUFFER_BYTES)
    return min(limits)


def is_far(round_trip_ms: float) -> bool:
    """Whether a round trip is long enough for several connections and more bytes under way."""
    return round_trip_ms >= FAR_MS


def remember(host: str, bytes_per_second: float) -> None:
    """Note what the connections to a host carried while they were busy."""
    if bytes_per_second > 0:
        _measured_gbit[host] = bytes_per_second * 8e-9


def measured_gbit(host: str) -> float:
    """Return the rate of the link to a host as this process has measured it, in Gbit/s; 0 if it has not."""
    return _measured_gbit.get(host, 0.0)


def rate_gbit(*measured: float) -> float:
    """Return the rate that connections have to reach, from what the ends of a link have measured, 0 for nothing."""
    return max(measured) * HEADROOM or REACHED_GBIT


def connections(round_trip_ms: float, buffer_bytes: int, gbit: float = REACHED_GBIT) -> int:
    """Return how many connections carry the payloads between two ranks, to reach a rate of ``gbit``.

    ``buffer_bytes`` is the smaller one of what ``buffer_bytes`` returned on the two.
    """
    if forced := int(env.get("DTCOMM_CONNECTIONS")):
        return forced
    if not is_far(round_trip_ms):
        return 1
    needed = math.ceil(_bytes_in(round_trip_ms, gbit) / max(1, buffer_bytes))
    return min(max(needed, MIN_FAR_CONNECTIONS), MAX_CONNECTIONS)


def sockets(connections: int) -> int:
    """Return how many sockets that takes: of several connections, a further one carries what is short."""
    return connections + 1 if connections > 1 else 1


def payload_connections(sockets: Sequence[int]) -> int:
    """Return how many of the sockets to a rank carry payloads."""
    return max(1, len(sockets) - 1)


def slot_bytes(round_trip_ms: float, gbit: float = REACHED_GBIT) -> int:
    """Return the bytes of a slot with which all slots together fill the link until the first one is free again.

    That takes one and a half round trips: a payload, what the receiver makes of it, and its word that it is done.
    """
    slot = SOCKET_SLOT_BYTES
    while slot < MAX_SLOT_BYTES and slot * SLOTS < 1.5 * _bytes_in(round_trip_ms, gbit):
        slot *= 2
    return slot


def _bytes_in(round_trip_ms: float, gbit: float) -> float:
    return gbit * 1e9 / 8 * round_trip_ms / 1e3


class Ucx(NamedTuple):
    """UCX as it was opened: its version, and the transports and devices that it may use, such as "tcp/eth0"."""

    version: str
    devices: list[str]

    @property
    def rdma_devices(self) -> list[str]:
        """The devices that move data without the kernel."""
        return [name for name in self.devices if name.split("/")[0].split("_")[0] in _RDMA_TRANSPORTS]


def open_ucx() -> Ucx:
    """Open the system's UCX, else that of the package ``libucx``, once in a process.

    RuntimeError if there is none, or dtcomm was built without its headers.
    """
    for name, value in _KEPT.items():
        os.environ.setdefault(name, value)
    with _defaults(_QUIET):
        return Ucx(*_C.open_ucx([_LIBRARY, *_library_of_wheel()]))


def open_ucx_for_rdma() -> Ucx:
    """Open UCX; RuntimeError if there is none, or no RDMA device that it can use."""
    # UCX has threads and takes over parts of malloc: a process that cannot gain from it does not open it.
    if not _RDMA_DEVICES.is_dir() or not any(_RDMA_DEVICES.iterdir()):
        raise RuntimeError("no RDMA device")
    library = open_ucx()
    if not library.rdma_devices:
        raise RuntimeError(f"UCX {library.version} uses no RDMA device, only {', '.join(library.devices)}")
    return library


def _library_of_wheel() -> list[str]:
    spec = importlib.util.find_spec(_WHEEL)
    folders = [] if spec is None else list(spec.submodule_search_locations or [])
    return [str(path) for folder in folders if (path := Path(folder) / "lib" / _LIBRARY).exists()]


@contextlib.contextmanager
def _defaults(variables: dict[str, str]) -> Iterator[None]:
    """Set those environment variables that are not set, for a moment."""
    added = [name for name in variables if name not in os.environ]
    os.environ.update({name: variables[name] for name in added})
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]
