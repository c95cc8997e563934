"""Training frameworks: what `dtcomm.ddp.attach` and `dtcomm.fsdp.attach` do in Trainer, Accelerate and Lightning.

They compress the model once the framework has wrapped it, and save and restore the state of compression with the
framework's own checkpoints. For a model that a program compresses itself, `save_with` does only this.

The frameworks are optional: their objects are recognised by their attributes, and nothing of a framework is imported
before an object of it is passed. One function here adds the hooks to each framework; `attached` has what they call.
"""

from __future__ import annotations

import functools
import os
from typing import Any

from dtcomm import torch_compat
from dtcomm.compress.checkpoint import Compressor
from dtcomm.compress.models import framework_of, wrong_type
from dtcomm.frameworks.attached import NOTHING, Attached, remove_files
from dtcomm.frameworks.attached import Integration as Integration

__all__ = ["Attached", "attach", "save_with"]

FOLDER = "dtcomm"  # in a checkpoint folder


def attach(owner: Any, integration: Integration[Any], *, log: bool = False) -> Attached[Any]:
    """Compress the model of a framework once it is wrapped, and save the state with the framework's checkpoints.

    Args:
        owner: A Hugging Face ``Accelerator`` or ``Trainer``, or a Lightning ``Trainer``.
        integration: How a wrapped model is compressed; `dtcomm.ddp.attach` and `dtcomm.fsdp.attach` pass theirs.
        log: Whether the metrics of the state are logged through the framework. Default: False.

    Returns:
        An object whose ``state`` is the state of compression, once the framework has wrapped the model.

    Raises:
        TypeError: ``owner`` is none of these.
        ValueError: ``owner`` has a communication hook already.
    """
    attached: Attached[Any] = Attached(integration)
    attached.set_processes(_add_hooks(owner, attached))
    if log:
        _log_with(owner, attached)
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
    _add_hooks(owner, Attached(NOTHING, state))


def _add_hooks(owner: Any, saved: Attached[Any]) -> int:
    """Let a framework's object call ``saved``; return the number of processes that the framework uses."""
    framework = framework_of(owner)
    if framework == "accelerate":
        _require_no_hook(getattr(owner.ddp_handler, "comm_hook", "no"), saved)
        _add_to_accelerate(owner, saved)
        return int(owner.num_processes)
    if framework == "transformers":
        _require_no_hook(getattr(owner.accelerator.ddp_handler, "comm_hook", "no"), saved)
        _add_to_transformers(owner, saved)
        return int(owner.accelerator.num_processes)
    if framework == "lightning":
        _require_no_hook(torch_compat.lightning_hook(owner.strategy), saved)
        _add_to_lightning(owner, saved)
        return int(owner.world_size)
    expected = "an accelerate.Accelerator, a transformers.Trainer or a lightning.Trainer"
    raise wrong_type("owner", expected, owner)


def _log_with(owner: Any, attached: Attached[Any]) -> None:
    """Log the state's metrics whenever a Trainer logs its loss, an Accelerator logs, or Lightning's interval ends."""
    if framework_of(owner) == "lightning":
        _log_with_lightning(owner, attached)
        return
    log, training_only = owner.log, framework_of(owner) == "transformers"

    @functools.wraps(log)
    def log_with_metrics(values: dict[str, Any], *args: Any, **options: Any) -> Any:
        if "loss" in values or not training_only:
            values = {**values, **attached.scalars()}
        return log(values, *args, **options)

    owner.log = log_with_metrics


def _log_with_lightning(trainer: Any, attached: Attached[Any]) -> None:
    optimizer_step, logged = trainer.strategy.optimizer_step, 0

    @functools.wraps(optimizer_step)
    def step_and_log(*args: Any, **options: Any) -> Any:
        nonlocal logged
        result = optimizer_step(*args, **options)
        step = trainer.global_step  # of the step that ends here, from 0
        if step + 1 - logged >= trainer.log_every_n_steps > 0 and (values := attached.scalars()):
            logged = step + 1
            for logger in trainer.loggers:
                logger.log_metrics(values, step=step)
        return result

    trainer.strategy.optimizer_step = step_and_log


def _require_no_hook(hook: Any, saved: Attached[Any]) -> None:
    if saved.compresses and hook is not None and str(getattr(hook, "value", hook)) != "no":
        raise ValueError(f"owner: its options of DDP ask for the communication hook {hook} already")


