"""Hardware as the planner sees it: ports, devices and systems.

`Port` is one network or memory port, by name or by its figures. `System` is a number of hosts of equal ranks, which
``dtcomm plan`` describes by a name, from a file, or from its links.

``gbytes`` of a port is what reaches the application in each direction at once, in GB/s (1e9). For NVLink and PCIe these
are the rates that NCCL plans with (src/graph/topo.h: 20.0, 20.0, 20.6 and 40.1 GB/s a lane of NVLink 2 to 5, and 6, 12
or 18 lanes; 12 GB/s for PCIe 3 x16, doubling with each generation). For InfiniBand and RoCE they are the line rate less
headers and acknowledgements (NVIDIA expects 46 to 48 GB/s of an NDR port). For Ethernet of up to 50 Gbit/s they are
what TCP leaves of the line with frames of 1500 bytes. ``latency`` is one way, from one application to the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from dtcomm.arguments import suggest
from dtcomm.codecs.base import Codec


def not_one_of(name: object, valid: Iterable[str]) -> str:
    """Return the message for a name that is not valid: the valid ones, and the one that was probably meant."""
    names = list(valid)
    return f"{name!r} is not one of {', '.join(names)}{suggest(str(name).lower(), names)}"


def require_least(owner: object, **least: float) -> None:
    """Raise ValueError, which names the field, if a field of ``owner`` is not at least so large."""
    for name, bound in least.items():
        if not getattr(owner, name) >= bound:
            raise ValueError(f"{name}: must be at least {bound}, got {getattr(owner, name)}")


@dataclass(frozen=True, kw_only=True)
class Port:
    """One port.

    Args:
        kind: nvlink, pcie, rdma, tcp or memory.
        gbytes: GB/s (1e9) in each direction at once.
        latency_us: Microseconds one way.
        message_us: Microseconds that each message occupies the port in addition to its bytes.
    """

    kind: str
    gbytes: float
    latency_us: float
    message_us: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind: {not_one_of(self.kind, KINDS)}")
        if not self.gbytes > 0:
            raise ValueError(f"gbytes: must be over 0, got {self.gbytes}")
        require_least(self, latency_us=0, message_us=0)

    @property
    def bandwidth(self) -> float:
        """Bytes per second."""
        return self.gbytes * 1e9


KINDS = ("nvlink", "pcie", "rdma", "tcp", "memory")
_TCP_SHARE = 1448 / 1538  # the user's share of the bits on an Ethernet
_RDMA_SHARE = 0.96


def _nvlink(lanes: int, gbytes: float) -> Port:
    return Port(kind="nvlink", gbytes=round(lanes * gbytes, 3), latency_us=1.0)


def _rdma(gbit: float, latency_us: float) -> Port:
    return Port(kind="rdma", gbytes=gbit / 8 * _RDMA_SHARE, latency_us=latency_us, message_us=0.5)


def _tcp(gbit: float) -> Port:
    return Port(kind="tcp", gbytes=round(gbit / 8 * _TCP_SHARE, 4), latency_us=30.0, message_us=10.0)


PORTS: dict[str, Port] = {
    "nvlink2": _nvlink(6, 20.0),
    "nvlink3": _nvlink(12, 20.0),
    "nvlink4": _nvlink(18, 20.6),
    "nvlink5": _nvlink(18, 40.1),
    "pcie3": Port(kind="pcie", gbytes=12.0, latency_us=1.5),
    "pcie4": Port(kind="pcie", gbytes=24.0, latency_us=1.5),
    "pcie5": Port(kind="pcie", gbytes=48.0, latency_us=1.5),
    "edr": _rdma(100, 1.5),
    "hdr": _rdma(200, 1.5),
    "ndr": _rdma(400, 1.5),
    "xdr": _rdma(800, 1.5),
    "1gbit": _tcp(1),
    "10gbit": _tcp(10),
    "25gbit": _tcp(25),
    "50gbit": _tcp(50),
    # Faster lines are filled only by bypassing the kernel (RoCE).
    "100gbit": _rdma(100, 3.0),
    "200gbit": _rdma(200, 3.0),
    "400gbit": _rdma(400, 3.0),
    "800gbit": _rdma(800, 3.0),
    # Ranks of a host that share memory. `dtcomm tune` measures the actual machine.
    "memory": Port(kind="memory", gbytes=100.0, latency_us=0.5),
}
ALIASES = {"pcie": "pcie4", "infiniband": "ndr", "ib": "ndr", "shm": "memory", "nvlink": "nvlink4"}


def find_port(name_or_fields: str | Mapping[str, Any]) -> Port:
    """Return a port by its name (``nvlink4``, ``400gbit``, or any other number of gbit) or from its fields."""
    if isinstance(name_or_fields, Mapping):
        known = {field.name for field in fields(Port)}
        if unknown := sorted(set(name_or_fields) - known):
            raise ValueError(f"link: {not_one_of(unknown[0], sorted(known))}")
        try:
            return Port(**name_or_fields)
        except TypeError as error:
            raise ValueError(f"link: {error}") from None
    name = ALIASES.get(name_or_fields.lower(), name_or_fields.lower())
    if name in PORTS:
        return PORTS[name]
    number = name.removesuffix("gbit")
    if number != name:
        try:
            gbit = float(number)
            return _tcp(gbit) if gbit <= 50 else _rdma(gbit, 3.0)
        except ValueError:
            pass
    names = [*PORTS, "or a number of gbit"]
    raise ValueError(f"link: {not_one_of(name_or_fields, names)}")


@dataclass(frozen=True, kw_only=True)
class Device:
    """A processor that encodes and sums.

    Args:
        name: Its name. memory_gbytes: GB/s of its memory. generation: The GPU generation whose constants NCCL plans
            with: volta, ampere, hopper, blackwell; empty for a CPU.
        launch_us: Microseconds that a collective costs besides its messages, as 8-byte rows of published tables show.
        kernel_us: Microseconds of launching a kernel.
        reach: The share of the memory bandwidth that kernels reach.
        rates: (codec, encode, decode) in GB/s of fp32, for codecs whose rate is not that of the memory.
        memory_gib: GiB that a rank's tensors can use; 0 if that is not known.
        tflops: (type, TFLOP/s) of matrix products, dense, by the type in which they are computed.
    """

    name: str
    memory_gbytes: float
    generation: str = ""
    launch_us: float = 0.0
    kernel_us: float = 0.0
    reach: float = 0.8
    rates: tuple[tuple[str, float, float], ...] = ()
    memory_gib: float = 0.0
    tflops: tuple[tuple[str, float], ...] = ()

    @property
    def memory_bytes(self) -> int:
        """Bytes that a rank's tensors can use; 0 if that is not known."""
        return int(self.memory_gib * 2**30)

    def peak_flops(self, compute: str) -> float:
        """Return the peak FLOP/s of matrix products in fp32, tf32, bf16 or fp16; ValueError if it is not known."""
        peaks = dict(self.tflops)
        if not peaks:
            raise ValueError(f"no peak FLOP/s is known for the device {self.name}")
        if compute not in peaks:
            raise ValueError(f"compute: {not_one_of(compute, peaks)}")
        return peaks[compute] * 1e12

    def work(self, codec: Codec) -> tuple[float, float]:
        """Return the seconds per element to encode, and to decode and sum."""
        for spec, encode, decode in self.rates:
            if spec == str(codec):
                return 4 / (encode * 1e9), 4 / (decode * 1e9)
        numel = codec.granularity * 256
        wire_bytes = codec.wire_bytes(numel) / numel
        seconds = (4 + wire_bytes) / (self.memory_gbytes * self.reach * 1e9)
        return seconds, seconds


