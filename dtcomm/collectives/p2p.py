"""send and recv: two ranks, and nobody else need know."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

import torch

from dtcomm import codecs
from dtcomm.codecs import Codec
from dtcomm.collectives._arguments import (
    Group,
    ReceiveOptions,
    SendOptions,
    in_memory,
    require_dtype,
    require_residual,
    require_tensor,
)
from dtcomm.collectives._dispatch import own, plan_for, start
from dtcomm.device.streams import streams_of
from dtcomm.runtime.communicator import Communicator
from dtcomm.runtime.p2p_pairs import Pair, pair_of
from dtcomm.runtime.types import Buffers
from dtcomm.runtime.work import Work
from dtcomm.schedule import Schedule, Transfer

if TYPE_CHECKING:
    from typing_extensions import Unpack

# A message is a broadcast over two ranks of which only the receiver has an output.
_WAYS = [
    own(
        Schedule(
            collective="broadcast",
            ranks=2,
            chunks=1,
            root=root,
            transfers=(Transfer(0, root, 1 - root, 0, "copy"),),
        )
    )._replace(name="send")
    for root in (0, 1)
]


@overload
def send(
    tensor: torch.Tensor,
    dst: int,
    *,
    async_op: Literal[True],
    **options: Unpack[SendOptions],
) -> Work: ...


@overload
def send(
    tensor: torch.Tensor,
    dst: int,
    *,
    async_op: bool = False,
    **options: Unpack[SendOptions],
) -> Work | None: ...


def send(
    tensor: torch.Tensor,
    dst: int,
    *,
    codec: str | Codec = "none",
    group: Group = None,
    async_op: bool = False,
    seed: int | None = None,
    residual: torch.Tensor | None = None,
    checksum: bool | None = None,
) -> Work | None:
    """Send ``tensor`` to ``dst`` (a global rank), which must ``recv`` it with the same size, dtype and codec.

    Messages from one rank to another arrive in the order in which they were sent. ``tensor`` stays as it is.
    """
    return _message(tensor, dst, "dst", True, codec, group, async_op, seed, residual, checksum)


@overload
def recv(
    tensor: torch.Tensor,
    src: int,
    *,
    async_op: Literal[True],
    **options: Unpack[ReceiveOptions],
) -> Work: ...


@overload
def recv(
    tensor: torch.Tensor,
    src: int,
    *,
    async_op: bool = False,
    **options: Unpack[ReceiveOptions],
) -> Work | None: ...


def recv(
    tensor: torch.Tensor,
    src: int,
    *,
    codec: str | Codec = "none",
    group: Group = None,
    async_op: bool = False,
    checksum: bool | None = None,
) -> Work | None:
    """Receive what ``src`` (a global rank) sends into ``tensor``."""
    return _message(tensor, src, "src", False, codec, group, async_op, None, None, checksum)


def _message(
    tensor: torch.Tensor,
    peer: int,
    argument: str,
    sends: bool,
    codec: str | Codec,
    group: Group,
    async_op: bool,
    seed: int | None,
    residual: torch.Tensor | None,
    checksum: bool | None,
) -> Work | None:
    require_tensor(tensor, "tensor")
    memory = in_memory(tensor, "tensor")
    require_dtype("sum", tensor.dtype, codecs.codec(codec))
    if residual is not None:
        require_residual(residual, memory, "residual")
    device = None if tensor.is_cpu else tensor.device
    pair = pair_of(group, peer, argument, device=device)
    buffers = [Buffers(memory if sends else None, None if sends else memory, residual)]

    def begin(communicator: Communicator, asynchronous: bool) -> Work | None:
        return _begin(communicator, buffers, [tensor], sends, codec, seed, asynchronous, checksum)

    if async_op and device is not None:
        # It may begin on another thread: after what this one has given its stream.
        streams = streams_of(device)
        stream = streams.current()

        def begin_there(communicator: Communicator) -> Work | None:
            with streams.on(stream):
                return begin(communicator, True)

        return pair.start_deferred(sends, begin_there, [tensor])
    if async_op:
        return pair.start_deferred(sends, lambda communicator: begin(communicator, True), [tensor])
    begin(pair.communicator(sends), False)
    return None


def post(pair: Pair, memory: torch.Tensor, sends: bool) -> Work:
    """Start a message of a pair, as it is: ``memory`` is contiguous and its dtype one that can be sent."""
    buffers = [Buffers(memory if sends else None, None if sends else memory)]

    def begin(communicator: Communicator) -> Work | None:
        return _begin(communicator, buffers, [memory], sends, "none", None, True, None)

    return pair.start_deferred(sends, begin, [memory])


def _begin(
    communicator: Communicator,
    buffers: list[Buffers],
    outputs: list[torch.Tensor],
    sends: bool,
    codec: str | Codec,
    seed: int | None,
    asynchronous: bool,
    checksum: bool | None,
) -> Work | None:
    tensor = outputs[0]
    root = communicator.rank if sends else 1 - communicator.rank
    key = (tensor.numel(), tensor.dtype, codec, checksum)
    plan: Any = communicator.plans.get(key)
    if plan is None:
        plan = plan_for(
            communicator,
            key,
            "broadcast",
            "sum",
            [tensor.numel()],
            [tensor.dtype],
            [codec],
            _WAYS[root],
            root,
            checksum=checksum,
        )
    return start(communicator, plan, buffers, outputs, seed, asynchronous)
