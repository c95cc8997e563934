"""Links by name: what one port of each can carry, from published figures.

``gbytes`` is what reaches the application each way at once, in GB/s (1e9): for NVLink and PCIe the rates that NCCL
plans with (src/graph/topo.h: 20.0, 20.6 and 40.1 GB/s a lane of NVLink 3, 4 and 5, and 12 lanes or 18; 12 GB/s for
PCIe 3 x16, doubling with each generation); for InfiniBand and RoCE the line rate less headers and acknowledgements
(NVIDIA expects 46 to 48 GB/s of an NDR port); for Ethernet up to 50 Gbit/s what TCP leaves of the line with frames of
1500 bytes. ``latency`` is one way, from one application to the other.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

US = 1e-6


@dataclass(frozen=True, kw_only=True)
class Port:
    """One port: ``gbytes`` GB/s each way, ``latency_us`` one way, ``message_us`` that each message costs beside its
    bytes. ``kind``: nvlink, pcie, rdma, tcp or memory.
    """

    kind: str
    gbytes: float
    latency_us: float
    message_us: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind: {self.kind!r} is not one of {', '.join(KINDS)}")
        if not self.gbytes > 0:
            raise ValueError(f"gbytes: must be over 0, got {self.gbytes}")
        for name in ("latency_us", "message_us"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name}: must be at least 0, got {getattr(self, name)}")

    @property
    def bandwidth(self) -> float:
        """Bytes a second."""
        return self.gbytes * 1e9

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


KINDS = ("nvlink", "pcie", "rdma", "tcp", "memory")
_TCP_SHARE = 1448 / 1538  # of the bits on an Ethernet, those of the user
_RDMA_SHARE = 0.96


def _nvlink(lanes: int, gbytes: float) -> Port:
    return Port(kind="nvlink", gbytes=round(lanes * gbytes, 3), latency_us=1.0)


def _rdma(gbit: float, latency_us: float) -> Port:
    return Port(kind="rdma", gbytes=gbit / 8 * _RDMA_SHARE, latency_us=latency_us, message_us=0.5)


def _tcp(gbit: float) -> Port:
    return Port(kind="tcp", gbytes=round(gbit / 8 * _TCP_SHARE, 4), latency_us=30.0, message_us=10.0)


PORTS: dict[str, Port] = {
    "nvlink3": _nvlink(12, 20.0),
    "nvlink4": _nvlink(18, 20.6),
    "nvlink5": _nvlink(18, 40.1),
    "pcie3": Port(kind="pcie", gbytes=12.0, latency_us=1.5),
    "pcie4": Port(kind="pcie", gbytes=24.0, latency_us=1.5),
    "pcie5": Port(kind="pcie", gbytes=48.0, latency_us=1.5),
    "hdr": _rdma(200, 1.5),
    "ndr": _rdma(400, 1.5),
    "xdr": _rdma(800, 1.5),
    "1gbit": _tcp(1),
    "10gbit": _tcp(10),
    "25gbit": _tcp(25),
    "50gbit": _tcp(50),
    # From here on hosts talk past the kernel (RoCE), or they could not fill the line.
    "100gbit": _rdma(100, 3.0),
    "200gbit": _rdma(200, 3.0),
    "400gbit": _rdma(400, 3.0),
    "800gbit": _rdma(800, 3.0),
    # Ranks of a host that share memory; `dtcomm tune` measures yours.
    "memory": Port(kind="memory", gbytes=100.0, latency_us=0.5),
}
ALIASES = {"pcie": "pcie4", "infiniband": "ndr", "ib": "ndr", "shm": "memory", "nvlink": "nvlink4"}


def port(text: str | Mapping[str, Any]) -> Port:
    """A port by its name (``nvlink4``, ``400gbit``; any number of gbit will do) or its fields."""
    if isinstance(text, Mapping):
        known = {field.name for field in fields(Port)}
        if unknown := sorted(set(text) - known):
            raise ValueError(f"link: {unknown[0]!r} is not one of {', '.join(sorted(known))}")
        try:
            return Port(**text)
        except TypeError as error:
            raise ValueError(f"link: {error}") from None
    name = ALIASES.get(text.lower(), text.lower())
    if name in PORTS:
        return PORTS[name]
    number = name.removesuffix("gbit")
    if number != name:
        try:
            gbit = float(number)
            return _tcp(gbit) if gbit <= 50 else _rdma(gbit, 3.0)
        except ValueError:
            pass
    raise ValueError(f"link: {text!r} is not one of {', '.join(PORTS)}, nor a number of gbit")


def read(path: Path) -> dict[str, Any]:
    """A JSON object from a file; ValueError that names the file where it is none."""
    try:
        found = json.loads(path.read_text())
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path}: expected a JSON object, got {type(found).__name__}")
    return found
