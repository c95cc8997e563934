"""How a layer's activations travel: over which ranks, in which codecs, by which algorithm."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from dtcomm.codecs import Codec, codec

Group = dist.ProcessGroup | DeviceMesh | None


@dataclass(frozen=True, kw_only=True)
class Wire:
    """`codec` is for what the forward pass sends, `backward_codec` for gradients.

    algorithm: as of the collectives; with "one_shot" every rank's contribution is encoded where it lies in the
    tensor, so that an element's result depends on its block alone (see `invariant`).
    """

    codec: Codec
    backward_codec: Codec
    algorithm: str = "direct"
    group: dist.ProcessGroup | None = None

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

        So it is where each token has blocks of its own, rounded to nearest, and one shot sums the decoded blocks
        of all ranks in rank order.
        """
        block = self.codec.layout().block
        rounds = getattr(self.codec, "round", "nearest") == "nearest"
        return self.algorithm == "one_shot" and rounds and features % block == 0

    def parts(self, features: int, what: str) -> int:
        """`features` over the ranks; ValueError where it does not divide."""
        if features % self.ranks:
            raise ValueError(f"{what}: {features} does not divide among {self.ranks} ranks")
        return features // self.ranks


def wire(
    spec: str | Codec = "none",
    backward: str | Codec = "none",
    *,
    algorithm: str = "direct",
    group: Group = None,
) -> Wire:
    """A `Wire` from what users write; a mesh must have one dimension."""
    return Wire(codec=codec(spec), backward_codec=codec(backward), algorithm=algorithm, group=group_of(group))


def group_of(group: Group) -> dist.ProcessGroup | None:
    """The process group of a one-dimensional mesh, or what was given."""
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(f"mesh: expected one dimension, got {group.ndim}: pass mesh['tp']")
        return group.get_group()
    return group
