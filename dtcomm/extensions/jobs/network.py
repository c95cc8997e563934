"""Seconds of the collectives of a layout: groups of ranks placed on a system, in a codec, by the planner's estimates.

A group has ``size`` ranks that are ``stride`` ranks apart. All groups of an axis communicate at the same time, so each
rank has its equal share of its host's ports. Where a group reaches over more hosts than a leaf switch connects, its
share is divided by the oversubscription.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from dtcomm import codecs
from dtcomm.codecs.base import Codec
from dtcomm.extensions.jobs.estimate import LINK_REACH, candidates, estimate
from dtcomm.extensions.jobs.hardware import System

#: Algorithms that encode a contribution at most twice for each level of hosts.
LOSSY_ALGORITHMS = {
    "all_reduce": ("two_shot", "hierarchical", "hierarchical:one_shot/two_shot"),
    "reduce_scatter": ("one_shot", "hierarchical"),
    "all_gather": ("halving", "one_shot", "hierarchical"),
    "all_to_all": ("one_shot",),
}


class Network:
    """Estimates of collectives on a system, each computed once.

    Args:
        system: The hardware.
        dtype: The dtype of the tensors.
    """

    def __init__(self, system: System, dtype: torch.dtype) -> None:
        self.system, self.dtype = system, dtype
        self._seconds: dict[tuple[str, str, int, int, int], float] = {}
        self._groups: dict[tuple[int, int], System] = {}
        self._codecs: dict[str, Codec] = {}

    def hosts(self, size: int, stride: int) -> int:
        """Return over how many hosts a group reaches."""
        return min(self.system.hosts, -(-size * stride // self.system.per_host))

    def group(self, size: int, stride: int) -> System:
        """Return the system that a group has for itself while all groups communicate."""
        key = size, stride
        if key not in self._groups:
            system = self.system
            inside = min(size, max(1, system.per_host // stride))
            while size % inside:
                inside -= 1
            share = system.nics * system.between.gbytes / system.per_host
            if system.leaf_hosts and self.hosts(size, stride) > system.leaf_hosts:
                share /= system.oversubscription
            between = replace(system.between, gbytes=share)
            self._groups[key] = replace(
                system, hosts=size // inside, per_host=inside, nics=inside, between=between,
                oversubscription=1.0, leaf_hosts=0,
            )  # fmt: skip
        return self._groups[key]

    def codec(self, spec: str) -> Codec:
        """Return a codec by its spec."""
        if spec not in self._codecs:
            self._codecs[spec] = codecs.codec(spec)
        return self._codecs[spec]

    def collective(self, name: str, size: int, stride: int, nbytes: float, spec: str = "none") -> float:
        """Return the seconds of a collective.

        Args:
            name: The collective.
            size: The ranks of a group.
            stride: How many ranks apart they are.
            nbytes: Uncompressed bytes of the tensor, of all shards if it has shards.
            spec: The codec.
        """
        if size == 1 or nbytes <= 0:
            return 0.0
        key = name, spec, size, stride, int(nbytes)
        if key not in self._seconds:
            group, codec = self.group(size, stride), self.codec(spec)
            if codec.name == "none":
                algorithms = candidates(name, codec, group)
            else:
                algorithms = LOSSY_ALGORITHMS[name]
            found = [
                guess.seconds
                for algorithm in algorithms
                if (group.hosts > 1 < group.per_host or not algorithm.startswith("hierarchical"))
                and (guess := estimate(name, algorithm, codec, group, int(nbytes), self.dtype)) is not None
            ]
            if not found:
                raise ValueError(f"{name}: no estimate for groups of {size} ranks")
            self._seconds[key] = min(found)
        return self._seconds[key]

    def encoding(self, spec: str, encoded: float, decoded: float) -> float:
        """Return the seconds to encode and to decode so many elements, each with one kernel."""
        codec, device = self.codec(spec), self.system.device
        if codec.name == "none":
            return 0.0
        encode, decode = device.work(codec)
        return encoded * encode + decoded * decode + 2e-6 * device.kernel_us

    def transfer(self, stride: int, nbytes: float, spec: str = "none") -> float:
        """Return the seconds of a message to the rank ``stride`` ranks further, sent by all ranks at once."""
        if nbytes <= 0:
            return 0.0
        codec = self.codec(spec)
        encode = 0.0
        if codec.name != "none":
            numel = max(1, int(nbytes) // self.dtype.itemsize)
            nbytes = codec.wire_bytes(numel, self.dtype)
            encode = self.encoding(spec, numel, numel)
        pair = self.group(2, stride)
        port = pair.between if pair.hosts > 1 else pair.inside
        wire = nbytes / (port.bandwidth * LINK_REACH["nccl"])
        # The latency of a grouped send and receive, as nccl_model.P2P has it.
        return encode + wire + (37e-6 if pair.hosts > 1 else 11e-6)
