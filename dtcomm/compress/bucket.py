"""How one flat buffer of gradients is divided into the segments of one message.

Every compressed parameter is a segment with its own grid and codec, so that its blocks never mix with those of a
neighbour. Adjacent uncompressed parameters are merged into one segment, which sends the same bytes. A `BucketLayout`
also counts what was sent and lost while it was in use, for the reports. `BucketAverager` starts the collectives that
average a buffer: one all-reduce for codecs, several in stages for PowerSGD.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from dtcomm.codecs import Codec, codec
from dtcomm.collectives import Algorithm, Work, all_reduce_coalesced
from dtcomm.collectives.groups import channel, leaving_bytes, level_groups, level_shares, next_channel
from dtcomm.collectives.planning import require_algorithm
from dtcomm.compress.feedback import DGC
from dtcomm.compress.measurements import GradientSketch, l2_norms
from dtcomm.compress.policy import CodecChoice
from dtcomm.compress.powersgd import Factors, LowRankTask, PowerSGD, low_rank_stages
from dtcomm.compress.spec import LevelCodecs, Scheme, matrix_shape, wire_codec
from dtcomm.compress.stage_scheduler import Stages
from dtcomm.compress.traffic import MessageRow, ParameterTotals, relative_error, total_seconds

NONE = codec("none")
#: What a rank sends of a tensor in an all-reduce, in multiples of one payload: encoded inside hosts and between hosts.
LevelShares = tuple[float, float]


@dataclass(frozen=True)
class Member:
    """One parameter's gradient within a segment; ``reason`` and ``refused`` are those of its `CodecChoice`."""

    name: str
    numel: int
    reason: str
    refused: bool = False


@dataclass
class Segment:
    """The elements [start, stop) of the buffer, under one codec or compressor.

    Attributes:
        members: The parameters; a lossy segment holds one, whose name is the segment's.
        matrix: The rows and columns that PowerSGD sees.
        error: The sum of |what was lost|^2 over the sampled steps that were read from the device, without those in
            which a norm was not finite.
        signal: The sum of |gradient|^2 over the same steps.
        lossless: Whether the scheme keeps every bit of this dtype.
    """

    start: int
    stop: int
    codec: Scheme
    dtype: torch.dtype
    members: list[Member]
    matrix: tuple[int, int] = (0, 0)
    error: float = 0.0
    signal: float = 0.0
    lossless: bool = field(init=False)
    name: str = field(init=False)

    def __post_init__(self) -> None:
        self.lossless = self.codec.lossless(self.dtype)
        self.name = self.members[0].name

    @property
    def numel(self) -> int:
        """The number of elements."""
        return self.stop - self.start

    @property
    def wire_spec(self) -> str | Codec:
        """The codec as collectives take it; "none" for PowerSGD, whose factors are counted as uncompressed."""
        if isinstance(self.codec, PowerSGD):
            return NONE
        return str(self.codec) if isinstance(self.codec, LevelCodecs) else wire_codec(self.codec)

    def payload_bytes(self, shares: LevelShares = (1.0, 0.0)) -> float:
        """Return the bytes of the segment's payloads; ``shares`` says how many are sent on each level."""
        if isinstance(self.codec, PowerSGD):
            return sum(shares) * self.codec.payload_bytes(*self.matrix)
        if isinstance(self.codec, LevelCodecs):
            inside, between = (
                level_codec.wire_bytes(self.numel, self.dtype)
                for level_codec in (self.codec.inside, self.codec.between)
            )
            return shares[0] * inside + shares[1] * between
        return sum(shares) * wire_codec(self.codec).wire_bytes(self.numel, self.dtype)

    def plain_bytes(self, shares: LevelShares = (1.0, 0.0)) -> float:
        """Return what `payload_bytes` would be uncompressed."""
        return sum(shares) * NONE.wire_bytes(self.numel, self.dtype)


