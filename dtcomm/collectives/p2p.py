"""Point-to-point messages: send, recv, and both at once. Only the two ranks take part."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Literal, overload

from torch import Tensor

from dtcomm import codecs
from dtcomm.codecs import Codec
from dtcomm.collectives import _variable_length
from dtcomm.collectives._arguments import (
    Group,
    ReceiveOptions,
    SendOptions,
    in_memory,
    require_dtype,
    require_residual,
    require_tensor,
)
from dtcomm.collectives._dispatch import NamedSchedule, make_plan, start
from dtcomm.errors import DtcommError
from dtcomm.runtime import warm_calls
from dtcomm.runtime.communicator import Communicator
from dtcomm.runtime.communicator_cache import get_communicator_of_pair
from dtcomm.runtime.types import Buffers
from dtcomm.schedule import Schedule, Transfer
from dtcomm.work import Work

if TYPE_CHECKING:
    from typing_extensions import Unpack

# A message is a broadcast over two ranks in which only the receiver has an output. Indexed by the root.
_SCHEDULES = [
    NamedSchedule.of(
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
def send(tensor: Tensor, dst: int, *, async_op: Literal[True], **options: Unpack[SendOptions]) -> Work: ...


@overload
def send(
    tensor: Tensor, dst: int, *, async_op: bool = False, **options: Unpack[SendOptions]
) -> Work | None: ...


def send(
    tensor: Tensor,
    dst: int,
    *,
    codec: str | Codec = "none",
    group: Group = None,
    async_op: bool = False,
    seed: int | None = None,
    residual: Tensor | None = None,
    checksum: bool | None = None,
) -> Work | None:
    """Send a tensor to another rank, which must call `recv`.

    Messages from one rank to another arrive in the order in which they were sent. The tensor is unchanged.

    Args:
        tensor: A dense tensor.
        dst: The global rank of the receiver, which calls `recv` with the same size, dtype and codec.
        codec: The codec of the message: a spec string such as ``"int8"``, or a ``Codec``. Both ranks give the same.
        group: The process group; None is the default group.
        async_op: If True, start the operation and return a ``Work`` at once. The tensors must not be used until the
            work is done.
        seed: The key of stochastic rounding; None is the number of the message.
        residual: Error feedback: an fp32 tensor with as many elements as the tensor. It is added to this rank's
            contribution and then overwritten with the error of encoding it. None means no feedback.
        checksum: If True, every payload travels with its CRC32C, which the receiver verifies. None takes the value of
            the variable DTCOMM_CHECKSUM. It is the same on both ranks.

    Returns:
        None when the tensor may be modified again, or a ``Work`` if ``async_op``.

    Raises:
        TypeError, ValueError: If an argument is not valid. The message names it; nothing has been started.
        CollectiveMismatch: If the ranks call different operations.
        CollectiveTimeout: If a rank does not take part within the group's timeout.
        PeerLost: If a rank died.
        PayloadCorrupt: If a checksum does not match.

    Example:
        Pass an activation to the next pipeline stage::

            dtcomm.send(activation, dst=rank + 1, codec="fp8_e4m3")
    """
    return _message(tensor, dst, "dst", True, codec, group, async_op, seed, residual, checksum)


@overload
def recv(tensor: Tensor, src: int, *, async_op: Literal[True], **options: Unpack[ReceiveOptions]) -> Work: ...


@overload
def recv(
    tensor: Tensor, src: int, *, async_op: bool = False, **options: Unpack[ReceiveOptions]
) -> Work | None: ...


def recv(
    tensor: Tensor,
    src: int,
    *,
    codec: str | Codec = "none",
    group: Group = None,
    async_op: bool = False,
    checksum: bool | None = None,
) -> Work | None:
    """Receive a tensor from another rank, which must call `send`.

    Args:
        tensor: A dense tensor, which is overwritten with the message.
        src: The global rank of the sender.
        codec: The codec of the message: a spec string such as ``"int8"``, or a ``Codec``. Both ranks give the same.
        group: The process group; None is the default group.
        async_op: If True, start the operation and return a ``Work`` at once. The tensors must not be used until the
            work is done.
        checksum: If True, every payload travels with its CRC32C, which the receiver verifies. None takes the value of
            the variable DTCOMM_CHECKSUM. It is the same on both ranks.

    Returns:
        None when the result is complete, or a ``Work`` if ``async_op``.

    Raises:
        TypeError, ValueError: If an argument is not valid. The message names it; nothing has been started.
        CollectiveMismatch: If the ranks call different operations.
        CollectiveTimeout: If a rank does not take part within the group's timeout.
        PeerLost: If a rank died.
        PayloadCorrupt: If a checksum does not match.

    Example:
        Take an activation from the previous pipeline stage::

            dtcomm.recv(activation, src=rank - 1, codec="fp8_e4m3")
    """
    return _message(tensor, src, "src", False, codec, group, async_op, None, None, checksum)


def sendrecv(
    tensor: Tensor,
    dst: int,
    output: Tensor,
    src: int,
    *,
    codec: str | Codec = "none",
    group: Group = None,
    seed: int | None = None,
    residual: Tensor | None = None,
    checksum: bool | None = None,
) -> None:
    """Send a tensor to one rank and receive one from another at the same time, as MPI_Sendrecv does.

    Two ranks that both send first and then receive would wait for each other with large tensors; this call does not.
    The other ranks may call `sendrecv`, or `send` and `recv`.

    Args:
        tensor: A dense tensor, which is sent.
        dst: The global rank of its receiver.
        output: A dense tensor, which is overwritten with the message from ``src``. Its size and dtype may differ from
            those of ``tensor``, with which it has no memory in common.
        src: The global rank of that message's sender.
        codec: The codec of both messages.
        group: The process group; None is the default group.
        seed: The key of stochastic rounding of ``tensor``; None is the number of the message.
        residual: Error feedback of ``tensor``: an fp32 tensor with as many elements. It is added to ``tensor`` and then
            overwritten with the error of encoding it. None means no feedback.
        checksum: If True, both payloads travel with their CRC32C, which the receivers verify. None takes the value of
            the variable DTCOMM_CHECKSUM.

    Raises:
        TypeError, ValueError: If an argument is not valid. The message names it; nothing has been started.
        CollectiveMismatch: If the ranks call different operations.
        CollectiveTimeout: If a rank does not take part within the group's timeout.
        PeerLost: If a rank died.
        PayloadCorrupt: If a checksum does not match.

    Example:
        Pass keys and values around a ring of ranks::

            dtcomm.sendrecv(block, (rank + 1) % world_size, received, (rank - 1) % world_size, codec="int8")
    """
    require_tensor(tensor, "tensor")
    require_tensor(output, "output")
    in_memory(output, "output")
    if _variable_length.has_variable_length(codec):
        raise ValueError(f"codec: the length of a {codec} message depends on its values; use send and recv")
    if seed is None and residual is None:
        sent = ("send", group, tensor, tensor, dst, codec, checksum)
        if warm_calls.exchange(sent, ("recv", group, output, output, src, codec, checksum)):
            return
    # The message that is received is checked before the other one is sent, which could not be taken back.
    require_dtype("sum", output.dtype, codecs.codec(codec))
    get_communicator_of_pair(group, src, "src", False, device=None if output.is_cpu else output.device)
    sending = _message(tensor, dst, "dst", True, codec, group, True, seed, residual, checksum)
    assert sending is not None
    try:
        _message(output, src, "src", False, codec, group, False, None, None, checksum)
    except BaseException:
        with contextlib.suppress(DtcommError):
            sending.wait()  # it uses the caller's tensor
        raise
    sending.wait()


def _message(
    tensor: Tensor,
    peer: int,
    argument: str,
    sends: bool,
    codec: str | Codec,
    group: Group,
    async_op: bool,
    seed: int | None,
    residual: Tensor | None,
    checksum: bool | None,
) -> Work | None:
    warm = None
    if seed is None and residual is None:
        warm = ("send" if sends else "recv", group, tensor, tensor, peer, codec, checksum)
        if started := warm_calls.start(warm, async_op):
            return started if async_op else None
    require_tensor(tensor, "tensor")
    memory = in_memory(tensor, "tensor")
    require_dtype("sum", tensor.dtype, codecs.codec(codec))
    if _variable_length.has_variable_length(codec):
        _variable_length.message(memory, peer, sends, codec, group, async_op, residual, checksum)
        return None
    if residual is not None:
        require_residual(residual, memory, "residual")
    device = None if tensor.is_cpu else tensor.device
    communicator = get_communicator_of_pair(group, peer, argument, sends, device=device)
    buffers = [Buffers(memory if sends else None, None if sends else memory, residual)]
    return _start_message(communicator, buffers, [tensor], sends, codec, seed, async_op, checksum, warm)


def post(communicator: Communicator, memory: Tensor, sends: bool) -> Work:
    """Start an uncompressed message of a pair; ``memory`` is contiguous and of a dtype that can be sent."""
    buffers = [Buffers(memory if sends else None, None if sends else memory)]
    work = _start_message(communicator, buffers, [memory], sends, "none", None, True, None)
    assert work is not None
    return work


def _start_message(
    communicator: Communicator,
    buffers: list[Buffers],
    outputs: list[Tensor],
    sends: bool,
    codec: str | Codec,
    seed: int | None,
    asynchronous: bool,
    checksum: bool | None,
    warm: tuple[Any, ...] | None = None,
) -> Work | None:
    tensor = outputs[0]
    root = communicator.rank if sends else 1 - communicator.rank
    key = (tensor.numel(), tensor.dtype, codec, checksum)
    plan = communicator.plans.get(key)
    if plan is None:
        plan = make_plan(
            communicator,
            key,
            "broadcast",
            [(tensor.numel(), tensor.dtype, codec)],
            _SCHEDULES[root],
            root=root,
            checksum=checksum,
        )
    return start(communicator, plan, buffers, outputs, seed, asynchronous, warm=warm)
