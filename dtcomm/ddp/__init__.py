"""Compressed gradients for DistributedDataParallel.

    state = dtcomm.ddp.compress(model, "int8")

or, for a framework that registers the hook itself,

    model.register_comm_hook(dtcomm.ddp.DDPState("int8"), dtcomm.ddp.hook)

Each bucket becomes one message in which every parameter has its own blocks, codec and error feedback. The gradients
are averaged in place, as DDP itself does. `Reducer` (dtcomm/ddp/reducer.py) lists the steps of a backward pass.
`dtcomm.local_sgd.LocalSGD` averages weights every so many steps instead.

An error in a collective is raised by ``backward()`` with its own type (`PeerLost`, `CollectiveTimeout`, ...), kept as
``state.error``, and raised again by the next forward or backward. (DDP would print the exception of a future as
"Unable to cast".) After it, the model needs a new DDP around it. If some ranks have not registered the hook with
`compress`, the others raise CollectiveMismatch, which names them, in their first backward pass.
"""

# Annotations stay objects in this file: register_comm_hook compares the hook's with the types themselves.
import functools
from typing import Any

import torch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import Unpack

from dtcomm import env
from dtcomm.arguments import shares_options
from dtcomm.compress.checkpoint import rank_and_size
from dtcomm.compress.feedback import Feedback as Feedback
from dtcomm.compress.guard import Guard as Guard
from dtcomm.compress.models import kind_of, wrong_type
from dtcomm.compress.policy import Policy, as_policy
from dtcomm.compress.spec import AUTO, Scheme
from dtcomm.ddp.auto import parse_candidates
from dtcomm.ddp.options import DEFAULTS, Options
from dtcomm.ddp.state import DDPState
from dtcomm.frameworks import Attached, Integration
from dtcomm.frameworks import attach as attach_to
from dtcomm.torch_compat import GradBucket

__all__ = ["DDPState", "attach", "compress", "hook"]


def hook(state: DDPState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The DDP communication hook; register it with a `DDPState` of its own for each model.

    Args:
        state: The state of the model.
        bucket: The bucket that DDP passes.

    Returns:
        A future of the bucket's buffer, completed with the mean of the gradients.

    Example::

        model.register_comm_hook(dtcomm.ddp.DDPState("int8"), dtcomm.ddp.hook)
    """
    if not isinstance(state, DDPState):
        raise TypeError(
            f"state: expected a dtcomm.ddp.DDPState, got {type(state).__name__}: "
            'model.register_comm_hook(dtcomm.ddp.DDPState("int8"), dtcomm.ddp.hook)'
        )
    acting = state.successor or state
    if acting.detached or env.disabled():
        return allreduce_hook(state.group, bucket)  # type: ignore[arg-type]
    return acting.reduce(bucket)


@shares_options(DEFAULTS, Options)
def compress(
    model: torch.nn.Module,
    codec: str | Scheme | Policy = "int8",
    feedback: bool | str | Feedback = "auto",
    **options: Unpack[Options],
) -> DDPState:
    """Compress the gradients of a DDP model: makes a `DDPState` and registers the hook.

    In a job with one process nothing is communicated, so nothing is compressed. One log line and the report say so.

    Args:
        model: The DistributedDataParallel; in a job with one process also a model without it.

    Returns:
        The state: ``report()``, ``events``, ``state_dict()``, ``timeline``, ...

    Raises:
        TypeError: ``model`` is not a DistributedDataParallel, and the job has several processes; or an option is
            unknown.
        ValueError: An option is wrong; the message names it and what is valid.
        RuntimeError: The model has a communication hook already.

    Example::

        model = DistributedDataParallel(model)
        state = dtcomm.ddp.compress(model, "int8")
        ...  # train as before
        state.print_report()
    """
    ddp_model = model if isinstance(model, DistributedDataParallel) else None
    if ddp_model is None and not (isinstance(model, torch.nn.Module) and rank_and_size()[1] == 1):
        raise wrong_type("model", "a DistributedDataParallel", model)
    module = model if ddp_model is None else ddp_model.module
    state = DDPState(
        codec if codec == AUTO else as_policy(codec).for_model(module),
        None if ddp_model is None else ddp_model.process_group,
        feedback,
        parameters=module.named_parameters(),
        **options,
    )
    if ddp_model is None or env.disabled():
        state.set_unused()
    else:
        state.register(ddp_model, hook)
    return state


@shares_options(DEFAULTS, Options)
def attach(
    owner: Any,
    codec: str | Scheme | Policy = "int8",
    feedback: bool | str | Feedback = "auto",
    *,
    log: bool = False,
    **options: Unpack[Options],
) -> Attached[DDPState]:
    """Compress the gradients of a framework that wraps the model in DDP itself, once it has done so.

    The framework's checkpoints then contain the state of compression of every rank, and a resumed run continues with it
    (docs/guides/frameworks.md). In a job with one process nothing is compressed; one log line and the report say so.

    Args:
        owner: A Hugging Face ``Accelerator`` or ``Trainer``, or a Lightning ``Trainer``.
        log: Log the metrics of the report through the framework, at its own interval, and with it to TensorBoard,
            W&B or MLflow. An ``Accelerator`` logs them whenever the program calls ``log``. Default: False.

    Returns:
        An object whose ``state`` is the `DDPState`, once the framework has wrapped the model.

    Raises:
        TypeError: ``owner`` is none of these, or an option is unknown.
        ValueError: ``owner`` has a communication hook already, or an option is wrong.

    Example::

        attached = dtcomm.ddp.attach(trainer, "int8")
        trainer.train()  # Lightning: trainer.fit(module)
        attached.state.print_report()
    """
    if codec == AUTO:  # wrong options raise their errors now, and not when the model is wrapped
        parse_candidates(options.get("candidates"))
    make_state = functools.partial(DDPState, codec, feedback=feedback, **options)
    make_state()

    def compress_wrapped(model: torch.nn.Module) -> DDPState:
        scaler = options.get("grad_scaler") or _find_grad_scaler(owner)
        return compress(model, codec, feedback, **{**options, "grad_scaler": scaler})

    return attach_to(
        owner,
        Integration(
            name="dtcomm.ddp",
            wrapper="DDP",
            accepts=lambda model: isinstance(model, DistributedDataParallel),
            obstacle=_obstacle,
            compress=compress_wrapped,
            unused=lambda: make_state().set_unused(),
        ),
        log=log,
    )


def _obstacle(model: torch.nn.Module) -> str:
    """Return why a model that a framework has wrapped in something else cannot be compressed."""
    if kind_of(model) == "fsdp":
        return "the framework wrapped the model in FSDP, so nothing is compressed; use dtcomm.fsdp.attach"
    return ""


def _find_grad_scaler(owner: Any) -> Any:
    """Return the GradScaler of an Accelerator or of a Lightning or Hugging Face Trainer; None if it has none."""
    accelerator = getattr(owner, "accelerator", owner)
    precision = getattr(getattr(owner, "strategy", None), "precision_plugin", None)
    scaler = getattr(precision, "scaler", None) or getattr(accelerator, "scaler", None)
    return scaler if callable(getattr(scaler, "get_scale", None)) else None
