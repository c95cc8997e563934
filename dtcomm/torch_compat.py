"""Every private name of torch that dtcomm uses, in one module.

A name may change with each release of torch. `NAMES` lists them with the versions on which each was checked and what
happens without it; tests look each of them up. The functions below are the only code that uses them, or
what torch leaves without a type. What belongs to
FSDP, pipelining and transformers is imported when it is first used.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from types import FunctionType, SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch._C import _distributed_c10d as c10d_options
from torch._C._distributed_c10d import GradBucket  # dist.GradBucket, where type checkers find it
from torch.distributed import distributed_c10d as c10d
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
    from torch.distributed.fsdp._common_utils import clean_tensor_name
    from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, Comm, ReduceScatter
    from torch.distributed.fsdp._fully_shard._fsdp_common import DDPMeshInfo, FSDPMeshInfo
    from torch.distributed.pipelining.stage import _PipelineStageBase as PipelineStageBase

__all__ = [
    "NAMES",
    "AllGather",
    "Comm",
    "DDPMeshInfo",
    "FSDPMeshInfo",
    "GradBucket",
    "ModuleHook",
    "PipelineStageBase",
    "ReduceScatter",
    "autograd_apply",
    "c10d_options",
    "clean_tensor_name",
]

Function = TypeVar("Function")
T = TypeVar("T")

CHECKED = "2.13, 2.15"


@dataclass(frozen=True)
class PrivateName:
    """A private name of torch.

    Attributes:
        path: ``module:attribute.attribute``; where the attribute is one of instances only, the class that has it.
        without: What happens in a torch that does not have it.
        checked: The versions of torch in which it was found; versions before the first of them do not have it.
        instances: Whether only instances have it, so that it cannot be looked up on the class.
    """

    path: str
    without: str
    checked: str = CHECKED
    instances: bool = False


_C10D, _C = "torch.distributed.distributed_c10d", "torch._C"
_FSDP1 = "torch.distributed.fsdp:FullyShardedDataParallel"
_NO_FSDP = "dtcomm.fsdp cannot be imported"
_NO_FSDP1 = "FSDP1 models cannot be compressed"

NAMES: tuple[PrivateName, ...] = (
    # process groups
    PrivateName(
        f"{_C10D}:_world.default_pg", "no collective runs; the table of repeated calls finds no group"
    ),
    PrivateName(
        f"{_C10D}:_world.pg_map", "no collective runs: communicators of destroyed groups are not dropped"
    ),
    PrivateName(f"{_C10D}:_world._default_pg", "repeated calls take 0.3 us longer"),
    PrivateName(f"{_C10D}:_pg_map", "repeated calls take 0.3 us longer"),
    PrivateName(
        f"{_C10D}:_maybe_attach_flight_recorder", 'from 2.15 on init_process_group("dtcomm") raises', "2.15"
    ),
    PrivateName(f"{_C10D}:_resolve_process_group", "compiled tp and context_parallel raise"),
    PrivateName(f"{_C10D}:_get_default_group", "monitored_barrier of the backend raises"),
    PrivateName(f"{_C10D}:_check_valid_timeout", "monitored_barrier of the backend raises"),
    PrivateName(f"{_C}._distributed_c10d:AllToAllOptions", "collectives over Gloo and NCCL raise"),
    PrivateName(
        "torch.distributed:Reducer._set_forward_pass_work_handle", "join() of uneven inputs may wait for ever"
    ),
    PrivateName(f"{_C}._distributed_c10d:_create_work_from_future", "join() of uneven inputs raises"),
    PrivateName(
        "torch.distributed:ProcessGroup._set_default_backend", "the backend's fallback to Gloo or NCCL raises"
    ),
    PrivateName(
        "torch.distributed:ProcessGroup._register_backend", "the backend's fallback to Gloo or NCCL raises"
    ),
    PrivateName("torch.distributed:ProcessGroupGloo._Options", "the backend's fallback to Gloo raises"),
    # DDP
    PrivateName(f"{_C}._distributed_c10d:GradBucket", "dtcomm.ddp cannot be imported"),
    PrivateName(
        "torch.nn.parallel:DistributedDataParallel._comm_hooks",
        "a second hook is not refused",
        instances=True,
    ),
    PrivateName(
        "torch.nn.parallel:DistributedDataParallel._join_config", "join() is not noticed", instances=True
    ),
    PrivateName(
        "torch.nn.parallel:DistributedDataParallel._divide_by_initial_world_size",
        "join() raises",
        instances=True,
    ),
    PrivateName(
        "torch.nn.parallel:DistributedDataParallel._set_ddp_runtime_logging_sample_rate", "dtcomm demo raises"
    ),
    PrivateName(
        "torch.nn.parallel:DistributedDataParallel._get_ddp_logging_data", "dtcomm demo and ddp raise"
    ),
    PrivateName("torch.amp:GradScaler._scale", "the scale of losses is not followed", instances=True),
    # autograd and the profiler
    PrivateName(
        "torch.autograd:Variable._execution_engine", "errors of hooks do not leave the backward pass"
    ),
    PrivateName(f"{_C}:_current_graph_task_id", "dtcomm.fsdp raises in the backward pass"),
    PrivateName(f"{_C}._autograd:_profiler_enabled", "every step of DDP and FSDP raises"),
    PrivateName(
        "torch.profiler:record_function._call_end_callbacks_on_future", "ranges of the profiler raise"
    ),
    PrivateName(f"{_C}._dynamo:eval_frame._FrameAction", "torch.compile traces into the backend"),
    # tensors and memory
    PrivateName("torch:Tensor._indices", "sparse gradients raise"),
    PrivateName("torch:Tensor._values", "sparse gradients raise"),
    PrivateName("torch:_assert_async", "compiled layers and padded experts raise"),
    PrivateName("torch:_foreach_lerp_", "dtcomm.extensions.extras.FrozenVariance cannot be imported"),
    PrivateName(f"{_C}:_storage_Use_Count", "buffers of FSDP are not used again"),
    PrivateName("torch:UntypedStorage._share_cuda_", "GPUs of one host do not share memory"),
    PrivateName("torch:UntypedStorage._new_shared_cuda", "GPUs of one host do not share memory"),
    PrivateName("torch.distributed._symmetric_memory:empty", "fused kernels do not run"),
    PrivateName(f"{_C}._distributed_c10d:_detect_dma_connectivity", "NVLink is not named in dtcomm.info()"),
    PrivateName("torch.ops:aten._scaled_dot_product_flash_attention_for_cpu", "ring attention on CPU raises"),
    PrivateName("torch.ops:aten._scaled_dot_product_flash_attention", "ring attention on CUDA raises"),
    PrivateName(
        "torch.distributed._transport:Transport", "dtcomm.extensions.weights.transport raises", "2.15"
    ),
    # layers and meshes
    PrivateName("torch.nn.modules.batchnorm:_BatchNorm", "SyncBatchNorm is not noticed"),
    PrivateName("torch.distributed.device_mesh:DeviceMesh._flatten", "dtcomm.mesh.flatten_axes raises"),
    PrivateName(
        "torch.distributed.pipelining.stage:_PipelineStageBase", "dtcomm.pipeline cannot be imported"
    ),
    # FSDP
    PrivateName("torch.distributed.fsdp._common_utils:clean_tensor_name", _NO_FSDP),
    PrivateName("torch.distributed.fsdp._fully_shard._fsdp_api:AllGather", _NO_FSDP),
    PrivateName("torch.distributed.fsdp._fully_shard._fsdp_api:Comm", _NO_FSDP),
    PrivateName("torch.distributed.fsdp._fully_shard._fsdp_api:ReduceScatter", _NO_FSDP),
    PrivateName("torch.distributed.fsdp._fully_shard._fsdp_common:DDPMeshInfo", _NO_FSDP),
    PrivateName("torch.distributed.fsdp._fully_shard._fsdp_common:FSDPMeshInfo", _NO_FSDP),
    PrivateName("torch.distributed.fsdp:FSDPModule._get_fsdp_state", "FSDP2 models cannot be compressed"),
    PrivateName(f"{_FSDP1}._handle", _NO_FSDP1, instances=True),
    PrivateName(f"{_FSDP1}._comm_hook", _NO_FSDP1, instances=True),
    PrivateName(f"{_FSDP1}._comm_hook_state", _NO_FSDP1, instances=True),
)

# --- process groups -------------------------------------------------------------------------------------------


def default_group() -> dist.ProcessGroup | None:
    """Return the default group, or None where torch.distributed is not initialized."""
    world: Any = c10d._world
    group: dist.ProcessGroup | None = world.default_pg
    return group


def all_groups() -> dict[Any, Any]:
    """Return torch's table of the groups of this process: group → (backend, store)."""
    world: Any = c10d._world
    groups: dict[Any, Any] = world.pg_map
    return groups


