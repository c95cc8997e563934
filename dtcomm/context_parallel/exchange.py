"""The messages of context-parallel attention: payloads of keys and values, and gradients on their way back.

A rank encodes its own keys and values once. The bytes go on unchanged, around the ring or in one all-gather, and
every rank, the owner included, computes with what they decode to. So all ranks use the same keys and values, and a
result does not depend on where a rank sits.

The gradients of a rank's keys and values are sums of one contribution from each rank. A contribution is encoded once
and goes straight to its owner, which adds the contributions in fp32.
"""

from __future__ import annotations

import abc
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from dtcomm.codecs import codec as parse
from dtcomm.collectives import all_gather, all_to_all, recv, reduce_scatter, send
from dtcomm.context_parallel.state import GRADIENTS, KEYS_AND_VALUES, Settings, record
from dtcomm.kernels import counter_rng, ops
from dtcomm.work import Work


def encode(tensors: Sequence[torch.Tensor], codec: str, key: int = 0) -> torch.Tensor:
    """Return the payload of tensors of one dtype, encoded together, uint8."""
    return ops.encode(codec, torch.cat([tensor.detach().reshape(-1) for tensor in tensors]), key)


def decode(
    payload: torch.Tensor, shapes: Sequence[Sequence[int]], dtype: torch.dtype, codec: str
) -> list[torch.Tensor]:
    """Return the tensors of these shapes that a payload holds."""
    sizes = [torch.Size(shape).numel() for shape in shapes]
    flat = ops.decode(codec, payload, sum(sizes), dtype)
    return [part.view(*shape) for part, shape in zip(torch.split(flat, sizes), shapes, strict=True)]


def encode_keys_and_values(k: torch.Tensor, v: torch.Tensor, settings: Settings) -> torch.Tensor:
    """Return the payload of this rank's keys and values. On one rank nothing is sent, and nothing is lost."""
    key = counter_rng.mix_key(settings.seed, settings.rank, 0)
    return encode((k, v), settings.kv_codec if settings.ranks > 1 else "none", key)


class KeyValueBlocks:
    """All ranks' keys and values, block by block.

    ``payload`` has this rank's keys and values, whose ``shapes`` are equal on all ranks.
    """

    def __init__(
        self, payload: torch.Tensor, shapes: Sequence[Sequence[int]], dtype: torch.dtype, settings: Settings
    ) -> None:
        self._payload, self._shapes, self._dtype, self._settings = payload, shapes, dtype, settings
        self._numel = sum(torch.Size(shape).numel() for shape in shapes)

    def __iter__(self) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        """Yield (rank, keys, values): this rank's own first, then those of the ranks before it in the ring.

        While the caller works on a block of the ring, the next one is under way.
        """
        settings = self._settings
        codec = settings.kv_codec if settings.ranks > 1 else "none"
        payloads = self._gathered() if settings.method == "all_gather" else self._ring()
        for source, payload in payloads:
            k, v = decode(payload, self._shapes, self._dtype, codec)
            yield source, k, v

    def _ring(self) -> Iterator[tuple[int, torch.Tensor]]:
        rank, ranks, group = self._settings.rank, self._settings.ranks, self._settings.group
        current, previous = self._payload, self._payload
        for step in range(ranks):
            works: list[Work] = []
            following = current
            if step + 1 < ranks:
                # What was sent in the step before is free again, but this rank's own payload is kept.
                following = torch.empty_like(current) if step < 2 else previous
                works = [
                    send(current, global_rank(group, rank + 1), group=group, async_op=True),
                    recv(following, global_rank(group, rank - 1), group=group, async_op=True),
                ]
            yield (rank - step) % ranks, current
            for work in works:
                work.wait()
            if works:
                self._record(1, works[0])
            current, previous = following, current

    def _gathered(self) -> Iterator[tuple[int, torch.Tensor]]:
        rank, ranks, group = self._settings.rank, self._settings.ranks, self._settings.group
        gathered = self._payload.new_empty((ranks, self._payload.numel()))
        work = all_gather(gathered, self._payload, group=group, async_op=True)
        work.wait()
        if ranks > 1:
            self._record(ranks - 1, work)
        for step in range(ranks):
            source = (rank - step) % ranks
            yield source, gathered[source]

    def _record(self, messages: int, work: Work) -> None:
        settings = self._settings
        record(settings, KEYS_AND_VALUES, settings.kv_codec, self._dtype, messages * self._numel, work)


class GradientExchange(abc.ABC):
    """Brings contributions to the gradients of keys and values to their owners; the base class of two methods.

    ``contributed``: rank → which of this rank's own keys it contributes to; None: to none.
    """

    def __init__(
        self,
        shapes: Sequence[Sequence[int]],
        dtype: torch.dtype,
        device: torch.device,
        settings: Settings,
        contributed: Callable[[int], slice | None],
    ) -> None:
        self._shapes, self._dtype, self._settings = shapes, dtype, settings
        self._contributed = contributed
        self._codec = settings.backward_codec
        # Uncompressed gradients are sent in the dtype of keys and values, all others are encoded from fp32.
        self._wire_dtype = dtype if self._codec == "none" else torch.float32
        self._totals = [torch.zeros(*shape, device=device) for shape in shapes]

    @abc.abstractmethod
    def add(self, step: int, keys: slice, gradients: Sequence[torch.Tensor]) -> None:
        """Contribute to the keys and values of the rank ``step`` places before this one; called for every step.

        ``keys`` is the slice of the owner's sequence that the fp32 gradients, of keys and of values, are of; if it is
        empty, nothing is contributed.
        """

    @abc.abstractmethod
    def finish(self) -> Sequence[torch.Tensor]:
        """Return the gradients of this rank's own keys and values, fp32."""

    def _add_to_totals(self, keys: slice, gradients: Sequence[torch.Tensor]) -> None:
        for total, gradient in zip(self._totals, gradients, strict=True):
            total[:, :, keys] += gradient

    def _shapes_of(self, keys: slice) -> list[tuple[int, ...]]:
        tokens = keys.stop - keys.start
        return [(*shape[:2], tokens, shape[3]) for shape in self._shapes]

    def _record(self, numel: int, work: Work) -> None:
        record(self._settings, GRADIENTS, self._codec, self._dtype, numel, work)


