"""Collectives with a codec: the calls of torch.distributed, in fewer bytes.

Every function checks its arguments before anything starts, so that a call that raises ValueError or TypeError
leaves the communicator as it was. All ranks end with bit-identical results, for every codec and algorithm.

Common arguments: ``codec`` is a spec string or a Codec; ``algorithm`` a name, "direct" or "auto"; ``group`` a
process group or None for the default one; ``seed`` keys stochastic rounding (None: the call's number);
``residual`` an fp32 tensor like the input, which holds what earlier encodings lost: it is added to this
rank's contribution and rewritten with what this call loses (error feedback). With ``async_op=True`` a
``Work`` is returned and the tensors must not be touched until it is done; otherwise the call returns None
when the result is there.

Raised by all: TypeError and ValueError naming the argument; CollectiveMismatch, CollectiveTimeout, PeerLost.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from dtcomm import algorithms, codecs, planner
from dtcomm.codecs import Codec
from dtcomm.codecs.base import ELEMENT_TYPES
from dtcomm.runtime.communicator import Communicator, find, release
from dtcomm.runtime.shape import OPS, Part, Shape
from dtcomm.runtime.shm import Buffers, empty_shared
from dtcomm.runtime.work import Done, Work

__all__ = [
    "Work",
    "all_gather",
    "all_reduce",
    "all_reduce_coalesced",
    "broadcast",
    "empty",
    "info",
    "reduce_scatter",
    "release",
]

Group = dist.ProcessGroup | None
Op = str | dist.ReduceOp | dist.ReduceOp.RedOpType

_TORCH_OPS: dict[Any, str] = {
    dist.ReduceOp.SUM: "sum",
    dist.ReduceOp.AVG: "avg",
    dist.ReduceOp.MIN: "min",
    dist.ReduceOp.MAX: "max",
}


def all_reduce(
    tensor: torch.Tensor,
    op: Op = "sum",
    *,
    codec: str | Codec = "none",
    algorithm: str = "auto",
    group: Group = None,
    async_op: bool = False,
    seed: int | None = None,
    residual: torch.Tensor | None = None,
) -> Work | None:
    """Reduce ``tensor`` in place over the ranks of the group: sum, avg, min or max.

    ``avg`` divides the fp32 sum once, before its final encoding; min and max take codecs none, fp16 and bf16.
    """
    _require_type(tensor, "tensor")
    communicator = find(group)
    key = ("all_reduce", tensor.numel(), tensor.dtype, op, codec, algorithm)
    plan = communicator.plans.get(key)
    if plan is None:
        _require_tensor(tensor, "tensor")
        plan = _plan(
            communicator, key, "all_reduce", op, [tensor.numel()], [tensor.dtype], [codec], algorithm
        )
    if not tensor.is_cpu or tensor.layout is not torch.strided or not tensor.is_contiguous():
        _require_tensor(tensor, "tensor")
        tensor = _memory(tensor, "tensor")
    if residual is not None:
        _require_residual(residual, tensor, "residual", op)
    return _start(communicator, plan, [Buffers(tensor, tensor, residual)], [tensor], seed, async_op)


def reduce_scatter(
    output: torch.Tensor,
    input: torch.Tensor,
    op: Op = "sum",
    *,
    codec: str | Codec = "none",
    algorithm: str = "auto",
    group: Group = None,
    async_op: bool = False,
    seed: int | None = None,
    residual: torch.Tensor | None = None,
) -> Work | None:
    """Reduce ``input`` over the ranks and leave this rank's shard in ``output``.

    ``input`` holds world size shards of ``output.numel()`` elements, in rank order; both contiguous.
    """
    communicator = find(group)
    _require_tensor(output, "output")
    _require_tensor(input, "input")
    if input.dtype != output.dtype:
        raise TypeError(f"input: is {input.dtype}, output is {output.dtype}; they must be equal")
    if input.numel() != output.numel() * communicator.size:
        raise ValueError(
            f"input: has {input.numel()} elements; expected world size x output = "
            f"{communicator.size} x {output.numel()}"
        )
    _require_contiguous(output, "output")
    _require_contiguous(input, "input")
    _require_apart(input, output, output.numel() * communicator.rank, "output", "input")
    key = ("reduce_scatter", output.numel(), output.dtype, op, codec, algorithm)
    plan = communicator.plans.get(key)
    if plan is None:
        plan = _plan(
            communicator, key, "reduce_scatter", op, [output.numel()], [output.dtype], [codec], algorithm
        )
    if residual is not None:
        _require_residual(residual, input, "residual", op)
    return _start(communicator, plan, [Buffers(input, output, residual)], [output], seed, async_op)


def all_gather(
    output: torch.Tensor,
    input: torch.Tensor,
    *,
    codec: str | Codec = "none",
    algorithm: str = "auto",
    group: Group = None,
    async_op: bool = False,
    seed: int | None = None,
    residual: torch.Tensor | None = None,
) -> Work | None:
    """Gather every rank's ``input`` into ``output``, in rank order; both contiguous.

    With a lossy codec a rank's own shard in ``output`` holds the decoded values too; ``input`` is left as it
    is, unless it is that part of ``output``.
    """
    communicator = find(group)
    _require_tensor(output, "output")
    _require_tensor(input, "input")
    if input.dtype != output.dtype:
        raise TypeError(f"output: is {output.dtype}, input is {input.dtype}; they must be equal")
    if output.numel() != input.numel() * communicator.size:
        raise ValueError(
            f"output: has {output.numel()} elements; expected world size x input = "
            f"{communicator.size} x {input.numel()}"
        )
    _require_contiguous(output, "output")
    _require_contiguous(input, "input")
    _require_apart(output, input, input.numel() * communicator.rank, "input", "output")
    key = ("all_gather", input.numel(), input.dtype, codec, algorithm)
    plan = communicator.plans.get(key)
    if plan is None:
        plan = _plan(
            communicator, key, "all_gather", "sum", [input.numel()], [input.dtype], [codec], algorithm
        )
    if residual is not None:
        _require_residual(residual, input, "residual", "sum")
    return _start(communicator, plan, [Buffers(input, output, residual)], [output], seed, async_op)


def broadcast(
    tensor: torch.Tensor,
    src: int,
    *,
    codec: str | Codec = "none",
    algorithm: str = "auto",
    group: Group = None,
    async_op: bool = False,
    seed: int | None = None,
    residual: torch.Tensor | None = None,
) -> Work | None:
    """Copy the tensor of ``src`` (a global rank) to every rank of the group.

    With a lossy codec the source ends with the decoded values too, so that all ranks hold the same.
    """
    _require_type(tensor, "tensor")
    communicator = find(group)
    key = ("broadcast", tensor.numel(), tensor.dtype, src, codec, algorithm)
    plan = communicator.plans.get(key)
    if plan is None:
        _require_tensor(tensor, "tensor")
        root = communicator.group_rank(src, "src")
        plan = _plan(
            communicator, key, "broadcast", "sum", [tensor.numel()], [tensor.dtype], [codec], algorithm, root
        )
    if not tensor.is_cpu or tensor.layout is not torch.strided or not tensor.is_contiguous():
        _require_tensor(tensor, "tensor")
        tensor = _memory(tensor, "tensor")
    if residual is not None:
        _require_residual(residual, tensor, "residual", "sum")
    return _start(communicator, plan, [Buffers(tensor, tensor, residual)], [tensor], seed, async_op)


def all_reduce_coalesced(
    tensors: Sequence[torch.Tensor],
    op: Op = "sum",
    *,
    codec: str | Codec | Sequence[str | Codec] = "none",
    algorithm: str = "auto",
    group: Group = None,
    async_op: bool = False,
    seed: int | None = None,
    residuals: Sequence[torch.Tensor | None] | None = None,
    bucket_bytes: int = 25 * 2**20,
) -> Work | None:
    """Reduce several tensors in place, as one message for every ``bucket_bytes`` of them.

    Each tensor keeps its own blocks and may have its own codec (``codec`` a sequence) and residual, so with
    the direct algorithms its result does not depend on what it is sent with.
    """
    tensors = list(tensors)
    communicator = find(group)
    listed = [codec] * len(tensors) if isinstance(codec, str | Codec) else list(codec)
    if len(listed) != len(tensors):
        raise ValueError(f"codec: {len(listed)} codecs for {len(tensors)} tensors; give one, or one a tensor")
    kept = [None] * len(tensors) if residuals is None else list(residuals)
    if len(kept) != len(tensors):
        raise ValueError(f"residuals: {len(kept)} for {len(tensors)} tensors; give one (or None) a tensor")
    if bucket_bytes < 1:
        raise ValueError(f"bucket_bytes: must be at least 1, got {bucket_bytes}")
    buffers = []
    for index, (tensor, residual) in enumerate(zip(tensors, kept, strict=True)):
        _require_tensor(tensor, f"tensors[{index}]")
        tensor = _memory(tensor, f"tensors[{index}]")
        if residual is not None:
            _require_residual(residual, tensor, f"residuals[{index}]", op)
        buffers.append(Buffers(tensor, tensor, residual))
    messages = []
    for start, stop in _buckets(tensors, bucket_bytes):
        part = tensors[start:stop]
        numels = tuple(tensor.numel() for tensor in part)
        dtypes = tuple(tensor.dtype for tensor in part)
        specs = tuple(listed[start:stop])
        key = ("all_reduce", numels, dtypes, op, specs, algorithm)
        plan = communicator.plans.get(key)
        if plan is None:
            plan = _plan(communicator, key, "all_reduce", op, numels, dtypes, specs, algorithm)
        messages.append((plan, buffers[start:stop], part))
    works = [_start(communicator, plan, held, part, seed, async_op) for plan, held, part in messages]
    if not async_op:
        return None
    if len(works) == 1:
        return works[0]
    return _Several([work for work in works if work is not None], tensors)


def empty(*size: int | Sequence[int], dtype: torch.dtype | None = None, group: Group = None) -> torch.Tensor:
    """An uninitialised CPU tensor in memory that the other ranks of this host can map.

    Collectives with codec none that find every rank's tensor in such memory work on the tensors themselves:
    no staging copy. Each call allocates whole pages and holds a file descriptor until the tensor is freed, so
    allocate few and large ones. ``group`` is accepted for symmetry: the memory serves every group of the
    host's ranks. Raises OSError where the machine has no such memory left.
    """
    shape: Any = size[0] if len(size) == 1 and isinstance(size[0], Sequence) else size
    return empty_shared(torch.Size(shape), dtype or torch.get_default_dtype())


def info(group: Group = None) -> dict[str, Any]:
    """How the group's ranks are served: runtime ("native" or "process_group"), why, kernels, hosts, bytes."""
    return find(group).info()