def group_by_name(name: str) -> dist.ProcessGroup:
    """Return the process group of a name, as compiled code knows it."""
    registry: Any = c10d
    group: dist.ProcessGroup = registry._resolve_process_group(name)
    return group


def group_or_raise(group: Any) -> Any:
    """Return ``group``, or the default group for None; torch raises where there is none."""
    return c10d._get_default_group() if group is None else group


def leave_out_of_flight_recorder(kind: type[dist.ProcessGroup]) -> None:
    """Let torch attach no flight recorder to groups of class ``kind``.

    From 2.15 on it attaches one to every new group that has a backend which it does not know to keep its own record,
    and expects that the group holds the backend's object, which a group that is the backend does not.
    """
    attach: Any = getattr(c10d, "_maybe_attach_flight_recorder", None)
    if attach is None or hasattr(attach, "dtcomm"):
        return

    @functools.wraps(attach)
    def attach_to_others(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> None:
        if not isinstance(group, kind):
            attach(group, *args, **kwargs)

    attach_to_others.dtcomm = True  # type: ignore[attr-defined]
    c10d._maybe_attach_flight_recorder = attach_to_others  # type: ignore[attr-defined]


def check_timeout(timeout: timedelta) -> None:
    """Raise the error that torch raises for a timeout that it does not take."""
    c10d._check_valid_timeout(timeout)


def add_backend(group: dist.ProcessGroup, device: torch.device, kind: Any, backend: Any) -> None:
    """Make ``backend`` the backend of ``group``, by default and for ``device``."""
    target: Any = group
    target._set_default_backend(kind)
    target._register_backend(device, kind, backend)


def make_gloo(store: c10d.Store, rank: int, size: int, timeout: timedelta) -> Any:
    """Return a Gloo backend of its own, which connects when it is first used."""
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_default_device(lazy_init=True)]
    options._timeout = timeout
    backend = gloo(store, rank, size, options)
    if torch.__version__ < "2.15":  # from then on it does nothing but warn
        backend._set_sequence_number_for_group()
    return backend


