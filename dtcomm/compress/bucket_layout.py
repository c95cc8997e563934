"""How one flat buffer of gradients is cut into the segments of one message.

Every parameter is a segment with a grid and a codec of its own, so that its blocks never mix with a
neighbour's; only neighbours that go uncompressed are merged, since nothing can tell them apart on the wire.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import torch

from dtcomm.codecs import Codec, codec
from dtcomm.compress.policy import Choice
from dtcomm.compress.powersgd import PowerSGD
from dtcomm.compress.report import BucketRow, Tally
from dtcomm.compress.spec import Scheme, matrix_of, wire


@dataclass(frozen=True)
class Member:
    """A parameter's gradient within a segment."""

    name: str
    numel: int
    why: str


@dataclass
class Segment:
    """Elements [start, stop) of the buffer, under one codec or compressor; ``matrix``: its rows and columns, for
    the latter. ``error`` and ``signal`` are sums of squares."""

    start: int
    stop: int
    codec: Scheme
    dtype: torch.dtype
    members: list[Member]
    matrix: tuple[int, int] = (0, 0)
    error: float = 0.0
    signal: float = 0.0
    there: torch.Tensor | None = None  # what of both is still on a device

    def count(self, signal: float | torch.Tensor, error: float | torch.Tensor) -> None:
        """Norms of a gradient and of what was lost of it; what is not finite is not counted."""
        if isinstance(signal, torch.Tensor) and isinstance(error, torch.Tensor):
            both = torch.stack([signal, error]).double()
            squares = torch.where(torch.isfinite(both).all(), both.square(), 0.0)
            self.there = squares if self.there is None else self.there + squares
        elif math.isfinite(signal) and math.isfinite(error):
            self.signal += float(signal) ** 2
            self.error += float(error) ** 2

    def read(self) -> Segment:
        """Itself, after what was counted on a device has come: whoever asks waits for it."""
        if self.there is not None:
            signal, error = self.there.tolist()
            self.signal, self.error, self.there = self.signal + signal, self.error + error, None
        return self

    @property
    def numel(self) -> int:
        return self.stop - self.start

    @property
    def lossless(self) -> bool:
        return self.codec.lossless(self.dtype)

    @property
    def payload_bytes(self) -> int:
        if isinstance(self.codec, PowerSGD):
            return self.codec.payload_bytes(*self.matrix)
        return wire(self.codec).wire_bytes(self.numel, self.dtype)

    @property
    def plain_bytes(self) -> int:
        """Of the payload that the segment would be without compression."""
        return codec("none").wire_bytes(self.numel, self.dtype)

    @property
    def name(self) -> str:
        """Of the only member: a lossy segment holds one parameter."""
        return self.members[0].name


@dataclass
class Packing:
    """The segments of one buffer and what was counted while it was in use.

    ``layout`` identifies the parameters in order, ``revision`` what decided about them; a bucket in which one
    of them differs needs a new packing.
    """

    layout: tuple[int, ...]
    dtype: torch.dtype
    segments: list[Segment]
    messages: int = 0
    wire_bytes: int = 0
    seconds: float = 0.0
    revision: object = None
    lossy: list[Segment] = field(init=False)

    def __post_init__(self) -> None:
        self.lossy = [segment for segment in self.segments if not segment.lossless]

    @property
    def codecs(self) -> list[Codec]:
        """What travels, of every segment but PowerSGD's."""
        return [wire(segment.codec) for segment in self.segments if not isinstance(segment.codec, PowerSGD)]

    def cut(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        if len(self.segments) == 1:
            return [buffer]
        return [buffer[segment.start : segment.stop] for segment in self.segments]

    @property
    def plain_bytes(self) -> float:
        """What the same schedule would have sent uncompressed: the counted bytes, payload scaled to plain."""
        payload = sum(segment.payload_bytes for segment in self.segments)
        return (
            self.wire_bytes * sum(segment.plain_bytes for segment in self.segments) / payload
            if payload
            else 0.0
        )

    @functools.cached_property
    def spec(self) -> str:
        """What its segments travel in, in words."""
        return ", ".join(dict.fromkeys(str(segment.codec) for segment in self.segments))

    @property
    def relative_error(self) -> float | None:
        """Of sampled steps; None before the first, where something is lost."""
        signal = sum(segment.read().signal for segment in self.lossy)
        if not self.lossy:
            return 0.0
        return math.sqrt(sum(segment.error for segment in self.lossy) / signal) if signal else None

    def row(self, index: int, events: Mapping[str, Mapping[str, int]]) -> BucketRow:
        """For a report; ``events`` counts the guard's, by parameter."""
        counted: Counter[str] = Counter()
        members = [member for segment in self.segments for member in segment.members]
        for member in members:
            counted.update(events.get(member.name, {}))
        return BucketRow(
            index=index,
            codec=self.spec,
            parameters=len(members),
            nbytes=sum(segment.numel for segment in self.segments) * self.dtype.itemsize,
            messages=self.messages,
            wire_bytes=self.wire_bytes,
            plain_bytes=round(self.plain_bytes),
            seconds=self.seconds,
            relative_error=self.relative_error,
            events=dict(counted),
        )

    def add_to(self, tallies: dict[str, Tally]) -> None:
        """Split what was counted among the parameters; what they travel in now counts as theirs."""
        payload = sum(segment.payload_bytes for segment in self.segments)
        sent_per_byte = self.wire_bytes / payload if payload else 0.0
        for segment in map(Segment.read, self.segments):
            for member in segment.members:
                tally = tallies.setdefault(member.name, Tally(numel=member.numel))
                tally.codec, tally.why = str(segment.codec), member.why
                tally.dtype = str(segment.dtype).removeprefix("torch.")
                tally.lossless = tally.lossless and segment.lossless
                share = sent_per_byte * (member.numel / segment.numel if segment.numel else 0.0)
                tally.wire_bytes += share * segment.payload_bytes
                tally.plain_bytes += share * segment.plain_bytes
                tally.error += segment.error
                tally.signal += segment.signal


def pack(
    buffer: torch.Tensor,
    gradients: Iterable[tuple[str, torch.Tensor]],
    layout: tuple[int, ...],
    choose: Callable[[str, torch.Tensor], Choice],
) -> Packing:
    """The packing of ``buffer`` (1-D): ``gradients`` are (name, view) pairs in the order they lie in it,
    ``choose`` says what each of them gets."""
    segments: list[Segment] = []
    origin = buffer.storage_offset()
    for name, gradient in gradients:
        start = int(gradient.storage_offset() - origin)
        numel = gradient.numel()
        choice = choose(name, gradient)
        member = Member(name, numel, choice.why)
        lossless = choice.codec.lossless(buffer.dtype)
        last = segments[-1] if segments else None
        if last and lossless and last.codec == choice.codec and last.stop == start:
            last.stop += numel
            last.members.append(member)
        else:
            matrix = matrix_of(gradient) if gradient.ndim else (0, 0)
            segments.append(Segment(start, start + numel, choice.codec, buffer.dtype, [member], matrix))
    if segments and segments[-1].stop > buffer.numel():
        raise ValueError(f"gradients end at element {segments[-1].stop} of a buffer of {buffer.numel()}")
    return Packing(layout, buffer.dtype, segments)