class _Several(Work):
    """Several messages of one call."""

    def __init__(self, works: Sequence[Work], outputs: Sequence[torch.Tensor]) -> None:
        super().__init__(outputs)
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        gathered = torch.futures.collect_all([work.get_future() for work in self._works])
        outputs = self._outputs

        def finish(done: torch.futures.Future[Any]) -> list[torch.Tensor]:
            for future in done.value():
                future.value()  # raises what the message failed with
            return outputs

        return gathered.then(finish)

    @property
    def wire_bytes(self) -> int:  # type: ignore[override]
        return sum(work.wire_bytes for work in self._works)

    @property
    def seconds(self) -> float:  # type: ignore[override]
        return sum(work.seconds for work in self._works)


def _start(
    communicator: Communicator,
    plan: Any,
    buffers: Sequence[Buffers],
    outputs: Sequence[torch.Tensor],
    seed: int | None,
    async_op: bool,
) -> Work | None:
    key = communicator.next_seed(seed)
    runtime = communicator.runtime
    if runtime is None:  # world size 1 does nothing and loses nothing
        for part in buffers:
            if part.input is not None and part.output is not None and part.output is not part.input:
                part.output.copy_(part.input.view_as(part.output))
        return Done(outputs) if async_op else None
    if async_op:
        return runtime.submit(plan, buffers, outputs, key)
    runtime.run(plan, buffers, key)
    return None