def complete_forward_pass_handles(kinds: tuple[type, ...]) -> None:
    """Let DDP's reducer wait for the future of a handle of one of ``kinds`` instead of for the handle.

    With ``join(divide_by_initial_world_size=False)`` DDP starts an all_reduce in every forward pass, which counts the
    ranks that still have inputs, and the reducer waits for its handle in the backward pass. The reducer is written in
    C++ and keeps only the C++ part of the handle: if Python deletes its part, the reducer waits for ever. After the
    wait it also expects the handle's future to be complete, and the futures of dtcomm complete a little later.
    """
    from torch._C._distributed_c10d import _create_work_from_future  # type: ignore[attr-defined]

    reducer: Any = dist.Reducer  # type: ignore[attr-defined]
    original = reducer._set_forward_pass_work_handle
    if hasattr(original, "dtcomm"):
        return

    @functools.wraps(original)
    def set_forward_pass_work_handle(self: Any, work: dist.Work, *args: Any, **kwargs: Any) -> None:
        if isinstance(work, kinds):
            work = _create_work_from_future(work.get_future())
        original(self, work, *args, **kwargs)

    set_forward_pass_work_handle.dtcomm = True  # type: ignore[attr-defined]
    reducer._set_forward_pass_work_handle = set_forward_pass_work_handle


