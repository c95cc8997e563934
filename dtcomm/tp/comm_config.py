"""Settings of a tensor-parallel layer's communication: ranks, codecs and algorithm.

Every layer, style and conversion function of `dtcomm.tp` makes one `CommConfig` with `CommConfig.of`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from os import PathLike
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist

from dtcomm import env
from dtcomm.arguments import suggest
from dtcomm.codecs import Codec, codec, names
from dtcomm.codecs.spec import VARIABLE_LENGTH
from dtcomm.collectives import Algorithm
from dtcomm.collectives.groups import GroupOrMesh, compression_pays, process_group_of
from dtcomm.collectives.planning import require_algorithm
from dtcomm.compress.spec import AUTO, COMPRESSORS
from dtcomm.compress.traffic import SMALL
from dtcomm.profiling.summary import format_bytes

#: Up to this many uncompressed bytes (one token, or a few) a message is sent uncompressed if the planner predicts that
#: to be faster.
SMALL_MESSAGE_BYTES = 64 * 1024
NONE = codec("none")
#: Algorithms whose result for an element does not depend on the element's position in the message.
POSITION_INDEPENDENT = ("one_shot", "two_shot_symmetric")


class CallKind(NamedTuple):
    """What calls of a layer have in common.

    ``codec`` was used; ``reason`` says why nothing was compressed although a codec was asked for, or is empty.
    ``numel`` counts the elements of the whole tensor, all shards together. ``backward`` calls communicate gradients.
    """

    collective: str
    backward: bool
    codec: Codec
    reason: str
    numel: int
    dtype: torch.dtype
    algorithm: str


class LayerTraffic:
    """Counters of a layer's communication since the layer was made; ``str()`` gives one line.

    A call only counts its kind, since it is on the path of each token. Bytes and times are computed when they are
    read.

    Attributes:
        counts: Kind of call → number of calls.
        reason: Why the most recent sum that was sent uncompressed was, with the predicted times.
        compresses: False in steps without compression, of the pairs that ``verify=`` measures.

    Example::

        print(layer.comm.traffic)  # 12 sums of 393,216 elements, 408.0 KiB encoded; 3 of them uncompressed (...)
    """

    def __init__(self) -> None:
        self.counts: dict[CallKind, int] = {}
        self.reason, self.compresses = "", True

    def count(
        self,
        collective: str,
        x: torch.Tensor,
        numel: int,
        codec: Codec,
        asked: Codec,
        algorithm: str,
        backward: bool = False,
    ) -> None:
        """Add one call with ``codec``, where ``asked`` was asked for.

        ``x`` has the dtype and the device of the call's tensor, of which all shards together have ``numel`` elements.
        """
        reason = ""
        if codec is not asked and codec != asked and self.compresses:
            reason = SMALL if x.dtype in asked.dtypes else _unsupported(asked, x.dtype)
        kind = CallKind(collective, backward, codec, reason, numel, x.dtype, algorithm)
        self.counts[kind] = self.counts.get(kind, 0) + 1

    def _forward(self) -> list[tuple[CallKind, int]]:
        return [(kind, count) for kind, count in self.counts.items() if not kind.backward]

    @property
    def calls(self) -> int:
        """Number of calls in forward passes."""
        return sum(count for _, count in self._forward())

    @property
    def elements(self) -> int:
        """Elements of these calls."""
        return sum(count * kind.numel for kind, count in self._forward())

    @property
    def payload_bytes(self) -> int:
        """Bytes of these elements, encoded once."""
        return sum(count * kind.codec.wire_bytes(kind.numel, kind.dtype) for kind, count in self._forward())

    @property
    def uncompressed(self) -> int:
        """Number of these calls that were sent uncompressed although a codec was asked for."""
        return sum(count for kind, count in self._forward() if kind.reason)

    def __str__(self) -> str:
        text = f"{self.calls} sums of {self.elements:,} elements, {format_bytes(self.payload_bytes)} encoded"
        if self.uncompressed:
            which = "all" if self.uncompressed == self.calls else f"{self.uncompressed} of them"
            text += f"; {which} uncompressed ({self.reason})"
        return text

    __repr__ = __str__


def _unsupported(codec: Codec, dtype: torch.dtype) -> str:
    return f"{codec} does not take {str(dtype).removeprefix('torch.')}"


@dataclass(frozen=True, kw_only=True)
class CommConfig:
    """Communication settings that all collectives of one layer share; `CommConfig.of` builds one from spec strings.

    Attributes:
        codec: Codec of what the forward pass sends.
        backward_codec: Codec of the gradients that the backward pass sends.
        algorithm: An algorithm of `dtcomm.all_reduce`, a schedule as its text; ``"two_shot_symmetric"`` for the
            all-reduce of Flash Communication (`dtcomm.tp.flash_all_reduce`). ``"auto"``: one-shot on two ranks, where
            it sends no more bytes than two-shot and encodes once instead of twice; ``"direct"`` on more. With
            ``"one_shot"`` and ``"two_shot_symmetric"`` every rank's contribution is encoded at its position in the
            tensor, so a result depends only on the elements of its own block (see `batch_invariant`).
        group: Process group; None is the default group.
        latency: Send small messages uncompressed where the planner predicts that to be faster. Never done with
            ``"one_shot"`` and ``"two_shot_symmetric"``, whose results would then depend on the message's size.
        traffic: Counters of the layer's communication.
        codec_specs: The specs of ``codec`` and ``backward_codec``, for compiled code.
        group_name: The name of the group, for compiled code.
    """

    codec: Codec
    backward_codec: Codec
    algorithm: str = "auto"
    group: dist.ProcessGroup | None = field(default=None, repr=False)
    latency: bool = True
    traffic: LayerTraffic = field(default_factory=LayerTraffic, compare=False)
    codec_specs: tuple[str, str] = field(default=("none", "none"), repr=False)
    group_name: str = field(default="", repr=False)

    def __deepcopy__(self, memo: Any) -> CommConfig:
        return self  # copies of a layer send over the same group

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "tp: a tensor-parallel layer belongs to a process group and cannot be pickled; save model.state_dict(), or "
            "dtcomm.tp.full_state_dict(model)"
        )

    @classmethod
    def of(
        cls,
        codec: str | Codec = "none",
        backward_codec: str | Codec = "none",
        *,
        algorithm: Algorithm = "auto",
        group: GroupOrMesh = None,
        latency: bool = True,
        traffic: LayerTraffic | None = None,
    ) -> CommConfig:
        """Build the settings from what users write.

        Args:
            codec: Codec of the forward pass, as a spec such as ``"int8"`` or a `Codec`. Default: uncompressed.
            backward_codec: Codec of the gradients. Default: uncompressed.
            algorithm: See the class; a Schedule becomes its text. Default: ``"auto"``.
            group: Process group, or a device mesh with one dimension. Default: all ranks.
            latency: See the class. Default: True.
            traffic: Counters to add to. Default: new ones.

        Returns:
            The settings.

        Raises:
            TypeError: A codec is neither a spec nor a `Codec`.
            ValueError: A spec or the algorithm is not valid, or the mesh has more than one dimension.

        Example::

            comm = dtcomm.tp.CommConfig.of("int8", backward_codec="fp8_e4m3", group=mesh["tp"])
            y = dtcomm.tp.functional.reduce_from_ranks(x, comm)
        """
        process_group = process_group_of(group, "tp")
        require_algorithm(algorithm, process_group)
        forward, backward = parse_codec(codec), parse_codec(backward_codec, "backward_codec")
        return cls(
            codec=forward,
            backward_codec=backward,
            algorithm=str(algorithm),
            group=process_group,
            latency=latency,
            traffic=LayerTraffic() if traffic is None else traffic,
            codec_specs=(str(forward), str(backward)),
            group_name=(dist.group.WORLD if process_group is None else process_group).group_name,  # type: ignore[union-attr]
        )

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

        It is if every token has blocks of its own (sparse codecs choose among the elements of many tokens), and the
        codec neither rotates nor rounds stochastically. The decoded blocks of all ranks must be added in rank order, as
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

        That is `NONE` if the codec does not take the dtype, or if the message is small and the planner predicts it to
        be faster uncompressed.
        """
        chosen = self.supported_codec(dtype, backward=backward)
        small = numel * dtype.itemsize <= SMALL_MESSAGE_BYTES
        if (
            self.latency
            and small
            and self.algorithm not in POSITION_INDEPENDENT
            and not chosen.lossless(dtype)
        ):
            verdict = compression_pays(chosen, numel, dtype, self.group)
            if not verdict.pays:
                self.traffic.reason = verdict.reason
                return NONE
        return chosen

    def supported_codec(self, dtype: torch.dtype, *, backward: bool = False) -> Codec:
        """Return the codec that was asked for, or `NONE` if it does not take the dtype."""
        asked = self.asked_codec(backward)
        if dtype in asked.dtypes or asked == NONE:
            return asked
        self.traffic.reason = _unsupported(asked, dtype)
        return NONE

    def asked_codec(self, backward: bool) -> Codec:
        """Return the codec that was asked for, for this step."""
        return (self.backward_codec if backward else self.codec) if self.traffic.compresses else NONE

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