@dataclass
class BucketLayout:
    """The segments of one buffer, and what was counted while this layout was in use.

    Attributes:
        parameter_ids: Identifies the parameters, in order. A bucket with others needs a new layout.
        seconds: The time of the collectives, start to finish, all messages together.
        revision: Identifies the decisions behind the codecs. After other decisions a bucket needs a new layout.
        level_shares: How many payloads a rank sends on each level; only their ratio counts.
        lossy: The segments that lose something.
        codecs: The codecs of all segments but PowerSGD's, as collectives take them.
    """

    parameter_ids: tuple[int, ...]
    dtype: torch.dtype
    segments: list[Segment]
    messages: int = 0
    wire_bytes: int = 0
    seconds: float | None = 0.0
    revision: Any = None
    level_shares: LevelShares = (1.0, 0.0)
    lossy: list[Segment] = field(init=False)
    codecs: list[str | Codec] = field(init=False)
    _sketch: GradientSketch | None = None
    _unread: torch.Tensor | None = None  # (signal, error) of the lossy segments since errors were last read

    def __post_init__(self) -> None:
        self.lossy = [segment for segment in self.segments if not segment.lossless]
        self.codecs = [
            segment.wire_spec for segment in self.segments if not isinstance(segment.codec, PowerSGD)
        ]

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the parameters, in order."""
        return tuple(member.name for segment in self.segments for member in segment.members)

    @property
    def schemes(self) -> dict[str, Scheme]:
        """What the parameters that `sketch` compares are compressed with."""
        return {segment.name: segment.codec for segment in self._sketched()}

    def sketch(self, device: torch.device) -> GradientSketch:
        """Return the sketch of the buffer for the guard; it depends on names and sizes of parameters only."""
        if self._sketch is None:
            parameters = [(segment.name, segment.start, segment.numel) for segment in self._sketched()]
            self._sketch = GradientSketch(parameters, device)
        return self._sketch

    def _sketched(self) -> list[Segment]:
        """The segments that lose something, without DGC that clips, whose uncompressed result is not known here."""
        return [
            segment for segment in self.lossy if not (isinstance(segment.codec, DGC) and segment.codec.clip)
        ]

    def add_sample(self, norms: torch.Tensor, lost: Sequence[torch.Tensor | None]) -> torch.Tensor:
        """Count the norms of the lossy segments' gradients, and what was lost of each; the host does not wait.

        Returns:
            |lost| / |gradient| of each, fp64; 0 where it is not finite.
        """
        pairs = torch.stack([norms, l2_norms([tensor for tensor in lost if tensor is not None])]).double()
        squares = torch.where(pairs.sum(dim=0) < torch.inf, pairs.square(), 0.0)
        self._unread = squares if self._unread is None else self._unread + squares
        return torch.nan_to_num(pairs[1] / pairs[0], nan=0.0, posinf=0.0)

    def _read_errors(self) -> None:
        """Bring ``signal`` and ``error`` of the segments up to date; the host waits for the device."""
        if self._unread is not None:
            for segment, signal, error in zip(self.lossy, *self._unread.tolist(), strict=True):
                segment.signal, segment.error = segment.signal + signal, segment.error + error
            self._unread = None

    def split(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """Return a view of the buffer for each segment."""
        if len(self.segments) == 1:
            return [buffer]
        return [buffer[segment.start : segment.stop] for segment in self.segments]

    @property
    def plain_bytes(self) -> float:
        """The bytes that the same schedule would have sent uncompressed: what was sent, scaled by the payloads."""
        payload = sum(segment.payload_bytes(self.level_shares) for segment in self.segments)
        plain = sum(segment.plain_bytes(self.level_shares) for segment in self.segments)
        return self.wire_bytes * plain / payload if payload else 0.0

    @functools.cached_property
    def spec(self) -> str:
        """The codecs of the segments, each once."""
        return ", ".join(dict.fromkeys(str(segment.codec) for segment in self.segments))

    def add_codecs_to(self, totals: dict[str, ParameterTotals]) -> None:
        """Add the parameters with what each is compressed with, without what was counted."""
        for segment in self.segments:
            for member in segment.members:
                total = totals.setdefault(member.name, ParameterTotals(numel=member.numel))
                total.codec, total.reason, total.refused = str(segment.codec), member.reason, member.refused
                total.dtype = str(segment.dtype).removeprefix("torch.")

    def add_to(self, totals: dict[str, ParameterTotals]) -> None:
        """Divide what was counted among the parameters; the codec of the last layout counts as theirs."""
        shares = self.level_shares
        payload = sum(segment.payload_bytes(shares) for segment in self.segments)
        sent_per_byte = self.wire_bytes / payload if payload else 0.0
        self.add_codecs_to(totals)
        self._read_errors()
        for segment in self.segments:
            for member in segment.members:
                total = totals[member.name]
                total.messages[id(self)] = self.messages
                total.lossless = total.lossless and segment.lossless
                share = sent_per_byte * (member.numel / segment.numel if segment.numel else 0.0)
                total.wire_bytes += share * segment.payload_bytes(shares)
                total.plain_bytes += share * segment.plain_bytes(shares)
                total.error += segment.error
                total.signal += segment.signal


def bucket_rows(
    what: str,
    retired: Iterable[BucketLayout],
    current: Mapping[int, BucketLayout],
    totals: Mapping[str, ParameterTotals],
    events: Mapping[str, Mapping[str, int]],
) -> tuple[MessageRow, ...]:
    """Return the rows of a report for buckets, each with all layouts that its parameters have had.

    ``current`` has the layouts in use by the bucket's number. Buckets of other parameters, such as those of DDP's first
    step, come last. ``totals`` are those of all parameters; ``events`` counts the guard's events by parameter.
    """
    groups = {layout.names: (f"bucket {index}", [layout]) for index, layout in sorted(current.items())}
    for layout in retired:
        earlier = f"earlier bucket {len(groups) - len(current)}"
        groups.setdefault(layout.names, (earlier, []))[1].append(layout)
    return tuple(_bucket_row(name, what, layouts, totals, events) for name, layouts in groups.values())


def _bucket_row(
    name: str,
    what: str,
    layouts: Sequence[BucketLayout],
    totals: Mapping[str, ParameterTotals],
    events: Mapping[str, Mapping[str, int]],
) -> MessageRow:
    names = layouts[0].names
    counts: Counter[str] = Counter()
    for member in names:
        counts.update(events.get(member, {}))
    return MessageRow(
        name=name,
        what=what,
        codec=layouts[0].spec,
        dtype=str(layouts[0].dtype).removeprefix("torch."),
        tensors=len(names),
        numel=sum(segment.numel for segment in layouts[0].segments),
        calls=sum(layout.messages for layout in layouts),
        wire_bytes=sum(layout.wire_bytes for layout in layouts),
        plain_bytes=round(sum(layout.plain_bytes for layout in layouts)),
        seconds=total_seconds(layout.seconds for layout in layouts),
        relative_error=relative_error([totals[member] for member in names]),
        events=dict(counts),
    )


def build_layout(
    buffer: torch.Tensor,
    gradients: Iterable[tuple[str, torch.Tensor]],
    parameter_ids: tuple[int, ...],
    choose: Callable[[str, torch.Tensor], CodecChoice],
) -> BucketLayout:
    """Return the layout of a 1-D buffer; ValueError if the gradients extend beyond it.

    ``gradients`` are (name, view of the buffer) pairs, in the order in which they lie in it. ``choose`` returns what a
    gradient is compressed with.
    """
    segments: list[Segment] = []
    origin = buffer.storage_offset()
    for name, gradient in gradients:
        start = int(gradient.storage_offset() - origin)
        numel = gradient.numel()
        choice = choose(name, gradient)
        member = Member(name, numel, choice.reason, choice.refused)
        lossless = choice.codec.lossless(buffer.dtype)
        last = segments[-1] if segments else None
        if last and lossless and last.codec == choice.codec and last.stop == start:
            last.stop += numel
            last.members.append(member)
        else:
            matrix = matrix_shape(gradient) if gradient.ndim else (0, 0)
            segments.append(Segment(start, start + numel, choice.codec, buffer.dtype, [member], matrix))
    if segments and segments[-1].stop > buffer.numel():
        raise ValueError(f"gradients end at element {segments[-1].stop} of a buffer of {buffer.numel()}")
    return BucketLayout(parameter_ids, buffer.dtype, segments)


#: A function with the arguments of `all_reduce_coalesced`, which returns the handle of the operation.
AllReduce = Callable[..., Work | None]


def _has_levels(algorithm: Algorithm) -> bool:
    """Return whether an algorithm has a level for each of two codecs."""
    if isinstance(algorithm, str):
        return algorithm in ("direct", "auto") or algorithm.startswith("hierarchical")
    return any(transfer.level for transfer in algorithm.transfers)


class BucketAverager:
    """Averages buckets over a group.

    Args:
        seed: The seed of stochastic rounding; the step is added to it.
        schemes: All schemes that may be used. If one of them loses something, "direct" means "hierarchical" where
            ranks share hosts and there are several hosts, for every bucket: the result of a parameter does not depend
            on its bucket then either. With a `LevelCodecs` it means that on any several hosts.
        factors: The factors of PowerSGD to continue with; None: new ones.
        all_reduce: The collective; `tests.support.simulated_ranks` passes another one.

    Raises:
        ValueError: The algorithm is not valid for the group, or it has no levels and a scheme has a codec for each.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        group: Any,
        seed: int,
        schemes: Sequence[Scheme] = (),
        factors: Factors | None = None,
        all_reduce: AllReduce = all_reduce_coalesced,
    ) -> None:
        if dist.is_initialized():
            require_algorithm(algorithm, group)
        self.seed = seed
        self.factors = factors or Factors()
        self._algorithm, self._group, self._all_reduce = algorithm, group, all_reduce
        self._channel_number = next_channel(group) if dist.is_initialized() else 0
        two_codecs = [scheme for scheme in schemes if isinstance(scheme, LevelCodecs)]
        if two_codecs and not _has_levels(algorithm):
            name = repr(algorithm) if isinstance(algorithm, str) else "this Schedule"
            raise ValueError(
                f"algorithm: {two_codecs[0]} names a codec for each level, and {name} has no levels; valid: "
                "direct, auto, hierarchical, hierarchical:INSIDE/BETWEEN, a Schedule with transfers of level 1"
            )
        self._two_codecs = bool(two_codecs)
        lossy = any(not scheme.lossless(torch.float32) for scheme in schemes)
        # Known with the first bucket where hosts decide.
        hosts_decide = dist.is_initialized() and (self._two_codecs or (lossy and algorithm == "direct"))
        self._level_shares: LevelShares | None = None if hosts_decide else (1.0, 0.0)

    @functools.cached_property
    def staged_group(self) -> Any:
        """The group of collectives that a `StageScheduler` starts from its thread."""
        if not dist.is_initialized():  # simulated ranks have a collective of their own
            return self._group
        return channel(self._group, self._channel_number or next_channel(self._group))

    def level_shares(self, buffer: torch.Tensor) -> LevelShares:
        """Return `BucketLayout.level_shares`; the first call asks on how many hosts the ranks are.

        It is made on all ranks, before the collective of the first bucket.
        """
        if self._level_shares is None:
            groups = level_groups(buffer, self._group)
            shared = any(len(ranks) > 1 for ranks in groups)
            if self._algorithm == "direct" and len(groups) > 1 and (shared or self._two_codecs):
                self._algorithm = "hierarchical"
            algorithm = "hierarchical" if self._algorithm in ("direct", "auto") else self._algorithm
            self._level_shares = (
                level_shares(algorithm, buffer, self._group) if self._two_codecs else (1.0, 0.0)
            )
        return self._level_shares

    def leaving_bytes(self, layouts: Iterable[BucketLayout]) -> int | None:
        """Return the bytes that left this rank's host, from all its ranks, while this one sent what was counted."""
        left = 0
        for layout in layouts:
            if not layout.wire_bytes:
                continue
            segment = max(layout.segments, key=lambda segment: segment.numel)
            numel = sum(segment.numel for segment in layout.segments)
            tensor = "all_reduce", numel, layout.dtype, segment.wire_spec
            of_layout = leaving_bytes(layout.wire_bytes, *tensor, self._algorithm, self._group)
            if of_layout is None:
                return None
            left += of_layout
        return left

    def all_reduce(
        self,
        layout: BucketLayout,
        tensors: Sequence[torch.Tensor],
        residuals: Sequence[torch.Tensor | None],
        stats: torch.Tensor | None,
        step: int,
        *,
        staged: bool = False,
    ) -> Work:
        """Start averaging a bucket without PowerSGD, in one message.

        ``tensors`` and ``residuals`` have one entry for each segment; ``stats`` is averaged along with them,
        uncompressed. ``staged``: a `StageScheduler` runs it.
        """
        codecs = layout.codecs
        if stats is not None:
            tensors, codecs, residuals = [*tensors, stats], [*codecs, NONE], [*residuals, None]
        work = self._all_reduce(
            tensors,
            "avg",
            codec=codecs,
            algorithm=self._algorithm,
            group=self.staged_group if staged else self._group,
            async_op=True,
            seed=self.seed + step,
            residuals=residuals,
            bucket_bytes=1 << 40,
        )
        assert work is not None  # because of async_op
        return work

    def stages(
        self,
        layout: BucketLayout,
        tensors: Sequence[torch.Tensor],
        residuals: Sequence[torch.Tensor | None],
        stats: torch.Tensor | None,
        step: int,
        *,
        staged: bool = False,
    ) -> Stages:
        """Return the stages that average any bucket. The arguments are `all_reduce`'s."""
        tasks: list[LowRankTask] = []
        other_tensors: list[torch.Tensor] = []
        other_residuals: list[torch.Tensor | None] = []
        for segment, tensor, residual in zip(layout.segments, tensors, residuals, strict=True):
            if isinstance(segment.codec, PowerSGD):
                tasks.append(LowRankTask(segment.name, segment.codec, *segment.matrix, tensor, residual))
            else:
                other_tensors.append(tensor)
                other_residuals.append(residual)
        codecs = list(layout.codecs)
        if stats is not None:
            other_tensors.append(stats)
            codecs.append(NONE)
            other_residuals.append(None)
        return low_rank_stages(
            tasks,
            other_tensors,
            codecs,
            other_residuals,
            factors=self.factors,
            step=step,
            algorithm=self._algorithm,
            group=self.staged_group if staged else self._group,
            seed=self.seed + step,
            all_reduce=self._all_reduce,
        )