# --- DDP ------------------------------------------------------------------------------------------------------


def ddp_hook_states(model: nn.Module) -> list[Any]:
    """Return the state of a DDP model's communication hook, which a built-in hook's name stands for, in a list.

    The list is empty without a hook. torch keeps built-in hooks in C++, which only tells their name to its log.
    """
    logged: dict[str, Any] = getattr(model, "_get_ddp_logging_data", dict)()
    name = logged.get("comm_hook")
    return [state for _, state in getattr(model, "_comm_hooks", ())] or ([name] if name else [])


def join_config(model: Any) -> Any:
    """Return the configuration of DDP's ``join``; None for a model without one."""
    return getattr(model, "_join_config", None)


def divides_by_active_ranks(model: Any) -> bool:
    """Say whether DDP's ``join`` is active and divides by the ranks that still have inputs."""
    return bool(model._join_config.enable and not model._divide_by_initial_world_size)


def loss_scale(scaler: Any) -> torch.Tensor | None:
    """Return the scale of a GradScaler on its device; None until the scaler is first used."""
    scale: torch.Tensor | None = scaler._scale
    return scale


# --- autograd, the profiler, torch.compile --------------------------------------------------------------------


def after_backward(callback: Callable[[], object]) -> None:
    """Call ``callback`` at the end of the backward pass that runs; RuntimeError where none runs."""
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(callback)


def backward_pass() -> int:
    """Return the number of the backward pass that runs on this thread, or -1."""
    return torch._C._current_graph_task_id()


def profiler_is_active() -> bool:
    """Say whether torch.profiler or torch.autograd.profiler runs on this thread."""
    return torch._C._autograd._profiler_enabled()


def end_with_future(shown: Any, future: torch.futures.Future[T]) -> torch.futures.Future[T]:
    """End a range of the profiler with ``future``; returns a future to use in its place."""
    chained: torch.futures.Future[T] = shown._call_end_callbacks_on_future(future)
    return chained


def exclude_from_compilation(function: Function) -> Function:
    """Keep torch.compile from tracing a function and what it calls: a compiled caller has a graph break there.

    ``torch.compiler.disable`` does the same but imports the compiler, which takes seconds.
    """
    assert isinstance(function, FunctionType)
    function._torchdynamo_disable = True  # type: ignore[attr-defined]  # callers that are traced
    frames: Any = torch._C._dynamo.eval_frame  # callers that are not
    skip = frames._FrameAction.SKIP
    frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))
    return function


def constant_when_compiled(function: Function) -> Function:
    """Let torch.compile call a function once for each call site and put its result into the compiled code.

    Its arguments at one call site are the same at every call. ``torch.compiler.assume_constant_result`` does the same
    but imports the compiler, which takes seconds.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def original_module(model: Any) -> Any:
    """Return the module that torch.compile wrapped, or ``model`` itself."""
    return getattr(model, "_orig_mod", model)


# --- tensors and memory ---------------------------------------------------------------------------------------


def sparse_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the indices and the values of a sparse COO tensor, which need not be coalesced."""
    return tensor._indices(), tensor._values()


def assert_async(condition: torch.Tensor, message: str) -> None:
    """Check a condition on the device, without making the host wait; also in compiled code."""
    torch._assert_async(condition, message)