def _plan(
    communicator: Communicator,
    key: Any,
    collective: str,
    op: Any,
    numels: Sequence[int],
    dtypes: Sequence[torch.dtype],
    specs: Sequence[str | Codec],
    algorithm: str,
    root: int = 0,
) -> Any:
    """Check what does not depend on the tensors' memory, choose the algorithm and keep the plan under
    ``key``.
    """
    name = _op_name(op)
    parts = []
    for numel, dtype, spec in zip(numels, dtypes, specs, strict=True):
        codec = codecs.codec(spec)
        _require_dtype(collective, name, dtype, codec)
        parts.append(Part(numel, dtype, codec))
    chosen = _choose(communicator, collective, parts, algorithm)
    if communicator.runtime is None:
        communicator.plans[key] = chosen
        return chosen
    shape = Shape(collective, name, tuple(parts), chosen, root)
    schedule = _schedule(chosen, collective, communicator.size, root)
    plan = communicator.runtime.prepare(shape, schedule)
    if len(communicator.plans) > 4096:  # a program of ever new sizes must not grow without end
        communicator.plans.clear()
    communicator.plans[key] = plan
    return plan


@functools.lru_cache(maxsize=256)
def _schedule(algorithm: str, collective: str, ranks: int, root: int) -> Any:
    return algorithms.build(algorithm, collective, ranks, root=root)


