"""Systems: devices, the links between them, and how many there are; by name, from a file, or from links."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from dtcomm.codecs.base import Codec
from dtcomm.planner.links import Port, port


@dataclass(frozen=True, kw_only=True)
class Device:
    """What encodes and adds. ``memory_gbytes`` GB/s of its memory; kernels are taken to reach ``reach`` of it.

    ``generation`` is whose constants NCCL plans with: volta, ampere, hopper, blackwell; empty for a CPU.
    ``launch_us``: what a collective costs besides, as the 8-byte rows of published tables show.
    ``kernel_us``: the launch of a kernel; ``rates`` overrides memory's rate by codec, in GB/s of fp32 for encoding and
    decoding.
    """

    name: str
    memory_gbytes: float
    generation: str = ""
    launch_us: float = 0.0
    kernel_us: float = 0.0
    reach: float = 0.8
    rates: tuple[tuple[str, float, float], ...] = ()

    def work(self, codec: Codec) -> tuple[float, float]:
        """Seconds an element to encode, and to decode and add."""
        for spec, encode, decode in self.rates:
            if spec == str(codec):
                return 4 / (encode * 1e9), 4 / (decode * 1e9)
        many = codec.granularity * 256
        wire = codec.wire_bytes(many) / many
        seconds = (4 + wire) / (self.memory_gbytes * self.reach * 1e9)
        return seconds, seconds


DEVICES = {
    each.name: each
    for each in (
        Device(name="a100", memory_gbytes=2039, generation="ampere", launch_us=22.0, kernel_us=4.0),
        Device(name="h100", memory_gbytes=3350, generation="hopper", launch_us=3.0, kernel_us=4.0),
        Device(name="h200", memory_gbytes=4800, generation="hopper", launch_us=3.0, kernel_us=4.0),
        Device(name="b200", memory_gbytes=8000, generation="blackwell", launch_us=10.0, kernel_us=4.0),
        # One core, half in its cache: about what one of an EPYC reaches. `dtcomm tune` measures yours.
        Device(
            name="cpu",
            memory_gbytes=40.0,
            rates=(("none", 30.0, 30.0), ("int8", 29.0, 29.0), ("int4", 24.0, 24.0)),
        ),
    )
}
#: The device that is meant where only its link is named.
BY_LINK = {"nvlink3": "a100", "nvlink4": "h100", "nvlink5": "b200", "pcie": "a100", "memory": "cpu"}


@dataclass(frozen=True, kw_only=True)
class System:
    """``hosts`` hosts of ``per_host`` ranks; ``inside`` is each rank's port to the others of its host, ``between``
    one of the ``nics`` ports of a host to the others. ``cores`` of a host that CPU ranks share; 0: one for each.
    """

    name: str
    device: Device
    inside: Port
    between: Port
    hosts: int = 1
    per_host: int = 8
    nics: int = 1
    cores: int = 0

    def __post_init__(self) -> None:
        for name in ("hosts", "per_host", "nics"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: must be at least 1, got {getattr(self, name)}")

    @property
    def ranks(self) -> int:
        return self.hosts * self.per_host

    @property
    def engine(self) -> str:
        """What moves uncompressed tensors: nccl between GPUs, memory inside a host of CPU ranks, gloo between."""
        if self.device.generation:
            return "nccl"
        return "memory" if self.hosts == 1 else "gloo"

    @property
    def crowd(self) -> float:
        """Ranks that share a core."""
        return max(1.0, self.per_host / self.cores) if self.cores else 1.0

    @property
    def host_bandwidth(self) -> float:
        """Bytes a second that leave a host, and enter it at once."""
        return self.nics * self.between.bandwidth

    @property
    def rank_bandwidth(self) -> float:
        """Of those what one rank can have: it drives the ports that are its own, or shares one."""
        return max(1, self.nics // self.per_host) * self.between.bandwidth

    def of(self, hosts: int, per_host: int) -> System:
        """The same with that many hosts and ranks."""
        return replace(self, hosts=hosts, per_host=per_host)

    def as_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "device": self.device.name,
            "hosts": self.hosts,
            "per_host": self.per_host,
            "ranks": self.ranks,
            "nics": self.nics,
            "engine": self.engine,
            "inside": self.inside.as_dict(),
            "between": self.between.as_dict(),
        }


def _node(name: str, inside: str, between: str) -> System:
    return System(name=name, device=DEVICES[name], inside=port(inside), between=port(between), nics=8)


#: The usual nodes of 8 GPUs with a network port for each.
SYSTEMS = {
    "a100": _node("a100", "nvlink3", "hdr"),
    "h100": _node("h100", "nvlink4", "ndr"),
    "h200": _node("h200", "nvlink4", "ndr"),
    "b200": _node("b200", "nvlink5", "ndr"),
    "local": System(
        name="local", device=DEVICES["cpu"], inside=port("memory"), between=port("10gbit"), per_host=2
    ),
}


def system(name: str) -> System:
    """One of ``SYSTEMS``."""
    if name not in SYSTEMS:
        raise ValueError(f"system: {name!r} is not one of {', '.join(SYSTEMS)}")
    return SYSTEMS[name]


def from_links(inside: str, between: str, device: str | None = None, nics: int = 1) -> System:
    """Hosts whose ranks are joined by ``inside`` and which have ``nics`` ports ``between`` them."""
    within, across = port(inside), port(between)
    if device is None:
        kinds = [BY_LINK[each] for each in (inside.lower(), within.kind) if each in BY_LINK]
        device = kinds[0] if kinds else {"nvlink": "h100"}.get(within.kind, "cpu")
    if device not in DEVICES:
        raise ValueError(f"device: {device!r} is not one of {', '.join(DEVICES)}")
    name = f"{inside} inside, {between} between"
    return System(name=name, device=DEVICES[device], inside=within, between=across, nics=nics)


def from_dict(found: Mapping[str, Any]) -> System:
    """From a file: ``{"device": "h100", "hosts": 4, "per_host": 8, "nics": 8, "inside": "nvlink4", "between":
    {"kind": "rdma", "gbytes": 48, "latency_us": 2}}``. A link is a name or its figures; ``system`` starts from a node.
    """
    known = ("name", "system", "device", "hosts", "per_host", "nics", "cores", "inside", "between")
    if unknown := sorted(set(found) - set(known)):
        raise ValueError(f"topology: {unknown[0]!r} is not one of {', '.join(known)}")
    base = system(found["system"]) if "system" in found else SYSTEMS["local"]
    changes: dict[str, Any] = {"name": str(found.get("name", "from a file"))}
    if "device" in found:
        if found["device"] not in DEVICES:
            raise ValueError(f"device: {found['device']!r} is not one of {', '.join(DEVICES)}")
        changes["device"] = DEVICES[found["device"]]
    for side in ("inside", "between"):
        if side in found:
            changes[side] = port(found[side])
    for count in ("hosts", "per_host", "nics", "cores"):
        if count in found:
            if not isinstance(found[count], int) or isinstance(found[count], bool):
                raise ValueError(f"{count}: expected a whole number, got {found[count]!r}")
            changes[count] = found[count]
    return replace(base, **changes)
