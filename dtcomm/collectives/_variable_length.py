"""Collectives that copy, with codecs whose payloads have a length that depends on the data (`Codec.variable_length`).

The engine's operations have sizes that every rank knows beforehand. So each function here encodes, exchanges the
lengths with the numbers of elements, which the ranks compare, and then moves the payloads as bytes, with the same
collective and codec ``none``. Where that collective has shards of one size they are as long as the longest payload. The
lengths must be known before the bytes move, so there is no asynchronous form, but of all_gather: that waits for the
lengths alone, and its payloads arrive while the caller goes on.

The public functions call this module when they find no plan for a call: none is ever stored for these codecs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dtcomm import codecs
from dtcomm.codecs import Codec
from dtcomm.collectives._arguments import Algorithm, Group, require_dtype, require_tensor
from dtcomm.errors import CollectiveMismatch, PayloadCorrupt
from dtcomm.kernels.ops import decode, encode
from dtcomm.work import CompositeWork, Work

SEND, HAVE = ("sends", "expects"), ("has", "has")
VALID = "broadcast, all_gather, gather, scatter, all_to_all, send and recv, and dtcomm.encode"


def has_variable_length(spec: str | Codec) -> bool:
    """Return whether a codec, or a codec of one level of a spec, has payloads of variable length."""
    inside, between = codecs.parse_levels(spec)
    return inside.variable_length or (between is not None and between.variable_length)


def require_fixed_length(codec: Codec, collective: str) -> None:
    """Raise ValueError if the engine cannot run ``collective`` with the codec, because its payloads vary in length."""
    if codec.variable_length:
        raise ValueError(
            f"codec: {str(codec)!r} cannot be used here ({collective}): the length of its payloads depends on the "
            f"data, and this operation works in pieces of a fixed size; it is valid in {VALID}"
        )


def all_gather(
    output: Tensor,
    input: Tensor,
    ranks: int,
    spec: str | Codec,
    algorithm: Algorithm,
    group: Group,
    async_op: bool,
    residual: Tensor | None,
    checksum: bool | None,
) -> Work | None:
    """`dtcomm.all_gather`."""
    from dtcomm.collectives import gather_ops

    codec = _codec_of(spec, input, False, residual)
    buffer, payload = _encode(codec, input)
    lengths = _gather_lengths(codec, payload, input, ranks, group)
    most = max(lengths)
    payloads = buffer.new_empty(ranks * most)
    work = gather_ops.all_gather(
        payloads, buffer[:most], algorithm=algorithm, group=group, checksum=checksum, async_op=True
    )

    def decode_payloads() -> None:
        shards = output.view(-1).view(ranks, -1)
        for shard, whole, length in zip(shards, payloads.view(ranks, -1), lengths, strict=True):
            _decode(codec, whole[:length], shard)

    decoded = CompositeWork([work], [output], decode_payloads)
    if async_op:
        return decoded
    decoded.wait()
    return None


def broadcast(
    tensor: Tensor,
    src: int,
    is_source: bool,
    ranks: int,
    spec: str | Codec,
    algorithm: Algorithm,
    group: Group,
    async_op: bool,
    residual: Tensor | None,
    checksum: bool | None,
) -> None:
    """`dtcomm.broadcast`; ``tensor`` is contiguous."""
    from dtcomm.collectives import gather_ops

    codec = _codec_of(spec, tensor, async_op, residual)
    payload = _encode(codec, tensor)[1] if is_source else tensor.new_empty(0, dtype=torch.uint8)
    # The source, too, learns how many elements the others expect, so that all ranks raise the same error.
    lengths = _gather_lengths(codec, payload, tensor, ranks, group, HAVE)
    if not is_source:
        payload = tensor.new_empty(max(lengths), dtype=torch.uint8)
    gather_ops.broadcast(payload, src, algorithm=algorithm, group=group, checksum=checksum)
    if not is_source:
        _decode(codec, payload, tensor)


def gather(
    tensor: Tensor,
    output: Tensor | None,
    dst: int,
    ranks: int,
    spec: str | Codec,
    algorithm: Algorithm,
    group: Group,
    async_op: bool,
    residual: Tensor | None,
    checksum: bool | None,
) -> None:
    """`dtcomm.gather`; ``output`` holds the tensors of all ranks, on the destination."""
    from dtcomm.collectives import gather_ops

    codec = _codec_of(spec, tensor, async_op, residual)
    buffer, payload = _encode(codec, tensor)
    lengths = _gather_lengths(codec, payload, tensor, ranks, group)
    most = max(lengths)
    payloads = None if output is None else buffer.new_empty(ranks * most)
    gather_ops.gather(buffer[:most], payloads, dst, algorithm=algorithm, group=group, checksum=checksum)
    if output is None:
        return
    assert payloads is not None
    for shard, whole, length in zip(output.view(ranks, -1), payloads.view(ranks, -1), lengths, strict=True):
        _decode(codec, whole[:length], shard)


def scatter(
    tensor: Tensor,
    source: Tensor | None,
    src: int,
    rank: int,
    ranks: int,
    spec: str | Codec,
    algorithm: Algorithm,
    group: Group,
    async_op: bool,
    residual: Tensor | None,
    checksum: bool | None,
) -> None:
    """`dtcomm.scatter`; ``source`` holds the tensors of all ranks, on the source."""
    from dtcomm.collectives import gather_ops

    codec = _codec_of(spec, tensor, async_op, residual)
    encoded = []
    announced = torch.zeros(ranks + 1, dtype=torch.int64)
    announced[ranks] = tensor.numel()
    if source is not None:
        encoded = [_encode(codec, shard)[1] for shard in source.view(-1).view(ranks, -1)]
        announced[:ranks] = torch.tensor([payload.numel() for payload in encoded])
    announcements = torch.empty(ranks, ranks + 1, dtype=torch.int64)
    gather_ops.all_gather(announcements, announced, group=group)
    # Only the source's lengths are not zero. All ranks compare all numbers of elements, so that all raise an error.
    sizes = torch.stack([announcements[:, :ranks].amax(0), announcements[:, ranks]], 1)
    lengths = _checked(codec, sizes.tolist(), ranks * [tensor.numel()], tensor.dtype, _members(ranks), HAVE)
    most = max(lengths)
    payloads = None
    if source is not None:
        payloads = source.new_zeros(ranks, most, dtype=torch.uint8)
        for row, payload in zip(payloads, encoded, strict=True):
            row[: payload.numel()] = payload
        payloads = payloads.view(-1)
    own = tensor.new_empty(most, dtype=torch.uint8)
    gather_ops.scatter(own, payloads, src, algorithm=algorithm, group=group, checksum=checksum)
    _decode(codec, own[: lengths[rank]], tensor.view(-1))


def all_to_all(
    output: Tensor,
    input: Tensor,
    sent: Sequence[int],
    received: Sequence[int],
    spec: str | Codec,
    algorithm: Algorithm,
    group: Group,
    async_op: bool,
    residual: Tensor | None,
    checksum: bool | None,
) -> None:
    """`dtcomm.all_to_all` of ``sent`` elements for each rank and ``received`` ones from each rank."""
    from dtcomm.collectives import alltoall

    codec = _codec_of(spec, input, async_op, residual)
    payloads = [_encode(codec, shard)[1] for shard in torch.split(input.view(-1), list(sent))]
    lengths = [payload.numel() for payload in payloads]
    # Both ends of a pair learn what the other one sends and expects, so that both raise an error.
    arriving = torch.empty(len(lengths), 3, dtype=torch.int64)
    alltoall.all_to_all(arriving, torch.tensor(list(zip(lengths, sent, received, strict=True))), group=group)
    peers = _members(len(lengths))
    sizes = _checked(codec, arriving[:, :2].tolist(), received, input.dtype, peers)
    for expected, numel, peer in zip(arriving[:, 2].tolist(), sent, peers, strict=True):
        if expected != numel:
            raise CollectiveMismatch(
                f"{peer} expects {expected} elements of {input.dtype}, this rank sends {numel}"
            )
    whole = input.new_empty(sum(sizes), dtype=torch.uint8)
    alltoall.all_to_all(
        whole,
        torch.cat(payloads),
        sizes,
        lengths,
        algorithm=algorithm,
        group=group,
        checksum=checksum,
    )
    shards = torch.split(output.view(-1), list(received))
    for shard, payload in zip(shards, torch.split(whole, sizes), strict=True):
        _decode(codec, payload, shard)


def message(
    tensor: Tensor,
    peer: int,
    sends: bool,
    spec: str | Codec,
    group: Group,
    async_op: bool,
    residual: Tensor | None,
    checksum: bool | None,
) -> None:
    """`dtcomm.send` or `dtcomm.recv`; ``tensor`` is contiguous."""
    from dtcomm.collectives import p2p

    codec = _codec_of(spec, tensor, async_op, residual)
    if sends:
        _, payload = _encode(codec, tensor)
        p2p.send(torch.tensor([payload.numel(), tensor.numel()]), peer, group=group)
        p2p.send(payload, peer, group=group, checksum=checksum)
        return
    sizes = torch.empty(2, dtype=torch.int64)
    p2p.recv(sizes, peer, group=group)
    (length,) = _checked(codec, [sizes.tolist()], [tensor.numel()], tensor.dtype, [f"rank {peer}"])
    payload = tensor.new_empty(length, dtype=torch.uint8)
    p2p.recv(payload, peer, group=group, checksum=checksum)
    _decode(codec, payload, tensor.view(-1))


def _codec_of(spec: str | Codec, tensor: Tensor, async_op: bool, residual: Tensor | None) -> Codec:
    """Return the codec; raise for arguments that it does not take."""
    codec, between = codecs.parse_levels(spec)
    if between is not None:
        raise ValueError(
            f"codec: {spec!r} has two levels; 'lossless' has one, as its payloads are not encoded again"
        )
    require_tensor(tensor, "tensor")
    require_dtype("sum", tensor.dtype, codec)
    if not tensor.is_cpu:
        raise ValueError(
            f"tensor: codec {str(codec)!r} has kernels for the CPU only, got a tensor on {tensor.device}"
        )
    if async_op:
        raise ValueError(
            f"async_op: codec {str(codec)!r} has no asynchronous form, because the ranks exchange the lengths of their "
            "payloads first; pass False"
        )
    if residual is not None:
        raise ValueError(f"residual: codec {str(codec)!r} loses nothing; pass None")
    return codec


def _encode(codec: Codec, tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Return memory for the longest payload, zeros where nothing is written, and its part that is the payload."""
    buffer = tensor.new_zeros(codec.wire_bytes(tensor.numel(), tensor.dtype), dtype=torch.uint8)
    return buffer, encode(codec, tensor.detach(), out=buffer)


