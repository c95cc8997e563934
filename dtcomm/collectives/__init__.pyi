# The collectives as type checkers see them: with ``async_op=True`` a call returns a Work, and None or a Work otherwise.
from collections.abc import Sequence
from typing import Literal, TypedDict, overload

from torch import Tensor
from typing_extensions import Unpack

from dtcomm.collectives._options import Algorithm as Algorithm
from dtcomm.collectives._options import (
    AllReduceOptions,
    CoalescedOptions,
    CollectiveOptions,
    Group,
    Op,
    ReceiveOptions,
    SendOptions,
)
from dtcomm.collectives.groups import empty as empty
from dtcomm.collectives.groups import flight_record as flight_record
from dtcomm.collectives.groups import info as info
from dtcomm.collectives.p2p import sendrecv as sendrecv
from dtcomm.runtime.communicator import release as release
from dtcomm.schedule import Schedule
from dtcomm.work import Work as Work

Tensors = Sequence[Tensor]
Shards = Tensor | Sequence[Tensor]
Splits = Sequence[int] | None

class BarrierOptions(TypedDict, total=False):
    group: Group

@overload
def all_reduce(
    tensor: Tensor, op: Op = ..., *, async_op: Literal[True], **options: Unpack[AllReduceOptions]
) -> Work: ...
@overload
def all_reduce(
    tensor: Tensor, op: Op = ..., *, async_op: bool = ..., **options: Unpack[AllReduceOptions]
) -> Work | None: ...
@overload
def reduce(
    tensor: Tensor, dst: int, op: Op = ..., *, async_op: Literal[True], **options: Unpack[CollectiveOptions]
) -> Work: ...
@overload
def reduce(
    tensor: Tensor, dst: int, op: Op = ..., *, async_op: bool = ..., **options: Unpack[CollectiveOptions]
) -> Work | None: ...
@overload
def reduce_scatter(
    output: Tensor,
    input: Tensor,
    op: Op = ...,
    *,
    async_op: Literal[True],
    **options: Unpack[CollectiveOptions],
) -> Work: ...
@overload
def reduce_scatter(
    output: Tensor, input: Tensor, op: Op = ..., *, async_op: bool = ..., **options: Unpack[CollectiveOptions]
) -> Work | None: ...
@overload
def all_gather(
    output: Tensor, input: Tensor, *, async_op: Literal[True], **options: Unpack[CollectiveOptions]
) -> Work: ...
@overload
def all_gather(
    output: Tensor, input: Tensor, *, async_op: bool = ..., **options: Unpack[CollectiveOptions]
) -> Work | None: ...
@overload
def broadcast(
    tensor: Tensor, src: int, *, async_op: Literal[True], **options: Unpack[CollectiveOptions]
) -> Work: ...
@overload
def broadcast(
    tensor: Tensor, src: int, *, async_op: bool = ..., **options: Unpack[CollectiveOptions]
) -> Work | None: ...
@overload
def gather(
    tensor: Tensor,
    gather_list: Shards | None = ...,
    dst: int = ...,
    *,
    async_op: Literal[True],
    **options: Unpack[CollectiveOptions],
) -> Work: ...
@overload
def gather(
    tensor: Tensor,
    gather_list: Shards | None = ...,
    dst: int = ...,
    *,
    async_op: bool = ...,
    **options: Unpack[CollectiveOptions],
) -> Work | None: ...
@overload
def scatter(
    tensor: Tensor,
    scatter_list: Shards | None = ...,
    src: int = ...,
    *,
    async_op: Literal[True],
    **options: Unpack[CollectiveOptions],
) -> Work: ...
@overload
def scatter(
    tensor: Tensor,
    scatter_list: Shards | None = ...,
    src: int = ...,
    *,
    async_op: bool = ...,
    **options: Unpack[CollectiveOptions],
) -> Work | None: ...
@overload
def all_to_all(
    output: Tensor,
    input: Tensor,
    output_splits: Splits = ...,
    input_splits: Splits = ...,
    *,
    async_op: Literal[True],
    **options: Unpack[CollectiveOptions],
) -> Work: ...
@overload
def all_to_all(
    output: Tensor,
    input: Tensor,
    output_splits: Splits = ...,
    input_splits: Splits = ...,
    *,
    async_op: bool = ...,
    **options: Unpack[CollectiveOptions],
) -> Work | None: ...
@overload
def send(tensor: Tensor, dst: int, *, async_op: Literal[True], **options: Unpack[SendOptions]) -> Work: ...
@overload
def send(
    tensor: Tensor, dst: int, *, async_op: bool = ..., **options: Unpack[SendOptions]
) -> Work | None: ...
@overload
def recv(tensor: Tensor, src: int, *, async_op: Literal[True], **options: Unpack[ReceiveOptions]) -> Work: ...
@overload
def recv(
    tensor: Tensor, src: int, *, async_op: bool = ..., **options: Unpack[ReceiveOptions]
) -> Work | None: ...
@overload
def run(
    schedule: Schedule | str,
    tensor: Tensor | None,
    input: Tensor | None = ...,
    op: Op = ...,
    *,
    async_op: Literal[True],
    **options: Unpack[SendOptions],
) -> Work: ...
@overload
def run(
    schedule: Schedule | str,
    tensor: Tensor | None,
    input: Tensor | None = ...,
    op: Op = ...,
    *,
    async_op: bool = ...,
    **options: Unpack[SendOptions],
) -> Work | None: ...
@overload
def all_reduce_coalesced(
    tensors: Tensors, op: Op = ..., *, async_op: Literal[True], **options: Unpack[CoalescedOptions]
) -> Work: ...
@overload
def all_reduce_coalesced(
    tensors: Tensors, op: Op = ..., *, async_op: bool = ..., **options: Unpack[CoalescedOptions]
) -> Work | None: ...
@overload
def all_gather_coalesced(
    outputs: Tensors, inputs: Tensors, *, async_op: Literal[True], **options: Unpack[CoalescedOptions]
) -> Work: ...
@overload
def all_gather_coalesced(
    outputs: Tensors, inputs: Tensors, *, async_op: bool = ..., **options: Unpack[CoalescedOptions]
) -> Work | None: ...
@overload
def reduce_scatter_coalesced(
    outputs: Tensors,
    inputs: Tensors,
    op: Op = ...,
    *,
    async_op: Literal[True],
    **options: Unpack[CoalescedOptions],
) -> Work: ...
@overload
def reduce_scatter_coalesced(
    outputs: Tensors,
    inputs: Tensors,
    op: Op = ...,
    *,
    async_op: bool = ...,
    **options: Unpack[CoalescedOptions],
) -> Work | None: ...
@overload
def barrier(*, async_op: Literal[True], **options: Unpack[BarrierOptions]) -> Work: ...
@overload
def barrier(*, async_op: bool = ..., **options: Unpack[BarrierOptions]) -> Work | None: ...