def parse_codec(spec: object, argument: str = "codec") -> Codec:
    """Return the codec that a spec describes; a codec is returned unchanged.

    TypeError if ``spec`` is neither a string nor a `Codec`; ValueError if it is wrong, or valid elsewhere only:
    ``"auto"``, a policy, a compressor, ``A/B``. The message names ``argument``, says where, and what is valid here.
    """
    if isinstance(spec, Codec):
        return NONE if env.disabled() else spec
    if not isinstance(spec, str):
        hint = "; a plan of layers is plan=" if isinstance(spec, Mapping | PathLike) else ""
        raise TypeError(
            f"{argument}: expected a codec or its spec, such as 'int8', got {type(spec).__name__}{hint}"
        )
    text = spec.strip()
    name = text.partition(":")[0]
    if name in names() and "/" not in text and "->" not in text:
        return NONE if env.disabled() else codec(text)
    valid = f"valid codecs: {', '.join(names())}"
    if name == AUTO:
        reason = (
            "'auto' is for the gradients of dtcomm.ddp.compress; here dtcomm.extensions.calibrate "
            "measures which codec each layer tolerates and writes a plan, and latency=True sends sums uncompressed "
            "where that is predicted to be faster"
        )
    elif "->" in text:
        reason = (
            f"{spec!r} is a policy, which is for dtcomm.ddp.compress; here plan= gives layers codecs of their own, and "
            "exclude= leaves layers uncompressed"
        )
    elif name in COMPRESSORS or name in ("ef", "loco", "delta"):
        reason = (
            f"{name!r} keeps state from step to step, which activations do not have; it is for gradients, in "
            f"dtcomm.ddp.compress and dtcomm.fsdp.compress; {valid}"
        )
    elif name in VARIABLE_LENGTH:
        reason = f"{name!r} cannot be summed, because the length of its payloads depends on the data; {valid}"
    elif "/" in text:
        reason = f"{spec!r} names a codec for each level of hosts; tensor-parallel sums have one; {valid}"
    elif text.endswith(".json"):
        reason = f"{spec!r} is a plan file; pass plan={spec!r}"
    else:
        hint = suggest(name, names(), lambda guess: text.replace(name, guess, 1))
        reason = f"unknown codec {name!r}{hint}; {valid}"
    raise ValueError(f"{argument}: {reason}")
