"""Settings of a tensor-parallel layer's communication: ranks, codecs and algorithm.

Every layer, style and conversion function of `dtcomm.tp` makes one `CommConfig` with `make_comm_config`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from dtcomm.codecs import Codec, codec
from dtcomm.collectives import Algorithm
from dtcomm.collectives._dispatch import require_algorithm
from dtcomm.collectives.group_ops import compression_pays

GroupOrMesh = dist.ProcessGroup | DeviceMesh | None
#: Up to this many uncompressed bytes (one token, or a few) a message is sent uncompressed if the planner predicts that
#: to be faster.
SMALL_MESSAGE_BYTES = 64 * 1024
NONE = codec("none")
#: Algorithms whose result for an element does not depend on the element's position in the message.
POSITION_INDEPENDENT = ("one_shot", "two_shot_symmetric")


@dataclass(kw_only=True)
class LayerTraffic:
    """Counters of a layer's forward communication since the layer was made.

    Attributes:
        calls: Number of sums.
        elements: Elements summed.
        payload_bytes: Bytes of the encoded elements.
        uncompressed: Number of calls that were sent uncompressed because that is faster (the latency path).
        reason: Why the most recent of them was, with the predicted times.
    """

    calls: int = 0
    elements: int = 0
    payload_bytes: int = 0
    uncompressed: int = 0
    reason: str = ""

    def count(self, numel: int, payload_bytes: int) -> None:
        """Add one call."""
        self.calls += 1
        self.elements += numel
        self.payload_bytes += payload_bytes


@dataclass(frozen=True, kw_only=True)
class CommConfig:
    """Communication settings that all collectives of one layer share; `make_comm_config` builds one from spec strings.

    Attributes:
        codec: Codec of what the forward pass sends.
        backward_codec: Codec of the gradients that the backward pass sends.
        algorithm: An algorithm of `dtcomm.all_reduce`, a schedule as its text; ``"two_shot_symmetric"`` for the
            all-reduce of Flash Communication (`dtcomm.tp.flash_all_reduce`); or ``"auto"``: one-shot on two ranks,
            where it sends no more bytes than two-shot and encodes each activation once instead of twice, and
            ``"direct"`` on more ranks. With ``"one_shot"`` and ``"two_shot_symmetric"`` every rank's contribution is
            encoded at its position in the tensor, so a result depends only on the elements of its own block (see
            `batch_invariant`).
        group: Process group; None is the default group.
        latency: Send small messages uncompressed where the planner predicts that to be faster. Never done with
            ``"one_shot"`` and ``"two_shot_symmetric"``, whose results would then depend on the message's size.
        traffic: Counters of the forward pass.
        codec_specs: The specs of ``codec`` and ``backward_codec``, for compiled code.
        group_name: The name of the group, for compiled code.
    """

    codec: Codec
    backward_codec: Codec
    algorithm: str = "auto"
    group: dist.ProcessGroup | None = None
    latency: bool = True
    traffic: LayerTraffic = field(default_factory=LayerTraffic, compare=False)
    codec_specs: tuple[str, str] = ("none", "none")
    group_name: str = ""

    @property
    def world_size(self) -> int:
        """Number of ranks that share the layer."""
        return dist.get_world_size(self.group)

    @property
    def rank(self) -> int:
        """This process's rank in the group."""
        return dist.get_rank(self.group)

    def batch_invariant(self, features: int) -> bool:
        """Return whether a token's result is independent of the other tokens in the batch.

        It is if every token has blocks of its own (sparse codecs choose among the elements of many tokens), the codec
        neither rotates nor rounds stochastically, and the decoded blocks of all ranks are added in rank order, as
        ``"one_shot"`` and ``"two_shot_symmetric"`` do.

        Args:
            features: Size of the tensor's last dimension.
        """
        if self.codec.in_python:  # one call encodes the tokens of a chunk together
            return False
        layout = self.codec.layout()
        token_blocks = layout.kept == 0 and not self.codec.needs_agreement and features % layout.block == 0
        nearest = getattr(self.codec, "round", "nearest") == "nearest"
        unrotated = getattr(self.codec, "rotate", "none") == "none"
        return self.algorithm in POSITION_INDEPENDENT and nearest and unrotated and token_blocks

    def codec_for(self, numel: int, dtype: torch.dtype, *, backward: bool = False) -> Codec:
        """Return the codec for a sum of ``numel`` elements.

        That is `NONE` if the message is small and the planner predicts it to be faster uncompressed.
        """
        chosen = self.backward_codec if backward else self.codec
        small = numel * dtype.itemsize <= SMALL_MESSAGE_BYTES
        if (
            self.latency
            and small
            and self.algorithm not in POSITION_INDEPENDENT
            and not chosen.lossless(dtype)
        ):
            verdict = compression_pays(chosen, numel, dtype, self.group)
            if not verdict.pays:
                self.traffic.uncompressed += 1
                self.traffic.reason = verdict.reason
                return NONE
        return chosen

    def algorithm_for(self, codec: Codec, dtype: torch.dtype) -> str:
        """Return the `dtcomm.all_reduce` algorithm for a sum in ``codec``.

        ``"two_shot_symmetric"`` becomes ``"direct"``, which is right for lossless codecs; callers handle the lossy ones
        themselves.
        """
        if self.algorithm not in ("auto", "two_shot_symmetric"):
            return self.algorithm
        if self.algorithm == "auto":
            return default_algorithm(self.world_size, codec, dtype)
        return "direct"

    def shard_size(self, features: int, argument: str) -> int:
        """Return ``features`` divided by the number of ranks.

        Raises:
            ValueError: The ranks do not divide ``features``; the message names ``argument``.
        """
        if features % self.world_size:
            raise ValueError(f"{argument}: {features} is not divisible by the {self.world_size} ranks")
        return features // self.world_size