def _choose(communicator: Communicator, collective: str, parts: Sequence[Part], algorithm: str) -> str:
    """The algorithm of a message: chosen for its whole size; the shots that suit every part's codec."""
    if not isinstance(algorithm, str):
        raise TypeError(f"algorithm: expected a name, got {type(algorithm).__name__}")
    scale = communicator.size if collective in ("reduce_scatter", "all_gather") else 1
    numel = sum(part.numel for part in parts) * scale
    names = [
        planner.select(
            collective,
            numel,
            dtype,
            codec,
            communicator.size,
            hosts=communicator.hosts,
            algorithm=algorithm,
        )
        for dtype, codec in dict.fromkeys((part.dtype, part.codec) for part in parts)
    ]
    if not names:
        names = [planner.select(collective, 0, torch.float32, codecs.codec("none"), communicator.size)]
    return "two_shot" if len(set(names)) > 1 else names[0]


def _op_name(op: Any) -> str:
    if isinstance(op, str) and op in OPS:
        return op
    name = _TORCH_OPS.get(op) if not isinstance(op, str) else None
    if name is None:
        raise ValueError(f"op: {op!r} is not one of {', '.join(OPS)}")
    return name


def _require_dtype(collective: str, op: str, dtype: torch.dtype, codec: Codec) -> None:
    if dtype not in codec.dtypes:
        valid = ", ".join(str(valid).removeprefix("torch.") for valid in codec.dtypes)
        raise TypeError(f"tensor: codec {codec} takes {valid}, got {str(dtype).removeprefix('torch.')}")
    if op in ("min", "max") and op not in codec.operations:
        raise ValueError(f"op: {op} goes with codecs none, fp16 and bf16, not with {codec}")
    if op == "avg" and not dtype.is_floating_point:
        raise ValueError(
            f"op: avg needs a floating-point tensor, got {str(dtype).removeprefix('torch.')}; use sum"
        )


def _require_type(tensor: Any, argument: str) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{argument}: expected a torch.Tensor, got {type(tensor).__name__}")


