"""Finding UCX (https://openucx.org), which the native engine opens at run time, and its RDMA devices."""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from dtcomm import _C

_LIBRARY = "libucp.so.0"
_WHEEL = "libucx"  # the package that wheels such as libucx-cu12 install
_RDMA_DEVICES = Path("/sys/class/infiniband")
_RDMA_TRANSPORTS = ("rc", "dc", "ud", "srd")  # rc_mlx5/mlx5_0:1 and the like
# UCX reads these when its library is opened. Its handlers of fatal signals would replace those of Python and torch.
_QUIET = {"UCX_HANDLE_ERRORS": "none"}
# UCX reads these whenever a communicator is made. It connects over TCP while it makes an endpoint. If the peer closes
# its listening socket at that moment, UCX ends this process by an assertion, unless it connects without blocking.
_KEPT = {"UCX_TCP_CONN_NB": "y"}


class Ucx(NamedTuple):
    """UCX as it was opened: its version, and the transports and devices that it may use, such as "tcp/eth0"."""

    version: str
    devices: list[str]

    @property
    def rdma_devices(self) -> list[str]:
        """The devices that move data without the kernel."""
        return [name for name in self.devices if name.split("/")[0].split("_")[0] in _RDMA_TRANSPORTS]


def open_library() -> Ucx:
    """Open the system's UCX, else that of the package ``libucx``.

    Returns:
        What was opened, now or earlier in this process.

    Raises:
        RuntimeError: If there is none, or dtcomm was built without its headers.
    """
    for name, value in _KEPT.items():
        os.environ.setdefault(name, value)
    with _defaults(_QUIET):
        return Ucx(*_C.open_ucx([_LIBRARY, *_library_of_wheel()]))


def open_for_rdma() -> Ucx:
    """Open UCX if it can use an RDMA device.

    Raises:
        RuntimeError: If there is no such device or no UCX.
    """
    # UCX has threads and takes over parts of malloc: a process that cannot gain from it does not open it.
    if not _RDMA_DEVICES.is_dir() or not any(_RDMA_DEVICES.iterdir()):
        raise RuntimeError("no RDMA device")
    library = open_library()
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