def _peaks(fp32: float, tf32: float, half: float) -> tuple[tuple[str, float], ...]:
    return (("fp32", fp32), ("tf32", tf32), ("bf16", half), ("fp16", half))


def _gpu(
    name: str, generation: str, memory: tuple[float, float], launch_us: float, tflops: tuple[tuple[str, float], ...],
) -> Device:  # fmt: skip
    gbytes, gib = memory
    kernel_us = 5.0 if generation == "volta" else 4.0
    return Device(
        name=name, memory_gbytes=gbytes, generation=generation, launch_us=launch_us, kernel_us=kernel_us,
        memory_gib=gib, tflops=tflops,
    )  # fmt: skip


_CPU_RATES = (("none", 30.0, 30.0), ("int8", 29.0, 29.0), ("int4", 24.0, 24.0))
# Peak TFLOP/s are NVIDIA's for the SXM boards (data sheets of the A100, H100 and H200, and of the HGX B200), without
# sparsity: where a data sheet has only figures with sparsity (H100, H200, B200), they are halved. fp32 is that of the
# CUDA cores, the others are of tensor cores. Memory is what is left for tensors of the 80, 80, 141 and 180 GB that the
# data sheets name: about what torch reports as a device's total capacity. The V100's (32 GB) tensor cores have fp16
# alone. Boards for PCIe slots are those of the same data sheets. Ada's boards have Ampere's constants. Products of the
# GeForce boards are those that sum in fp32.
DEVICES = {
    device.name: device
    for device in (
        # Name, generation, (GB/s of the memory, GiB), microseconds of a collective besides its messages, peaks.
        _gpu("a100", "ampere", (2039, 79), 22.0, _peaks(19.5, 156, 312)),
        _gpu("h100", "hopper", (3350, 79), 3.0, _peaks(67, 494.7, 989.4)),
        _gpu("h200", "hopper", (4800, 139), 3.0, _peaks(67, 494.7, 989.4)),
        _gpu("b200", "blackwell", (8000, 178), 10.0, _peaks(75, 1100, 2250)),
        _gpu("v100", "volta", (900, 31), 22.0, (("fp32", 15.7), ("fp16", 125))),
        _gpu("v100-pcie", "volta", (900, 31), 22.0, (("fp32", 14), ("fp16", 112))),
        _gpu("a100-pcie", "ampere", (1935, 79), 22.0, _peaks(19.5, 156, 312)),
        _gpu("h100-pcie", "hopper", (2000, 79), 3.0, _peaks(51, 378, 756)),
        _gpu("a40", "ampere", (696, 44), 22.0, _peaks(37.4, 74.8, 149.7)),
        _gpu("l40s", "ampere", (864, 44), 22.0, _peaks(91.6, 183, 362)),
        _gpu("4090", "ampere", (1008, 23.5), 22.0, _peaks(82.6, 82.6, 165.2)),
        _gpu("5090", "blackwell", (1792, 31), 10.0, _peaks(104.8, 104.8, 209.5)),
        _gpu("rtx-pro-6000", "blackwell", (1792, 94), 10.0, _peaks(125, 251.9, 503.8)),
        _gpu("dgx-spark", "blackwell", (273, 119), 10.0, _peaks(31, 62.5, 125)),
        # One core that works half in its cache: about an EPYC's. `dtcomm tune` measures the actual machine.
        Device(name="cpu", memory_gbytes=40.0, rates=_CPU_RATES),
    )
}
#: The device that a link's name implies.
BY_LINK = {"nvlink2": "v100", "nvlink3": "a100", "nvlink4": "h100", "nvlink5": "b200"}
BY_LINK |= {"pcie": "a100", "memory": "cpu"}