def default_algorithm(world_size: int, codec: Codec, dtype: torch.dtype) -> str:
    """Return what ``algorithm="auto"`` stands for."""
    independent_blocks = not codec.in_python and not codec.needs_agreement and codec.layout().kept == 0
    if world_size == 2 and independent_blocks and not codec.lossless(dtype):
        return "one_shot"
    return "direct"


def make_comm_config(
    spec: str | Codec = "none",
    backward: str | Codec = "none",
    *,
    algorithm: Algorithm = "auto",
    group: GroupOrMesh = None,
    latency: bool = True,
) -> CommConfig:
    """Build a `CommConfig` from what users write.

    Args:
        spec: Codec of the forward pass, as a spec such as ``"int8"`` or a `Codec`. Default: uncompressed.
        backward: Codec of the gradients. Default: uncompressed.
        algorithm: See `CommConfig`; a Schedule becomes its text. Default: ``"auto"``.
        group: Process group, or a device mesh with one dimension. Default: all ranks.
        latency: See `CommConfig`. Default: True.

    Returns:
        The settings.

    Raises:
        ValueError: A spec or the algorithm is not valid, or the mesh has more than one dimension.

    Example::

        comm = make_comm_config("int8", backward="fp8_e4m3", group=mesh["tp"])
        y = dtcomm.tp.functional.reduce_from_ranks(x, comm)
    """
    process_group = process_group_of(group)
    require_algorithm(algorithm, process_group)
    forward_codec, backward_codec = codec(spec), codec(backward)
    return CommConfig(
        codec=forward_codec,
        backward_codec=backward_codec,
        algorithm=str(algorithm),
        group=process_group,
        latency=latency,
        codec_specs=(str(forward_codec), str(backward_codec)),
        group_name=(dist.group.WORLD if process_group is None else process_group).group_name,  # type: ignore[union-attr]
    )


def process_group_of(group: GroupOrMesh) -> dist.ProcessGroup | None:
    """Return the process group of a one-dimensional mesh; a process group or None is returned unchanged."""
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(f"mesh: expected one dimension, got {group.ndim}: pass mesh['tp']")
        return group.get_group()
    return group
