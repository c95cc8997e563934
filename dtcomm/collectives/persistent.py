"""Persistent operations, as MPI has them: planned once, then run any number of times on the same tensors."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from dtcomm.codecs import Codec
from dtcomm.collectives._arguments import (
    Algorithm,
    Group,
    Op,
    in_memory,
    require_no_overlap,
    require_pair,
    require_residual,
    require_tensor,
)
from dtcomm.collectives._dispatch import make_plan
from dtcomm.collectives.alltoall import require_equal_shards, require_exchange
from dtcomm.kernels.local_tasks import LocalTask
from dtcomm.runtime.communicator import Communicator
from dtcomm.runtime.communicator_cache import get_communicator_for
from dtcomm.runtime.types import Buffers, OpHooks, Plan
from dtcomm.work import Work


class PersistentOperation:
    """An operation on fixed tensors, made by `all_reduce_init` and its like. Call it, or `start` it and `wait`.

    The operations of one communicator, persistent or not, run in the order in which they are started, on all ranks. It
    keeps its tensors alive. Once its group is destroyed or released, it raises CommunicatorClosed.

    Args:
        communicator: The ranks, which are connected.
        plan: The plan of the operation.
        buffers: Its tensors, contiguous.
        tensor: The tensor that receives the result.
        hooks: Tasks that run with the operation; None: none.

    Example:
        >>> import torch, dtcomm
        >>> operation = dtcomm.all_reduce_init(torch.ones(4))
        >>> operation()
        >>> operation.start()
        >>> operation.wait()
    """

    __slots__ = (
        "_address",
        "_buffers",
        "_hooks",
        "_input",
        "_input_address",
        "_next",
        "_outputs",
        "_plan",
        "_run",
        "_submit",
        "_tensor",
        "_work",
    )

    def __init__(
        self,
        communicator: Communicator,
        plan: Plan,
        buffers: Buffers,
        tensor: Tensor,
        hooks: OpHooks | None = None,
    ) -> None:
        self._plan, self._hooks, self._next = plan, hooks, communicator.counter.next
        self._buffers, self._tensor, self._outputs = [buffers], tensor, [tensor]
        self._address = tensor.data_ptr()
        self._input = None if buffers.input is tensor else buffers.input
        self._input_address = 0 if self._input is None else self._input.data_ptr()
        self._work: Any = None
        bind = getattr(plan, "bind", None) if hooks is None else None
        if bind is None:
            self._run, self._submit = self._run_plan, self._submit_plan
        else:
            self._run, self._submit = bind(buffers, self._outputs, communicator.counter)

    def __call__(self) -> None:
        """Run to the end, on every rank; raises what the collective raises."""
        if (
            self._work is not None
            or self._tensor.data_ptr() != self._address
            or (self._input is not None and self._input.data_ptr() != self._input_address)
        ):
            self._require_ready()
        self._run()

    def start(self) -> None:
        """Start the operation and return at once; the tensors must not be used until `wait` returns.

        Raises:
            RuntimeError: It was started before and not waited for.
        """
        if (
            self._work is not None
            or self._tensor.data_ptr() != self._address
            or (self._input is not None and self._input.data_ptr() != self._input_address)
        ):
            self._require_ready()
        self._work = self._submit()

    def wait(self) -> None:
        """Wait until the operation that was started is done; raises what it failed with.

        Raises:
            RuntimeError: It was not started.
        """
        work, self._work = self._work, None
        if work is None:
            raise RuntimeError("wait: the operation was not started; call start() first")
        work.wait()

    def _require_ready(self) -> None:
        """Raise RuntimeError if the operation is running or a tensor has other memory than at first."""
        if self._work is not None:
            raise RuntimeError("start: the operation runs already; call wait() first")
        raise RuntimeError(
            "tensor: its memory has changed since the operation was made; make another one for the new memory"
        )

    def _run_plan(self) -> None:
        self._plan.run(self._buffers, self._next(), self._hooks)

    def _submit_plan(self) -> Work:
        return self._plan.submit(self._buffers, self._outputs, self._next(), self._hooks)


def all_reduce_init(
    tensor: Tensor,
    op: Op = "sum",
    *,
    codec: str | Codec = "none",
    algorithm: Algorithm = "auto",
    group: Group = None,
    residual: Tensor | None = None,
    checksum: bool | None = None,
    epilogue: LocalTask | None = None,
) -> PersistentOperation:
    """Make an all-reduce that is run any number of times on the same tensor, without planning or checking again.

    Every rank of the group has to call it: it connects the ranks. It moves no data.

    Args:
        tensor: The tensor, as `dtcomm.all_reduce` takes it: of any shape, with the same size and dtype on all ranks.
            Every run overwrites it with the reduction of what it holds then. It must keep its memory.
        op: ``"sum"``, ``"avg"``, ``"min"`` or ``"max"``, or torch's ``ReduceOp`` of these.
        codec: The codec of the messages.
        algorithm: A name, a `dtcomm.schedule.Schedule` or its text.
        group: The process group; None is the default group.
        residual: Error feedback, as for `dtcomm.all_reduce`: fp32, as many elements as the tensor.
        checksum: If True, every payload travels with its CRC32C. None takes the value of DTCOMM_CHECKSUM.
        epilogue: A task that is applied to the sum, made by ``dtcomm.kernels.epilogue.epilogue_task``.

    Returns:
        The operation: ``operation()`` runs it, ``operation.start()`` and ``operation.wait()`` do so without blocking
        in between. Stochastic rounding draws other numbers in every run.

    Raises:
        TypeError, ValueError: If an argument is not valid. The message names it.
        CollectiveTimeout, PeerLost: If a rank does not call it, or died.

    Example:
        >>> import torch, dtcomm
        >>> x = torch.ones(4)
        >>> operation = dtcomm.all_reduce_init(x, codec="int8")
        >>> for _ in range(3):
        ...     _ = x.fill_(1.0)
        ...     operation()
        >>> x.shape
        torch.Size([4])
    """
    require_tensor(tensor, "tensor")
    communicator = get_communicator_for(group, tensor, "tensor")
    in_order = in_memory(tensor, "tensor")
    if residual is not None:
        require_residual(residual, in_order, "residual", op)
    key = ("all_reduce", in_order.numel(), in_order.dtype, op, codec, algorithm, checksum, False)
    part = (in_order.numel(), in_order.dtype, codec)
    plan = _connected_plan(communicator, key, "all_reduce", part, algorithm, op=op, checksum=checksum)
    hooks = None if epilogue is None else OpHooks(after=(epilogue,))
    return PersistentOperation(communicator, plan, Buffers(in_order, in_order, residual), in_order, hooks)


def reduce_scatter_init(
    output: Tensor,
    input: Tensor,
    op: Op = "sum",
    *,
    codec: str | Codec = "none",
    algorithm: Algorithm = "auto",
    group: Group = None,
    residual: Tensor | None = None,
    checksum: bool | None = None,
) -> PersistentOperation:
    """Make a reduce-scatter that is run any number of times on the same tensors; see `all_reduce_init`.

    Args:
        output: This rank's shard of the result, contiguous; it may be that shard of ``input``. It must keep its memory.
        input: World size shards of ``output.numel()`` elements in rank order, contiguous. It must keep its memory.
        op: ``"sum"``, ``"avg"``, ``"min"`` or ``"max"``, or torch's ``ReduceOp`` of these.
        codec: The codec of the messages.
        algorithm: A name, a `dtcomm.schedule.Schedule` or its text.
        group: The process group; None is the default group.
        residual: Error feedback, as for `dtcomm.reduce_scatter`: fp32, as many elements as ``input``.
        checksum: If True, every payload travels with its CRC32C. None takes the value of DTCOMM_CHECKSUM.

    Returns:
        The operation.

    Raises:
        TypeError, ValueError: If an argument is not valid. The message names it.
        CollectiveTimeout, PeerLost: If a rank does not call it, or died.

    Example:
        >>> import torch, dtcomm
        >>> operation = dtcomm.reduce_scatter_init(torch.empty(4), torch.ones(4))
        >>> operation()
    """
    communicator = get_communicator_for(group, output, "output")
    require_pair(output, input, "input", communicator.size)
    require_no_overlap(input, output, output.numel() * communicator.rank, "output", "input")
    if residual is not None:
        require_residual(residual, input, "residual", op)
    key = ("reduce_scatter", output.numel(), output.dtype, op, codec, algorithm, checksum)
    part = (output.numel(), output.dtype, codec)
    plan = _connected_plan(communicator, key, "reduce_scatter", part, algorithm, op=op, checksum=checksum)
    return PersistentOperation(communicator, plan, Buffers(input, output, residual), output)


def all_gather_init(
    output: Tensor,
    input: Tensor,
    *,
    codec: str | Codec = "none",
    algorithm: Algorithm = "auto",
    group: Group = None,
    residual: Tensor | None = None,
    checksum: bool | None = None,
) -> PersistentOperation:
    """Make an all-gather that is run any number of times on the same tensors; see `all_reduce_init`.

    Args:
        output: World size shards of ``input.numel()`` elements in rank order, contiguous. It must keep its memory.
        input: This rank's shard, contiguous; it may be that shard of ``output``. It must keep its memory.
        codec: The codec of the messages.
        algorithm: A name, a `dtcomm.schedule.Schedule` or its text.
        group: The process group; None is the default group.
        residual: Error feedback, as for `dtcomm.all_gather`: fp32, as many elements as ``input``.
        checksum: If True, every payload travels with its CRC32C. None takes the value of DTCOMM_CHECKSUM.

    Returns:
        The operation.

    Raises:
        TypeError, ValueError: If an argument is not valid. The message names it.
        CollectiveTimeout, PeerLost: If a rank does not call it, or died.

    Example:
        >>> import torch, dtcomm
        >>> operation = dtcomm.all_gather_init(torch.empty(4), torch.ones(4))
        >>> operation()
    """
    communicator = get_communicator_for(group, output, "output")
    require_pair(output, input, "output", communicator.size)
    require_no_overlap(output, input, input.numel() * communicator.rank, "input", "output")
    if residual is not None:
        require_residual(residual, input, "residual")
    key = ("all_gather", input.numel(), input.dtype, codec, algorithm, checksum)
    part = (input.numel(), input.dtype, codec)
    plan = _connected_plan(communicator, key, "all_gather", part, algorithm, checksum=checksum)
    return PersistentOperation(communicator, plan, Buffers(input, output, residual), output)


def all_to_all_init(
    output: Tensor,
    input: Tensor,
    *,
    codec: str | Codec = "none",
    algorithm: Algorithm = "auto",
    group: Group = None,
    residual: Tensor | None = None,
    checksum: bool | None = None,
) -> PersistentOperation:
    """Make an all-to-all of equal shards that is run any number of times on the same tensors; see `all_reduce_init`.

    Args:
        output: World size equal shards, contiguous: shard i is that of rank i. It must keep its memory.
        input: As many, contiguous, in other memory: shard i goes to rank i. It must keep its memory.
        codec: The codec of the messages.
        algorithm: A name, a `dtcomm.schedule.Schedule` or its text.
        group: The process group; None is the default group.
        residual: Error feedback, as for `dtcomm.all_to_all`: fp32, as many elements as ``input``.
        checksum: If True, every payload travels with its CRC32C. None takes the value of DTCOMM_CHECKSUM.

    Returns:
        The operation.

    Raises:
        TypeError, ValueError: If an argument is not valid. The message names it.
        CollectiveTimeout, PeerLost: If a rank does not call it, or died.

    Example:
        >>> import torch, dtcomm
        >>> operation = dtcomm.all_to_all_init(torch.empty(4), torch.ones(4))
        >>> operation()
    """
    communicator = get_communicator_for(group, output, "output")
    require_exchange(output, input)
    numel = require_equal_shards(output, input, communicator.size)
    if residual is not None:
        require_residual(residual, input, "residual")
    key = ("all_to_all", False, numel, input.dtype, codec, algorithm, checksum)
    part = (numel, input.dtype, codec)
    plan = _connected_plan(communicator, key, "all_to_all", part, algorithm, checksum=checksum)
    return PersistentOperation(communicator, plan, Buffers(input, output, residual), output)


def broadcast_init(
    tensor: Tensor,
    src: int,
    *,
    codec: str | Codec = "none",
    algorithm: Algorithm = "auto",
    group: Group = None,
    residual: Tensor | None = None,
    checksum: bool | None = None,
) -> PersistentOperation:
    """Make a broadcast that is run any number of times on the same tensor; see `all_reduce_init`.

    Args:
        tensor: The tensor, as `dtcomm.broadcast` takes it. It must keep its memory.
        src: The global rank whose tensor is copied.
        codec: The codec of the messages.
        algorithm: A name, a `dtcomm.schedule.Schedule` or its text.
        group: The process group; None is the default group.
        residual: Error feedback, as for `dtcomm.broadcast`: fp32, as many elements as the tensor.
        checksum: If True, every payload travels with its CRC32C. None takes the value of DTCOMM_CHECKSUM.

    Returns:
        The operation.

    Raises:
        TypeError, ValueError: If an argument is not valid. The message names it.
        CollectiveTimeout, PeerLost: If a rank does not call it, or died.

    Example:
        >>> import torch, dtcomm
        >>> operation = dtcomm.broadcast_init(torch.ones(4), src=0)
        >>> operation()
    """
    require_tensor(tensor, "tensor")
    communicator = get_communicator_for(group, tensor, "tensor")
    in_order = in_memory(tensor, "tensor")
    if residual is not None:
        require_residual(residual, in_order, "residual")
    root = communicator.group_rank(src, "src")
    key = ("broadcast", in_order.numel(), in_order.dtype, src, codec, algorithm, checksum)
    part = (in_order.numel(), in_order.dtype, codec)
    plan = _connected_plan(communicator, key, "broadcast", part, algorithm, root=root, checksum=checksum)
    return PersistentOperation(communicator, plan, Buffers(in_order, in_order, residual), in_order)


def _connected_plan(
    communicator: Communicator,
    key: Hashable,
    collective: str,
    part: tuple[int, torch.dtype, str | Codec],
    algorithm: Algorithm,
    **options: Any,
) -> Plan:
    """Return the plan of an operation on one tensor, after the ranks have been connected; see `make_plan`."""

    def new_plan() -> Plan:
        return make_plan(communicator, key, collective, [part], algorithm, **options)

    if communicator.connection is not None:
        new_plan()  # it checks the arguments, before the ranks wait for each other
        communicator.connect()
    return communicator.plans.get(key) or new_plan()