@dataclass(frozen=True, kw_only=True)
class System:
    """A number of equal hosts with ``per_host`` ranks each, every one on a ``device``.

    Args:
        inside: Each rank's port to the other ranks of its host.
        between: One of the host's ``nics`` ports to other hosts.
        cores: Cores of a host, shared by its CPU ranks; 0 means one for each rank.
        leaf_hosts: Hosts whose ports meet at the same leaf switches; 0 means all of them.
        oversubscription: By how much the links above the leaf switches are too few, 1 if they are not.
        implied_device: Whether the device is a guess from the name of the link inside hosts.
    """

    name: str
    device: Device
    inside: Port
    between: Port
    hosts: int = 1
    per_host: int = 8
    nics: int = 1
    cores: int = 0
    leaf_hosts: int = 0
    oversubscription: float = 1.0
    implied_device: bool = False

    def __post_init__(self) -> None:
        require_least(self, hosts=1, per_host=1, nics=1, leaf_hosts=0, oversubscription=1)

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return self.hosts * self.per_host

    @property
    def engine(self) -> str:
        """What moves uncompressed tensors: nccl for GPUs; for CPU ranks memory inside a host, gloo between hosts."""
        if self.device.generation:
            return "nccl"
        return "memory" if self.hosts == 1 else "gloo"

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader must know of the system: that its GPU is a guess."""
        if not (self.implied_device and self.device.generation):
            return ()
        name, gib, peak = self.device.name, self.device.memory_gib, dict(self.device.tflops)
        return (
            f"the device is assumed to be {name} ({gib:g} GiB, {peak.get('bf16', peak['fp16']):g} TFLOP/s) because the "
            "links do not name one: give --device, for example --device 4090 or --device NAME,memory=24G,bf16=165T,"
            "bandwidth=1008G",
        )

    @property
    def ranks_per_core(self) -> float:
        """How many ranks share a core."""
        return max(1.0, self.per_host / self.cores) if self.cores else 1.0

    @property
    def host_bandwidth(self) -> float:
        """Bytes per second that leave a host, and as many that enter it at the same time."""
        return self.nics * self.between.bandwidth / self._above_leaves

    @property
    def rank_bandwidth(self) -> float:
        """Bytes per second of the host's bandwidth that one rank can use: it has ports of its own, or shares one."""
        return max(1, self.nics // self.per_host) * self.between.bandwidth / self._above_leaves

    @property
    def _above_leaves(self) -> float:
        return self.oversubscription if self.leaf_hosts and self.hosts > self.leaf_hosts else 1.0

    def resized(self, hosts: int, per_host: int) -> System:
        """Return the same system with other numbers of hosts and ranks."""
        return replace(self, hosts=hosts, per_host=per_host)

    def as_dict(self) -> dict[str, Any]:
        """Return a description, for JSON."""
        names = ("name", "hosts", "per_host", "ranks", "nics", "engine")
        return {
            **{name: getattr(self, name) for name in names}, "device": self.device.name,
            "device_memory_bytes": self.device.memory_bytes or None, "device_is_assumed": bool(self.notes),
            "inside": asdict(self.inside), "between": asdict(self.between),
        }  # fmt: skip


def _node(name: str, inside: str, between: str, nics: int = 8, per_host: int = 8) -> System:
    return System(
        name=name, device=DEVICES[name], inside=find_port(inside), between=find_port(between), nics=nics,
        per_host=per_host,
    )  # fmt: skip


#: Nodes of 8 GPUs: with NVLink and a network port for each (the V100's have four), or in PCIe slots with two ports;
#: workstations of one GPU; and this machine.
SYSTEMS = {
    "a100": _node("a100", "nvlink3", "hdr"), "h100": _node("h100", "nvlink4", "ndr"),
    "h200": _node("h200", "nvlink4", "ndr"), "b200": _node("b200", "nvlink5", "ndr"),
    "v100": _node("v100", "nvlink2", "edr", nics=4), "v100-pcie": _node("v100-pcie", "pcie3", "edr", nics=2),
    "a100-pcie": _node("a100-pcie", "pcie4", "hdr", nics=2), "h100-pcie": _node("h100-pcie", "pcie5", "ndr", nics=2),
    "a40": _node("a40", "pcie4", "100gbit", nics=1), "l40s": _node("l40s", "pcie4", "200gbit", nics=2),
    "4090": _node("4090", "pcie4", "10gbit", nics=1, per_host=1),
    "5090": _node("5090", "pcie5", "10gbit", nics=1, per_host=1),
    "rtx-pro-6000": _node("rtx-pro-6000", "pcie5", "10gbit", nics=1, per_host=1),
    "dgx-spark": _node("dgx-spark", "pcie5", "200gbit", nics=1, per_host=1),
    "local": replace(_node("cpu", "memory", "10gbit", nics=1), name="local", per_host=2),
}  # fmt: skip


def find_system(name: str) -> System:
    """Return one of `SYSTEMS`, in any case; ValueError lists the names."""
    if name.lower() not in SYSTEMS:
        raise ValueError(f"system: {not_one_of(name, SYSTEMS)}")
    return SYSTEMS[name.lower()]


DEVICE_FIGURES = {"memory": "G", "bandwidth": "G", "bf16": "T", "fp16": "T", "tf32": "T", "fp32": "T"}


def find_device(text: str) -> Device:
    """Return one of `DEVICES`, in any case, or the device of ``NAME,memory=24G,bf16=165T,bandwidth=1008G``.

    Figures (GiB, TFLOP/s, GB/s) replace those of a known name. ``like=NAME`` has the constants of another device.
    """
    name, *parts = (part.strip().lower() for part in text.split(","))
    if not parts and name not in DEVICES:
        raise ValueError(
            f"device: {not_one_of(text, [*DEVICES, 'NAME,memory=24G,bf16=165T,bandwidth=1008G'])}"
        )
    figures = dict(part.partition("=")[::2] for part in parts)
    base = DEVICES.get(figures.pop("like", name if name in DEVICES else "a40"), DEVICES["a40"])
    values: dict[str, float] = {}
    for key, figure in figures.items():
        if key not in DEVICE_FIGURES:
            raise ValueError(f"device: {not_one_of(key, [*DEVICE_FIGURES, 'like'])}")
        try:
            values[key] = float(figure.removesuffix("b").removesuffix(DEVICE_FIGURES[key].lower()))
        except ValueError:
            values[key] = 0.0
        if not 0 < values[key] < 1e6:
            raise ValueError(f"device: {key}={figure}: expected a number such as 24{DEVICE_FIGURES[key]}")
    if name not in DEVICES and (missing := {"memory", "bandwidth", "bf16"} - values.keys()):
        raise ValueError(f"device: {name} is not known, so give {'=, '.join(sorted(missing))}= too")
    half = values.get("bf16", 0.0)
    tflops = dict(base.tflops if name in DEVICES else _peaks(half / 4, half / 2, half))
    tflops |= {key: value for key, value in values.items() if key in tflops}
    memory_gib, gbytes = values.get("memory", base.memory_gib), values.get("bandwidth", base.memory_gbytes)
    return replace(base, name=name, memory_gib=memory_gib, memory_gbytes=gbytes, tflops=tuple(tflops.items()))


def system_from_links(inside: str, between: str, device: str | None = None, nics: int = 1) -> System:
    """Return a system of hosts described by its links; without a device that which ``inside`` implies."""
    port_inside, port_between = find_port(inside), find_port(between)
    guessed = device is None
    if device is None:
        implied = [BY_LINK[link] for link in (inside.lower(), port_inside.kind) if link in BY_LINK]
        device = implied[0] if implied else {"nvlink": "h100"}.get(port_inside.kind, "cpu")
    name = f"{inside} inside, {between} between"
    return System(
        name=name, device=find_device(device), inside=port_inside, between=port_between, nics=nics,
        implied_device=guessed,
    )  # fmt: skip


def system_from_dict(description: Mapping[str, Any]) -> System:
    """Return the system that a JSON file describes.

    For example ``{"device": "h100", "hosts": 4, "per_host": 8, "nics": 8, "inside": "nvlink4", "between": {"kind":
    "rdma", "gbytes": 48, "latency_us": 2}}``. A link is a name or its figures. ``system`` names a system to start from.
    """
    known = "name system device hosts per_host nics cores inside between leaf_hosts oversubscription".split()
    if unknown := sorted(set(description) - set(known)):
        raise ValueError(f"topology: {not_one_of(unknown[0], known)}")
    base = find_system(str(description["system"])) if "system" in description else SYSTEMS["local"]
    changes: dict[str, Any] = {"name": str(description.get("name", "from a file"))}
    if "device" in description:
        changes["device"] = find_device(str(description["device"]))
    for side in ("inside", "between"):
        if side in description:
            changes[side] = find_port(description[side])
    if "oversubscription" in description:
        changes["oversubscription"] = float(description["oversubscription"])
    for count in ("hosts", "per_host", "nics", "cores", "leaf_hosts"):
        if count in description:
            if not isinstance(description[count], int) or isinstance(description[count], bool):
                raise ValueError(f"{count}: expected a whole number, got {description[count]!r}")
            changes[count] = description[count]
    return replace(base, **changes)
