"""Collectives that copy, with codecs whose payloads have a length that depends on the data (`Codec.variable_length`).

The engine's operations have sizes that every rank knows beforehand. So each function here encodes, exchanges the
lengths with the numbers of elements, which the ranks compare, and then moves the payloads as bytes, with the same
collective and codec ``none``. Where that collective has shards of one size they are as long as the longest payload. The
lengths must be known before the bytes move, so there is no asynchronous form, but of all_gather: that waits for the
lengths alone, and its payloads arrive while the caller goes on.

The public functions call this module once they have checked their tensors.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dtcomm import codecs
from dtcomm.codecs import Codec
from dtcomm.collectives._call import Call, exchange_splits, run_internal, run_message
from dtcomm.collectives._options import Group, Options
from dtcomm.collectives.checks import require_dtype, require_tensor
from dtcomm.errors import CollectiveMismatch, PayloadCorrupt
from dtcomm.kernels.ops import decode, encode
from dtcomm.runtime.communicator import Communicator, get_communicator_of_pair
from dtcomm.work import CompositeWork, Work

SEND, HAVE = ("sends", "expects"), ("has", "has")


def all_gather(output: Tensor, input: Tensor, ranks: int, options: Options) -> Work | None:
    """`dtcomm.all_gather`."""
    codec = _codec_of(input, options._replace(async_op=False))
    buffer, payload = _encode(codec, input)
    lengths = _gather_lengths(codec, payload, input, ranks, options.group)
    most = max(lengths)
    payloads = buffer.new_empty(ranks * most)
    call = Call("all_gather", buffer[:most], payloads)
    work = run_internal(call, options.uncompressed(options.algorithm, async_op=True))
    assert work is not None  # because of async_op

    def decode_payloads() -> None:
        shards = output.view(-1).view(ranks, -1)
        for shard, whole, length in zip(shards, payloads.view(ranks, -1), lengths, strict=True):
            _decode(codec, whole[:length], shard)

    decoded = CompositeWork([work], [output], decode_payloads)
    if options.async_op:
        return decoded
    decoded.wait()
    return None


def broadcast(tensor: Tensor, root: int, communicator: Communicator, options: Options) -> None:
    """`dtcomm.broadcast`; ``tensor`` is contiguous."""
    is_source = root == communicator.rank
    codec = _codec_of(tensor, options)
    payload = _encode(codec, tensor)[1] if is_source else tensor.new_empty(0, dtype=torch.uint8)
    # The source, too, learns how many elements the others expect, so that all ranks raise the same error.
    lengths = _gather_lengths(codec, payload, tensor, communicator.size, options.group, HAVE)
    if not is_source:
        payload = tensor.new_empty(max(lengths), dtype=torch.uint8)
    run_internal(Call("broadcast", payload, payload, root=root), options.uncompressed(options.algorithm))
    if not is_source:
        _decode(codec, payload, tensor)


def gather(tensor: Tensor, output: Tensor | None, root: int, ranks: int, options: Options) -> None:
    """`dtcomm.gather`; ``output`` holds the tensors of all ranks, on the destination."""
    codec = _codec_of(tensor, options)
    buffer, payload = _encode(codec, tensor)
    lengths = _gather_lengths(codec, payload, tensor, ranks, options.group)
    most = max(lengths)
    payloads = None if output is None else buffer.new_empty(ranks * most)
    call = Call("gather", buffer[:most], payloads, root=root)
    run_internal(call, options.uncompressed(options.algorithm))
    if output is None:
        return
    assert payloads is not None
    for shard, whole, length in zip(output.view(ranks, -1), payloads.view(ranks, -1), lengths, strict=True):
        _decode(codec, whole[:length], shard)


def scatter(
    tensor: Tensor, source: Tensor | None, root: int, communicator: Communicator, options: Options
) -> None:
    """`dtcomm.scatter`; ``source`` holds the tensors of all ranks, on the source."""
    rank, ranks = communicator.rank, communicator.size
    codec = _codec_of(tensor, options)
    encoded = []
    announced = torch.zeros(ranks + 1, dtype=torch.int64)
    announced[ranks] = tensor.numel()
    if source is not None:
        encoded = [_encode(codec, shard)[1] for shard in source.view(-1).view(ranks, -1)]
        announced[:ranks] = torch.tensor([payload.numel() for payload in encoded])
    announcements = torch.empty(ranks, ranks + 1, dtype=torch.int64)
    run_internal(Call("all_gather", announced, announcements), Options(group=options.group))
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
    run_internal(Call("scatter", payloads, own, root=root), options.uncompressed(options.algorithm))
    _decode(codec, own[: lengths[rank]], tensor.view(-1))


def all_to_all(
    output: Tensor,
    input: Tensor,
    sent: Sequence[int],
    received: Sequence[int],
    communicator: Communicator,
    options: Options,
) -> None:
    """`dtcomm.all_to_all` of ``sent`` elements for each rank and ``received`` ones from each rank."""
    codec = _codec_of(input, options)
    payloads = [_encode(codec, shard)[1] for shard in torch.split(input.view(-1), list(sent))]
    lengths = [payload.numel() for payload in payloads]
    # Both ends of a pair learn what the other one sends and expects, so that both raise an error.
    announced = torch.tensor(list(zip(lengths, sent, received, strict=True)))
    arriving = torch.empty(len(lengths), 3, dtype=torch.int64)
    run_internal(Call("all_to_all", announced, arriving), Options(group=options.group))
    peers = _members(len(lengths))
    sizes = _checked(codec, arriving[:, :2].tolist(), received, input.dtype, peers)
    for expected, numel, peer in zip(arriving[:, 2].tolist(), sent, peers, strict=True):
        if expected != numel:
            raise CollectiveMismatch(
                f"{peer} expects {expected} elements of {input.dtype}, this rank sends {numel}"
            )
    whole = input.new_empty(sum(sizes), dtype=torch.uint8)
    splits = exchange_splits(communicator, lengths, sizes, options.group)
    call = Call("all_to_all", torch.cat(payloads), whole, splits=splits)
    run_internal(call, options.uncompressed(options.algorithm))
    shards = torch.split(output.view(-1), list(received))
    for shard, payload in zip(shards, torch.split(whole, sizes), strict=True):
        _decode(codec, payload, shard)


def message(tensor: Tensor, peer: int, argument: str, options: Options) -> None:
    """`dtcomm.send` if ``argument``, what errors call the peer, is "dst", or `dtcomm.recv`; for a contiguous tensor."""
    sends = argument == "dst"
    codec = _codec_of(tensor, options)
    communicator = get_communicator_of_pair(options.group, peer, argument, sends)
    if sends:
        _, payload = _encode(codec, tensor)
        sizes = torch.tensor([payload.numel(), tensor.numel()])
        run_message(communicator, sizes, True, Options())
        run_message(communicator, payload, True, options.uncompressed())
        return
    sizes = torch.empty(2, dtype=torch.int64)
    run_message(communicator, sizes, False, Options())
    (length,) = _checked(codec, [sizes.tolist()], [tensor.numel()], tensor.dtype, [f"rank {peer}"])
    payload = tensor.new_empty(length, dtype=torch.uint8)
    run_message(communicator, payload, False, options.uncompressed())
    _decode(codec, payload, tensor.view(-1))


def _codec_of(tensor: Tensor, options: Options) -> Codec:
    """Return the codec; raise for arguments that it does not take."""
    codec, between = codecs.parse_levels(options.codec)
    if between is not None:
        raise ValueError(
            f"codec: {options.codec!r} has two levels; 'lossless' has one, as its payloads are not encoded again"
        )
    require_tensor(tensor, "tensor")
    require_dtype("sum", tensor.dtype, codec)
    if not tensor.is_cpu:
        raise ValueError(
            f"tensor: codec {str(codec)!r} has kernels for the CPU only, got a tensor on {tensor.device}"
        )
    if options.async_op:
        raise ValueError(
            f"async_op: codec {str(codec)!r} has no asynchronous form, because the ranks exchange the lengths of their "
            "payloads first; pass False"
        )
    if options.residual is not None:
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
    sizes = torch.empty(ranks, 2, dtype=torch.int64)
    own = torch.tensor([payload.numel(), tensor.numel()])
    run_internal(Call("all_gather", own, sizes), Options(group=group))
    return _checked(codec, sizes.tolist(), ranks * [tensor.numel()], tensor.dtype, _members(ranks), verbs)


def _members(ranks: int) -> list[str]:
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

    ``sizes`` has the length and the number of elements of each payload, of which this rank expects ``expected``.
    ``senders`` are the names of its ranks in errors, and ``verbs`` what they do with the elements: `SEND` or `HAVE`.
    CollectiveMismatch if the numbers of elements differ, PayloadCorrupt if a length is impossible.
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
