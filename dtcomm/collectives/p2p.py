"""Point-to-point messages: send, recv, and both at once. Only the two ranks take part."""

from __future__ import annotations

import contextlib
from typing import Any

from torch import Tensor

from dtcomm import codecs
from dtcomm.codecs import Codec
from dtcomm.codecs.spec import has_variable_length
from dtcomm.collectives import _encoded
from dtcomm.collectives._call import run_message
from dtcomm.collectives._options import Group, Options, documented
from dtcomm.collectives.checks import in_memory, require_dtype
from dtcomm.errors import DtcommError
from dtcomm.runtime.communicator import Communicator, get_communicator_of_pair
from dtcomm.runtime.plans import exchange_repeated, run_repeated
from dtcomm.work import Work


@documented()
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

    Returns:
        None when the tensor may be modified again, or a ``Work`` if ``async_op``.

    Example:
        Pass an activation to the next pipeline stage::

            dtcomm.send(activation, dst=rank + 1, codec="fp8_e4m3")
    """
    repeated = (group, tensor, tensor, "send", dst, codec, checksum)
    if (work := run_repeated(repeated, async_op, seed, residual)) is not False:
        return work
    options = Options(codec, "auto", group, async_op, seed, residual, checksum)
    return _message(tensor, dst, "dst", options, repeated)


@documented()
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

    Example:
        Take an activation from the previous pipeline stage::

            dtcomm.recv(activation, src=rank - 1, codec="fp8_e4m3")
    """
    repeated = (group, tensor, tensor, "recv", src, codec, checksum)
    if (work := run_repeated(repeated, async_op)) is not False:
        return work
    return _message(tensor, src, "src", Options(codec, "auto", group, async_op, checksum=checksum), repeated)


@documented()
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

    Example:
        Pass keys and values around a ring of ranks::

            dtcomm.sendrecv(block, (rank + 1) % world_size, received, (rank - 1) % world_size, codec="int8")
    """
    memory, received = in_memory(tensor, "tensor"), in_memory(output, "output")
    if has_variable_length(codec):
        raise ValueError(f"codec: the length of a {codec} message depends on its values; use send and recv")
    sent = (group, tensor, tensor, "send", dst, codec, checksum)
    expected = (group, output, output, "recv", src, codec, checksum)
    if seed is None and residual is None and exchange_repeated(sent, expected):
        return
    # The message that is received is checked before the other one is sent, which could not be taken back.
    require_dtype("sum", output.dtype, codecs.codec(codec))
    get_communicator_of_pair(group, src, "src", False, device=None if output.is_cpu else output.device)
    options = Options(codec, "auto", group, True, seed, residual, checksum)
    sending = _message(memory, dst, "dst", options, sent)
    assert sending is not None
    try:
        _message(received, src, "src", Options(codec, "auto", group, checksum=checksum), expected)
    except BaseException:
        with contextlib.suppress(DtcommError):
            sending.wait()  # it uses the caller's tensor
        raise
    sending.wait()


def post(communicator: Communicator, sends: bool, repeated: tuple[Any, ...]) -> Work:
    """Start an uncompressed message of a pair.

    ``repeated`` is an argument of `run_repeated`, whose tensor is contiguous and of a dtype that can be sent.
    """
    work = run_repeated(repeated, True)
    if work is False:
        work = run_message(communicator, repeated[1], sends, Options(async_op=True), None, repeated)
    assert work is not None
    return work


def _message(
    tensor: Tensor, peer: int, argument: str, options: Options, repeated: tuple[Any, ...]
) -> Work | None:
    """Send the tensor if ``argument``, what errors call the peer, is "dst", or receive it."""
    sends = argument == "dst"
    memory = in_memory(tensor, "tensor")
    require_dtype("sum", tensor.dtype, codecs.codec(options.codec))
    if has_variable_length(options.codec):
        _encoded.message(memory, peer, argument, options)
        return None
    device = None if tensor.is_cpu else tensor.device
    communicator = get_communicator_of_pair(options.group, peer, argument, sends, device=device)
    return run_message(communicator, memory, sends, options, [tensor], repeated)