def _decode(codec: Codec, payload: Tensor, out: Tensor) -> None:
    decode(codec, payload, out.numel(), out.dtype, out.detach())


def _gather_lengths(
    codec: Codec, payload: Tensor, tensor: Tensor, ranks: int, group: Group, verbs: tuple[str, str] = SEND
) -> list[int]:
    """Return the lengths of all ranks' payloads."""
    from dtcomm.collectives import gather_ops

    sizes = torch.empty(ranks, 2, dtype=torch.int64)
    gather_ops.all_gather(sizes, torch.tensor([payload.numel(), tensor.numel()]), group=group)
    return _checked(codec, sizes.tolist(), ranks * [tensor.numel()], tensor.dtype, _members(ranks), verbs)


def _members(ranks: int) -> list[str]:
    """Return how errors name the ranks of a group."""
    return [f"rank {rank} of the group" for rank in range(ranks)]


def _checked(
    codec: Codec,
    sizes: Sequence[Sequence[int]],
    expected: Sequence[int],
    dtype: torch.dtype,
    senders: Sequence[str],
    verbs: tuple[str, str] = SEND,
) -> list[int]:
    """Return the lengths of payloads that other ranks have announced.

    Args:
        codec: Their codec.
        sizes: For each payload its length and the number of its elements.
        expected: How many elements this rank expects in each.
        dtype: The dtype of the elements.
        senders: How errors name the ranks that send them.
        verbs: What errors say that they and this rank do with the elements: `SEND` or `HAVE`.

    Raises:
        CollectiveMismatch: A payload has another number of elements than this rank expects.
        PayloadCorrupt: A length is impossible.
    """
    lengths = []
    for (length, numel), wanted, sender in zip(sizes, expected, senders, strict=True):
        if numel != wanted:
            raise CollectiveMismatch(
                f"{sender} {verbs[0]} {numel} elements of {dtype}, this rank {verbs[1]} {wanted}"
            )
        if not 0 <= length <= codec.wire_bytes(numel, dtype):
            raise PayloadCorrupt(
                f"{sender} announced {length} bytes for {numel} elements of {dtype} in {codec}"
            )
        lengths.append(length)
    return lengths