def storage_use_count(tensor: torch.Tensor) -> int:
    """Return the number of tensors, in Python and in autograd, that refer to the storage."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


def share_cuda(storage: Any) -> Sequence[Any]:
    """Return a handle of CUDA memory for one other process."""
    handle: Sequence[Any] = storage._share_cuda_()
    return handle


def open_shared_cuda(device: int, handle: Sequence[Any]) -> torch.UntypedStorage:
    """Return the memory of a handle of another process."""
    return torch.UntypedStorage._new_shared_cuda(device, *handle)


def symmetric_memory() -> Any:
    """Return torch's module of symmetric memory."""
    return importlib.import_module("torch.distributed._symmetric_memory")


def transport_base() -> Any:
    """Return the base class of torch's transports; ModuleNotFoundError before torch 2.15."""
    return importlib.import_module("torch.distributed._transport").Transport


def nvlinks(gpu: int) -> Sequence[int] | None:
    """Return the number of NVLinks from a GPU to each one that this process sees; None where it is unknown."""
    try:
        from torch._C._autograd import DeviceType

        native: Any = torch._C._distributed_c10d  # it asks the driver
        links: Sequence[int] = native._detect_dma_connectivity(DeviceType.CUDA, "nvlink").matrix[gpu]
    except (ImportError, AttributeError, RuntimeError):
        return None
    return links


#: Operations on lists of tensors, as torch's optimizers use them.
foreach = SimpleNamespace(
    neg=torch._foreach_neg,
    add=torch._foreach_add,
    add_=torch._foreach_add_,
    mul_=torch._foreach_mul_,
    lerp_=torch._foreach_lerp_,
    sqrt=torch._foreach_sqrt,
    addcdiv_=torch._foreach_addcdiv_,
)


# Attention of a block with the log-sum-exp of its scores, and its gradients.
def flash_attention_cpu(*args: Any, scale: float) -> Any:
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*args, scale=scale)


def flash_attention_cpu_backward(*args: Any, scale: float) -> Any:
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(*args, scale=scale)


def flash_attention_cuda(*args: Any, scale: float) -> Any:
    return torch.ops.aten._scaled_dot_product_flash_attention(*args, scale=scale)


def flash_attention_cuda_backward(*args: Any, scale: float) -> Any:
    return torch.ops.aten._scaled_dot_product_flash_attention_backward(*args, scale=scale)


class ModuleHook:
    """A hook of a module that does nothing in copies of the module: it refers to what belongs to this process."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def __reduce__(self) -> Any:
        return ModuleHook, (_do_nothing,)


def _do_nothing(*_: Any, **__: Any) -> None:
    pass


# --- layers, meshes, frameworks -------------------------------------------------------------------------------


def is_batch_norm(module: nn.Module) -> bool:
    """Say whether a module is one of torch's batch normalizations."""
    return isinstance(module, BatchNorm)