def _add_to_accelerate(accelerator: Any, saved: Attached[Any]) -> None:
    """Wrap `prepare` and `prepare_model`, and register hooks of `save_state` and `load_state`."""
    prepare, prepare_model = accelerator.prepare, accelerator.prepare_model

    @functools.wraps(prepare)
    def prepare_and_compress(*args: Any, **options: Any) -> Any:
        result = prepare(*args, **options)
        for prepared in result if isinstance(result, (tuple, list)) else [result]:
            saved.model_is_wrapped(prepared)
        return result

    @functools.wraps(prepare_model)
    def prepare_model_and_compress(*args: Any, **options: Any) -> Any:
        result = prepare_model(*args, **options)
        saved.model_is_wrapped(result)
        return result

    accelerator.prepare, accelerator.prepare_model = prepare_and_compress, prepare_model_and_compress
    accelerator.register_save_state_pre_hook(
        lambda models, weights, folder: saved.save(os.path.join(folder, FOLDER))
    )
    accelerator.register_load_state_pre_hook(lambda models, folder: saved.load(os.path.join(folder, FOLDER)))


def _add_to_transformers(trainer: Any, saved: Attached[Any]) -> None:
    """Add a callback for the events, and wrap `train`, which alone knows what it resumes from."""
    from transformers import TrainerCallback
    from transformers.trainer_utils import get_last_checkpoint

    resumed_from: str | None = None
    train = trainer.train

    @functools.wraps(train)
    def train_and_remember(resume_from_checkpoint: Any = None, *args: Any, **options: Any) -> Any:
        nonlocal resumed_from
        if resume_from_checkpoint is True:
            resumed_from = get_last_checkpoint(trainer.args.output_dir)  # type: ignore[no-untyped-call]
        else:
            resumed_from = resume_from_checkpoint or None
        return train(resume_from_checkpoint, *args, **options)

    class CompressionCallback(TrainerCallback):
        """Compresses the model once it is wrapped, and saves and restores the state."""

        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            saved.model_is_wrapped(trainer.model_wrapped)
            if resumed_from is not None:
                saved.load(os.path.join(resumed_from, FOLDER))

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            saved.step_ended()

        def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            saved.training_ended()

        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            folder = os.path.join(args.output_dir, f"checkpoint-{state.global_step}")
            if not args.save_only_model and os.path.isdir(folder):
                saved.save(os.path.join(folder, FOLDER))

    trainer.train = train_and_remember
    trainer.add_callback(CompressionCallback())


def _add_to_lightning(trainer: Any, saved: Attached[Any]) -> None:
    """Wrap methods of the strategy, which are called on all ranks and know the path of the checkpoint.

    Callbacks do not know it. And Lightning ignores its own ``ddp_comm_hook`` if the model is not on a GPU.
    """
    strategy = trainer.strategy
    setup, save_checkpoint = strategy.setup, strategy.save_checkpoint
    load_checkpoint, remove_checkpoint = strategy.load_checkpoint, strategy.remove_checkpoint

    def fitting() -> bool:
        return getattr(trainer.state.fn, "value", "") == "fit"

    @functools.wraps(setup)
    def setup_and_compress(trainer: Any) -> None:
        setup(trainer)
        if fitting():
            saved.model_is_wrapped(strategy.model)

    @functools.wraps(save_checkpoint)
    def save_with_state(checkpoint: dict[str, Any], filepath: Any, *args: Any, **options: Any) -> None:
        can_resume = "optimizer_states" in checkpoint
        save_checkpoint(checkpoint, filepath, *args, **options)
        if can_resume:  # ranks may have formatted the name with metrics of their own
            saved.save(_lightning_folder(strategy.broadcast(str(filepath))))

    @functools.wraps(load_checkpoint)
    def load_with_state(checkpoint_path: Any, *args: Any, **options: Any) -> Any:
        checkpoint = load_checkpoint(checkpoint_path, *args, **options)
        if fitting():
            saved.load(_lightning_folder(strategy.broadcast(str(checkpoint_path))))
        return checkpoint

    @functools.wraps(remove_checkpoint)
    def remove_with_state(filepath: Any) -> None:
        folder = _lightning_folder(str(filepath))
        of_link = os.path.islink(filepath)
        remove_checkpoint(filepath)
        if strategy.is_global_zero and not of_link:
            remove_files(folder)

    strategy.setup, strategy.save_checkpoint = setup_and_compress, save_with_state
    strategy.load_checkpoint, strategy.remove_checkpoint = load_with_state, remove_with_state


def _lightning_folder(path: str) -> str:
    """Return the folder for a checkpoint: inside it if it is a folder, else ``dtcomm/<its name>`` beside the file."""
    if "://" not in path:
        path = os.path.realpath(path)  # last.ckpt may be a link
        if os.path.isdir(path):
            return os.path.join(path, FOLDER)
    folder, _, name = path.rpartition("/")
    return f"{folder}/{FOLDER}/{name}"
