"""How a layer's activations travel: over which ranks, in which codecs, by which algorithm."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from dtcomm.codecs import Codec, codec
from dtcomm.collectives.compression_payoff import compression_pays

Group = dist.ProcessGroup | DeviceMesh | None
#: Messages up to so many uncompressed bytes (a token or a few) travel uncompressed where the planner finds that faster.
SMALL_BYTES = 64 * 1024
NONE = codec("none")
#: Algorithms under which no result depends on where in the message an element is.
INVARIANT = ("one_shot", "two_shot_symmetric")


@dataclass(kw_only=True)
class Traffic:
    """What a layer's forward pass has sent since it was made: calls, elements, bytes of their payloads; how many of the
    calls took the latency path, and why the last of them did."""

    calls: int = 0
    elements: int = 0
    payload_bytes: int = 0
    uncompressed: int = 0
    why: str = ""

    def count(self, numel: int, payload: int) -> None:
        self.calls += 1
        self.elements += numel
        self.payload_bytes += payload


@dataclass(frozen=True, kw_only=True)
class Wire:
    """`codec` is for what the forward pass sends, `backward_codec` for gradients.

    algorithm: a name of the collectives, or "two_shot_symmetric" (`dtcomm.tp.flash_all_reduce`: every rank's
    contribution is encoded, the chunk owner's included) or "auto": one shot on two ranks, which
    send no more in it than in two and encode an activation once instead of twice, and direct on others. With "one_shot"
    and "two_shot_symmetric" every rank's contribution is encoded where it lies in the tensor, so that a result depends
    on its block alone (see `invariant`). latency: small messages may travel uncompressed; never with those two.
    """

    codec: Codec
    backward_codec: Codec
    algorithm: str = "auto"
    group: dist.ProcessGroup | None = None
    latency: bool = True
    traffic: Traffic = field(default_factory=Traffic, compare=False)
    #: codec, backward_codec and the group's name, for compiled code.
    specs: tuple[str, str] = ("none", "none")
    name: str = ""

    @property
    def ranks(self) -> int:
        """How many ranks share a layer."""
        return dist.get_world_size(self.group)

    @property
    def rank(self) -> int:
        """This rank among them."""
        return dist.get_rank(self.group)

    def invariant(self, features: int) -> bool:
        """Does a token's result not depend on what else is in the batch? `features` is the last dimension.

        So it is where each token has blocks of its own (sparse codecs choose
        among many tokens), unrotated and rounded to nearest, and where all ranks' decoded
        blocks are added in rank order: in one shot, or in the two-step sum.
        """
        layout = self.codec.layout()
        own = layout.kept == 0 and not self.codec.needs_agreement and features % layout.block == 0
        rounds = getattr(self.codec, "round", "nearest") == "nearest"
        plain = getattr(self.codec, "rotate", "none") == "none"
        return self.algorithm in INVARIANT and rounds and plain and own

    def codec_for(self, numel: int, dtype: torch.dtype, *, backward: bool = False) -> Codec:
        """What a sum of so many elements travels in: none where the message is small and the planner says so."""
        which = self.backward_codec if backward else self.codec
        small = numel * dtype.itemsize <= SMALL_BYTES
        if self.latency and small and self.algorithm not in INVARIANT and not which.lossless(dtype):
            verdict = compression_pays(which, numel, dtype, self.group)
            if not verdict.pays:
                self.traffic.uncompressed += 1
                self.traffic.why = verdict.why
                return NONE
        return which

    def shots(self, codec: Codec, dtype: torch.dtype) -> str:
        """The collectives' algorithm for a sum in this codec; the two-step sum of what loses nothing is any."""
        if self.algorithm not in ("auto", "two_shot_symmetric"):
            return self.algorithm
        return algorithm(self.ranks, codec, dtype) if self.algorithm == "auto" else "direct"

    def parts(self, features: int, what: str) -> int:
        """`features` over the ranks; ValueError where it does not divide."""
        if features % self.ranks:
            raise ValueError(f"{what}: {features} does not divide among {self.ranks} ranks")
        return features // self.ranks


def algorithm(ranks: int, codec: Codec, dtype: torch.dtype) -> str:
    """What "auto" is."""
    own_blocks = not codec.needs_agreement and codec.layout().kept == 0
    return "one_shot" if ranks == 2 and own_blocks and not codec.lossless(dtype) else "direct"


def wire(
    spec: str | Codec = "none",
    backward: str | Codec = "none",
    *,
    algorithm: str = "auto",
    group: Group = None,
    latency: bool = True,
) -> Wire:
    """A `Wire` from what users write; a mesh must have one dimension."""
    own = group_of(group)
    forward, back = codec(spec), codec(backward)
    return Wire(
        codec=forward,
        backward_codec=back,
        algorithm=algorithm,
        group=own,
        latency=latency,
        specs=(str(forward), str(back)),
        name=(dist.group.WORLD if own is None else own).group_name,  # type: ignore[union-attr]
    )


def group_of(group: Group) -> dist.ProcessGroup | None:
    """The process group of a one-dimensional mesh, or what was given."""
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(f"mesh: expected one dimension, got {group.ndim}: pass mesh['tp']")
        return group.get_group()
    return group
