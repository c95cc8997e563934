"""Training frameworks: what `dtcomm.ddp.attach` and `dtcomm.fsdp.attach` do in Trainer, Accelerate and Lightning.

They compress the model once the framework has wrapped it, and save and restore the state of compression with the
framework's own checkpoints. For a model that a program compresses itself, `save_with` does the latter alone.

The frameworks are optional. Nothing of them is imported before an object of theirs is passed.
"""

from __future__ import annotations

from typing import Any

from dtcomm.compress.checkpoint import Compressor
from dtcomm.frameworks.attached import Attached, SavedWithFramework
from dtcomm.frameworks.attached import Integration as Integration
from dtcomm.frameworks.hooks import add_hooks

__all__ = ["Attached", "attach", "save_with"]


def attach(owner: Any, integration: Integration[Any]) -> Attached[Any]:
    """Compress the model of a framework once it is wrapped, and save the state with the framework's checkpoints.

    Args:
        owner: A Hugging Face ``Accelerator`` or ``Trainer``, or a Lightning ``Trainer``.
        integration: How a wrapped model is compressed; `dtcomm.ddp.attach` and `dtcomm.fsdp.attach` pass theirs.

    Returns:
        An object whose ``state`` is the state of compression, once the framework has wrapped the model.

    Raises:
        TypeError: ``owner`` is none of these.
        ValueError: ``owner`` has a communication hook already.
    """
    attached: Attached[Any] = Attached(integration)
    attached.set_processes(add_hooks(owner, attached))
    return attached


def save_with(owner: Any, state: Compressor) -> None:
    """Save and restore the state of a model that the program compressed itself with a framework's checkpoints.

    `dtcomm.ddp.attach` and `dtcomm.fsdp.attach` do so by themselves.

    Args:
        owner: A Hugging Face ``Accelerator`` or ``Trainer``, or a Lightning ``Trainer``.
        state: What `dtcomm.ddp.compress` or `dtcomm.fsdp.compress` returned, or a `dtcomm.local_sgd.LocalSGD`.

    Raises:
        TypeError: ``owner`` is none of these.

    Example::

        model, optimizer = accelerator.prepare(model, optimizer)
        state = dtcomm.ddp.compress(model, "int8")
        dtcomm.frameworks.save_with(accelerator, state)
    """
    add_hooks(owner, SavedWithFramework(state))