def _require_tensor(tensor: Any, argument: str) -> None:
    _require_type(tensor, argument)
    if tensor.layout is not torch.strided:
        raise ValueError(f"{argument}: expected a dense tensor, got layout {tensor.layout}")
    if tensor.dtype not in ELEMENT_TYPES:
        valid = ", ".join(str(dtype).removeprefix("torch.") for dtype in ELEMENT_TYPES)
        raise TypeError(f"{argument}: dtype {tensor.dtype} is not one of {valid}")


def _memory(tensor: torch.Tensor, argument: str) -> torch.Tensor:
    """The tensor as a run of memory, which an elementwise reduction may take in any order."""
    if tensor.device.type != "cpu":
        raise ValueError(
            f"{argument}: is on {tensor.device}; this build moves CPU tensors only, copy it to the CPU first"
        )
    if tensor.is_contiguous():
        return tensor
    if not _is_dense(tensor):
        raise ValueError(
            f"{argument}: expected a dense, non-overlapping tensor, got strides {tuple(tensor.stride())} "
            f"for shape {tuple(tensor.shape)}; pass a contiguous copy"
        )
    return tensor.as_strided((tensor.numel(),), (1,))


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill a run of memory without gaps or overlaps, in whatever order."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def _require_contiguous(tensor: torch.Tensor, argument: str) -> None:
    if tensor.device.type != "cpu":
        _memory(tensor, argument)
    if not tensor.is_contiguous():
        raise ValueError(f"{argument}: expected a contiguous tensor, got strides {tuple(tensor.stride())}")


def _require_residual(residual: Any, tensor: torch.Tensor, argument: str, op: Any) -> None:
    if not isinstance(residual, torch.Tensor) or residual.dtype != torch.float32:
        given = residual.dtype if isinstance(residual, torch.Tensor) else type(residual).__name__
        raise TypeError(f"{argument}: expected a float32 tensor, got {given}")
    if residual.numel() != tensor.numel():
        raise ValueError(f"{argument}: has {residual.numel()} elements, the tensor {tensor.numel()}")
    if _op_name(op) not in ("sum", "avg"):
        raise ValueError(f"{argument}: error feedback goes with sum and avg, not with {_op_name(op)}")
    if not tensor.is_floating_point():
        raise TypeError(f"{argument}: error feedback needs a floating-point tensor, got {tensor.dtype}")
    _require_contiguous(residual, argument)
    _require_apart(tensor, residual, None, argument, "the tensor")


def _require_apart(
    whole: torch.Tensor, part: torch.Tensor, offset: int | None, argument: str, other: str
) -> None:
    """Two tensors share no memory, unless ``part`` is the shard of ``whole`` at element ``offset``."""
    begin, end = part.data_ptr(), part.data_ptr() + part.numel() * part.element_size()
    low, high = whole.data_ptr(), whole.data_ptr() + whole.numel() * whole.element_size()
    if begin >= high or end <= low or begin == end or low == high:
        return
    if offset is None or begin != low + offset * whole.element_size():
        where = "" if offset is None else " other than this rank's shard of it"
        raise ValueError(f"{argument}: overlaps the memory of {other}{where}")


# For tests: everything above by name, as a registry would list it.
COLLECTIVES: dict[str, Callable[..., Work | None]] = {
    "all_reduce": all_reduce,
    "reduce_scatter": reduce_scatter,
    "all_gather": all_gather,
    "broadcast": broadcast,
}


def _buckets(tensors: Sequence[torch.Tensor], bucket_bytes: int) -> list[tuple[int, int]]:
    """Ranges of neighbours, each of at most ``bucket_bytes`` unless a single tensor is larger."""
    ranges: list[tuple[int, int]] = []
    start = held = 0
    for index, tensor in enumerate(tensors):
        size = tensor.numel() * tensor.element_size()
        if index > start and held + size > bucket_bytes:
            ranges.append((start, index))
            start, held = index, 0
        held += size
    if len(tensors) > start or not tensors:
        ranges.append((start, len(tensors)))
    return ranges
