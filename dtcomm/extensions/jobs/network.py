"""Seconds of the messages of a layout, by the planner's estimates: collectives of groups, and tokens of experts.

A group has ``size`` ranks that are ``stride`` ranks apart. All groups of an axis communicate at the same time, so each
rank has its equal share of its host's ports. Where a group reaches over more hosts than a leaf switch connects, its
share is divided by the oversubscription.

For a layer of experts `dtcomm.moe` sends rows. A token is sent once to each rank that holds one of its experts. In the
hierarchical form, the default where there are several hosts of several ranks, it is sent once to each host, to a rank
that passes its bytes on inside the host. Outputs are summed on the way back along the same routes. A row is encoded by
itself, so its bytes are those of one row and not a share of a long tensor's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

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
#: Codec of outputs and of gradients where tokens are sent in a lossy one, as `dtcomm.moe` has it.
RETURN_CODEC = "bf16"
INT_BYTES = 4  # of the number of an expert or of a rank


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
        """Return the seconds of a collective of ``nbytes`` uncompressed bytes, of all shards if it has shards."""
        if size == 1 or nbytes <= 0:
            return 0.0
        key = name, spec, size, stride, int(nbytes)
        if key not in self._seconds:
            group, codec = self.group(size, stride), self.codec(spec)
            algorithms = candidates(name, codec, group) if codec.name == "none" else LOSSY_ALGORITHMS[name]
            if not group.hosts > 1 < group.per_host:
                algorithms = tuple(each for each in algorithms if not each.startswith("hierarchical"))
            guesses = (estimate(name, each, codec, group, int(nbytes), self.dtype) for each in algorithms)
            found = [guess.seconds for guess in guesses if guess is not None]
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


@dataclass(frozen=True, kw_only=True)
class ExpertRoutes:
    """How many rows a rank sends on average, with balanced experts.

    Args:
        tokens: Tokens of a rank.
        experts: Experts of the layer, divided evenly among the ranks.
        top_k: Experts of a token.
        hosts: Hosts of the group.
        per_host: Ranks of the group on each host.
        hierarchical: Whether rows go between hosts first and then inside them. Default: if there are several hosts
            of several ranks.
    """

    tokens: float
    experts: int
    top_k: int
    hosts: int
    per_host: int
    hierarchical: bool | None = None

    @property
    def by_hosts(self) -> bool:
        """Whether the routes are hierarchical."""
        return self.hosts > 1 < self.per_host if self.hierarchical is None else self.hierarchical

    def share(self, ranks: int) -> float:
        """Return the share of tokens with an expert on some ``ranks`` ranks, of top_k different ones, drawn evenly."""
        held = self.experts * ranks // (self.hosts * self.per_host)
        return 1 - math.comb(self.experts - held, self.top_k) / math.comb(self.experts, self.top_k)

    def messages(self) -> tuple[tuple[bool, int, float], ...]:
        """Return whether messages go to other hosts, the number of such messages of a rank, and the rows of each."""
        to_rank = self.tokens * self.share(1)
        if not self.by_hosts:
            return ((True, (self.hosts - 1) * self.per_host, to_rank), (False, self.per_host - 1, to_rank))
        # A rank passes on the rows of one rank of each host.
        return (
            (True, self.hosts - 1, self.tokens * self.share(self.per_host)),
            (False, self.per_host - 1, self.hosts * to_rank),
        )


@dataclass(frozen=True, kw_only=True)
class ExpertTraffic:
    """The bytes that a rank sends for one layer on average.

    Args:
        routes: The rows.
        features: Elements of a row.
        codec: Codec of the tokens.
        dtype: The dtype of the rows.
    """

    routes: ExpertRoutes
    features: int
    codec: str
    dtype: torch.dtype

    @property
    def return_codec(self) -> str:
        """The codec of outputs and gradients; ``"none"`` where it has nothing to do."""
        return "none" if self.codec == "none" or self.dtype is torch.bfloat16 else RETURN_CODEC

    def bytes_of(self, row_bytes: int, metadata_bytes: int = 0) -> tuple[float, float]:
        """Return the bytes of a hop's messages to other hosts and inside the host.

        Metadata of rows follow the rows of a message and are padded to whole rows.
        """
        sent = {True: 0.0, False: 0.0}
        for outside, count, rows in self.routes.messages():
            metadata = math.ceil(rows * metadata_bytes / row_bytes - 1e-9) * row_bytes
            sent[outside] += count * (rows * row_bytes + metadata)
        return sent[True], sent[False]

    def _row_bytes(self, spec: str) -> int:
        return codecs.codec(spec).wire_bytes(self.features, self.dtype)

    def _bytes_of_weights(self) -> tuple[float, float]:
        """Return the bytes of the weights of each token's experts, uncompressed in fp32."""
        return self.bytes_of(codecs.codec("none").wire_bytes(self.routes.top_k, torch.float32))

    def forward(self) -> dict[str, tuple[float, float]]:
        """Return the bytes of a forward pass to other hosts and inside the host, by what they carry."""
        # Each token is sent with the numbers of its experts and of its rank.
        numbers = INT_BYTES * (self.routes.top_k + 1)
        return {
            "tokens": self.bytes_of(self._row_bytes(self.codec), numbers),
            "weights": self._bytes_of_weights(),
            "outputs": self.bytes_of(self._row_bytes(self.return_codec)),
        }

    def backward(self) -> dict[str, tuple[float, float]]:
        """Return the bytes of a backward pass to other hosts and inside the host, by what they carry."""
        gradients = self.bytes_of(self._row_bytes(self.return_codec))
        return {
            "gradients of outputs": gradients,
            "gradients of weights": self._bytes_of_weights(),
            "gradients of tokens": gradients,
        }

    def seconds(self, network: Network, stride: int) -> tuple[float, float]:
        """Return the seconds of a forward and of a backward pass; ranks of the group are ``stride`` ranks apart."""
        forward, backward = (
            sum(self._message_seconds(network, stride, sent) for sent in messages.values())
            for messages in (self.forward(), self.backward())
        )
        arrived = self.routes.tokens * self.routes.share(1) * self.routes.hosts * self.routes.per_host
        tokens, other = (
            network.encoding(spec, self.features * self.routes.tokens, self.features * arrived)
            for spec in (self.codec, self.return_codec)
        )
        return forward + tokens + other, backward + 2 * other

    def _message_seconds(self, network: Network, stride: int, sent: tuple[float, float]) -> float:
        """Return the seconds of an all-to-all, or of both of a hierarchical one."""
        hosts, per_host = self.routes.hosts, self.routes.per_host
        if not self.routes.by_hosts:
            return _all_to_all(network, hosts * per_host, stride, sum(sent))
        between = _all_to_all(network, hosts, stride * per_host, sent[0])
        return between + _all_to_all(network, per_host, stride, sent[1])


def _all_to_all(network: Network, ranks: int, stride: int, sent: float) -> float:
    """Return the seconds in which each rank sends ``sent`` bytes to others."""
    # The collective's bytes are those of a tensor, of which a rank keeps its own share.
    return 0.0 if ranks == 1 else network.collective("all_to_all", ranks, stride, sent * ranks / (ranks - 1))