def flatten_mesh(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """Return the mesh with one axis, called ``name``, over all ranks of ``mesh``."""
    flat: DeviceMesh = mesh._flatten(name)
    return flat


def placements_of_tensor_parallel_ddp(parameter: Any) -> Any:
    """Return what torch.distributed.tensor.parallel.ddp keeps of a DTensor's placements; None without."""
    return getattr(parameter, "_st_info", None)


def lightning_hook(strategy: Any) -> Any:
    """Return the communication hook of Lightning's DDP strategy, or None."""
    return getattr(strategy, "_ddp_comm_hook", None)


# --- FSDP -----------------------------------------------------------------------------------------------------


def fsdp2_parameter_groups(module: FSDPModule) -> list[Any]:
    """Return the parameter groups of an FSDP2 module; up to torch 2.11 there is at most one."""
    state: Any = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def fsdp2_parameter_group(module: FSDPModule) -> Any:
    """Return the parameter group of an FSDP2 module that has at most one; None without parameters."""
    state: Any = module._get_fsdp_state()
    return state._fsdp_param_group


def fsdp2_all_gather(group: Any) -> Any:
    """Return what carries out the all-gathers of a parameter group."""
    return group._all_gather_comm


def fsdp2_all_reduce_hook(group: Any) -> Any:
    """Return the hook between the replicas of a parameter group, or None."""
    return group._all_reduce_hook


def unsharded_size(fsdp_parameter: Any) -> torch.Size:
    """Return the size of an FSDP2 parameter before it was cut."""
    size: torch.Size = fsdp_parameter._orig_size
    return size


def sharded_gradient_dtype(fsdp_parameter: Any) -> torch.dtype | None:
    """Return the dtype to which torch casts the reduced gradient of an FSDP2 parameter; None where it casts nothing.

    Up to 2.14 it is the parameter's own dtype, from 2.15 on its ``grad_dtype``.
    """
    dtype: torch.dtype | None = getattr(fsdp_parameter, "sharded_grad_dtype", fsdp_parameter.orig_dtype)
    return dtype


def in_order_of_reduction(fsdp_parameters: Sequence[Any]) -> list[Any]:
    """Return the FSDP2 parameters of a module in the order in which their gradients lie in its reduce-scatter.

    From 2.15 on gradients of one ``grad_dtype`` lie together.
    """
    by_dtype: dict[Any, list[Any]] = {}
    for parameter in fsdp_parameters:
        follows = hasattr(parameter, "sharded_grad_dtype")
        by_dtype.setdefault(parameter.sharded_param.grad_dtype if follows else None, []).append(parameter)
    return [parameter for alike in by_dtype.values() for parameter in alike]


def has_accumulation_hooks(tensor: Any) -> bool:
    """Say whether a hook runs after the gradient of ``tensor`` was accumulated."""
    return bool(getattr(tensor, "_post_accumulate_grad_hooks", None))


@dataclass(frozen=True)
class FlatParameter:
    """The flat parameter of an FSDP1 unit, with the names and shapes of the parameters in it, relative to the unit.

    ``owners`` has for each of them the module that had it, and what torch keeps of its placement over other axes.
    ``padded`` says whether torch pads between parameters.
    """

    parameter: Any
    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]
    owners: tuple[tuple[Any, Any], ...]
    padded: bool


def fsdp1_flat_parameter(module: FullyShardedDataParallel) -> FlatParameter | None:
    """Return the flat parameter of an FSDP1 unit; None for one without parameters."""
    handle: Any = module._handle
    if handle is None:
        return None
    flat = handle.flat_param
    return FlatParameter(
        parameter=flat,
        names=tuple(flat._fqns),
        shapes=tuple(flat._shapes),
        owners=tuple(zip(flat._param_infos, flat._param_extensions, strict=True)),
        padded=any(flat._is_padding_mask),
    )


def fsdp1_hook(module: FullyShardedDataParallel) -> Any:
    """Return the communication hook of an FSDP1 unit, or None."""
    return module._comm_hook


def set_fsdp1_hook_state(module: FullyShardedDataParallel, state: Any) -> None:
    """Give the hook of an FSDP1 unit a state of its own: torch passes all units the same one."""
    module._comm_hook_state = state


def remove_fsdp1_hook(module: FullyShardedDataParallel) -> None:
    """Take the communication hook of an FSDP1 unit away."""
    module._comm_hook = module._comm_hook_state = None


def autograd_apply(function: type[torch.autograd.Function], *args: Any) -> Any:
    """Return ``function.apply(*args)``, which torch leaves without a type."""
    return function.apply(*args)  # type: ignore[no-untyped-call]


def __getattr__(name: str) -> Any:
    home: Any
    if name in ("AllGather", "Comm", "ReduceScatter"):
        from torch.distributed.fsdp._fully_shard import _fsdp_api as home
    elif name in ("DDPMeshInfo", "FSDPMeshInfo"):
        from torch.distributed.fsdp._fully_shard import _fsdp_common as home
    elif name == "clean_tensor_name":
        from torch.distributed.fsdp import _common_utils as home
    elif name == "PipelineStageBase":
        from torch.distributed.pipelining import stage as home
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(home, "_PipelineStageBase" if name == "PipelineStageBase" else name)
    globals()[name] = value
    return value