class DirectGradients(GradientExchange):
    """Sends each contribution straight to its owner, while the caller works on the next block."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._under_way: deque[_Message] = deque()

    def add(self, step: int, keys: slice, gradients: Sequence[torch.Tensor]) -> None:
        settings = self._settings
        if step == 0:
            self._add_to_totals(keys, gradients)
            return
        group, owner, contributor = settings.group, settings.rank - step, settings.rank + step
        if keys.start < keys.stop:
            key = counter_rng.mix_key(settings.seed, settings.rank, 1 + owner % settings.ranks)
            payload = encode([gradient.to(self._wire_dtype) for gradient in gradients], self._codec, key)
            work = send(payload, global_rank(group, owner), group=group, async_op=True)
            self._under_way.append(_Message(work, sum(gradient.numel() for gradient in gradients)))
        own_keys = self._contributed(contributor % settings.ranks)
        if own_keys is not None:
            numel = sum(torch.Size(shape).numel() for shape in self._shapes_of(own_keys))
            payload = torch.empty(
                parse(self._codec).wire_bytes(numel, self._wire_dtype),
                dtype=torch.uint8,
                device=self._totals[0].device,
            )
            work = recv(payload, global_rank(group, contributor), group=group, async_op=True)
            self._under_way.append(_Message(work, numel, payload, own_keys))
        while len(self._under_way) > 2:  # those of this step stay under way
            self._complete(self._under_way.popleft())

    def finish(self) -> Sequence[torch.Tensor]:
        while self._under_way:
            self._complete(self._under_way.popleft())
        return self._totals

    def _complete(self, message: _Message) -> None:
        message.work.wait()
        if message.payload is None:
            self._record(message.numel, message.work)
        else:
            shapes = self._shapes_of(message.keys)
            self._add_to_totals(message.keys, decode(message.payload, shapes, self._wire_dtype, self._codec))


class _Message(NamedTuple):
    """A message under way; with a payload it is one that this rank receives."""

    work: Work
    numel: int
    payload: torch.Tensor | None = None
    keys: slice = slice(0, 0)


class ScatteredGradients(GradientExchange):
    """Collects the contributions to all ranks and sums them with one reduce-scatter."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._numel = sum(total.numel() for total in self._totals)
        self._contributions = self._totals[0].new_zeros(
            (self._settings.ranks, self._numel), dtype=self._wire_dtype
        )

    def add(self, step: int, keys: slice, gradients: Sequence[torch.Tensor]) -> None:
        flat = self._contributions[(self._settings.rank - step) % self._settings.ranks]
        for whole, gradient in zip(self._views(flat), gradients, strict=True):
            whole[:, :, keys] = gradient

    def finish(self) -> Sequence[torch.Tensor]:
        settings = self._settings
        total = self._contributions.new_empty(self._numel)
        work = reduce_scatter(
            total,
            self._contributions,
            codec=self._codec,
            algorithm="direct",  # encodes every contribution once
            group=settings.group,
            async_op=True,
            seed=settings.seed,
        )
        work.wait()
        if settings.ranks > 1:
            self._record((settings.ranks - 1) * self._numel, work)
        return [part.to(torch.float32, copy=True) for part in self._views(total)]

    def _views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        sizes = [total.numel() for total in self._totals]
        return [part.view(*shape) for part, shape in zip(torch.split(flat, sizes), self._shapes, strict=True)]


def exchange_heads(x: torch.Tensor, what: str, to_heads: bool, settings: Settings) -> torch.Tensor:
    """Exchange a shard of the sequence with all heads for the whole sequence with a share of the heads, or back.

    Every part is encoded once, the rank's own part too. ``what`` is one of the values of `CARRIED`, which have a codec
    each. ``x`` is [batch, heads, tokens of this rank, head_dim] with all heads if ``to_heads``; else [batch, heads of
    this rank, all tokens, head_dim] with the tokens in rank order.
    """
    ranks, codec = settings.ranks, settings.codec_of(what)
    from_dim, to_dim = (1, 2) if to_heads else (2, 1)
    parts = [part.contiguous() for part in x.detach().chunk(ranks, from_dim)]
    shape = parts[0].shape
    numel = parts[0].numel()
    payload = torch.empty(
        (ranks, parse(codec).wire_bytes(numel, x.dtype)), dtype=torch.uint8, device=x.device
    )
    for peer, part in enumerate(parts):
        ops.encode(codec, part, counter_rng.mix_key(settings.seed, settings.rank, peer), out=payload[peer])
    received = torch.empty_like(payload)
    work = all_to_all(received, payload, group=settings.group, async_op=True)
    work.wait()
    record(settings, what, codec, x.dtype, (ranks - 1) * numel, work)
    return torch.cat([ops.decode(codec, row, numel, x.dtype).view(shape) for row in received], to_dim)


def global_rank(group: dist.ProcessGroup, rank: int) -> int:
    """Return the global rank of a rank of the group, counted around the ring."""
    return dist.get_global_rank(group, rank % group.size())
