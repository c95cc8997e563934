"""What a framework's hooks call: compress the wrapped model, save the state, restore it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from dtcomm import torch_compat
from dtcomm.compress.checkpoint import Compressor
from dtcomm.frameworks import checkpoint_files

S = TypeVar("S", bound=Compressor)

_log = logging.getLogger("dtcomm")


@dataclass(frozen=True, kw_only=True)
class Integration(Generic[S]):
    """How `dtcomm.ddp` or `dtcomm.fsdp` compresses a model.

    Attributes:
        name: Its name in messages, such as "dtcomm.ddp".
        wrapper: The wrapper that it needs, such as "DDP".
        accepts: Whether a model is wrapped so.
        obstacle: Why another model cannot be compressed; empty if there is nothing to say.
        compress: Compresses such a model and returns the state.
        unused: Returns the state of a job with one process, in which nothing is compressed.
        step_ended: Called with the state after every step of the optimizer. Default None: nothing.
        training_ended: Called with the state at the end of training. Default None: nothing.
    """

    name: str
    wrapper: str
    accepts: Callable[[torch.nn.Module], bool]
    obstacle: Callable[[torch.nn.Module], str]
    compress: Callable[[Any], S]
    unused: Callable[[], S]
    step_ended: Callable[[S], object] | None = None
    training_ended: Callable[[S], object] | None = None


class SavedWithFramework:
    """Saves and restores a state where a framework saves and restores its checkpoints.

    Args:
        state: The compressor, or None until there is one.
    """

    compresses = False

    def __init__(self, state: Compressor | None = None) -> None:
        self._current: Compressor | None = state
        self._folder_to_load: str | None = None
        self.strict = True

    def model_is_wrapped(self, model: Any) -> None:
        """Do nothing: the program compresses the model."""

    def step_ended(self) -> None:
        """Do nothing: the program's own loop calls what it needs."""

    def training_ended(self) -> None:
        """As `step_ended`."""

    def save(self, folder: str) -> None:
        """Write this rank's state, if there is one, to a folder."""
        if self._current is not None:
            checkpoint_files.save(self._current, folder)

    def load(self, folder: str) -> None:
        """Load the state from a folder now, or once there is a state; all ranks call it at the same point."""
        if self._current is None:
            self._folder_to_load = folder
        else:
            self._folder_to_load = None
            checkpoint_files.load(self._current, folder, strict=self.strict)


class Attached(SavedWithFramework, Generic[S]):
    """Compresses a model as soon as a framework has wrapped it; ``attach`` returns it.

    Args:
        integration: How the model is compressed.

    Attributes:
        strict: Whether a resumed run must compress as the run that saved. Set it to False before resuming with another
            spec: then residuals alone are loaded.
    """

    compresses = True

    def __init__(self, integration: Integration[S]) -> None:
        super().__init__()
        self._integration = integration
        self._processes = 0
        self._model: torch.nn.Module | None = None
        self._obstacle = ""

    @property
    def state(self) -> S:
        """The state of compression.

        On one process it is a state that compresses nothing and says so in its report. RuntimeError before the
        framework has wrapped the model.
        """
        if self._current is None and self._processes == 1:
            self._current = self._integration.unused()
        if self._current is None:
            raise RuntimeError(
                f"state: {self._obstacle}"
                if self._obstacle
                else f"state: the model is not wrapped in {self._integration.wrapper} yet: call prepare(model), "
                "train() or fit() first, on more than one rank"
            )
        return self._current  # type: ignore[return-value]

    def set_processes(self, processes: int) -> None:
        """Set the number of processes that the framework uses; with one, say that nothing is compressed."""
        self._processes = processes
        if processes == 1:
            _ = self.state

    def step_ended(self) -> None:
        """Tell the integration that the optimizer has made a step."""
        if self._model is not None and self._integration.step_ended is not None:
            self._integration.step_ended(self.state)

    def training_ended(self) -> None:
        """Tell the integration that training is over."""
        if self._model is not None and self._integration.training_ended is not None:
            self._integration.training_ended(self.state)

    def save(self, folder: str) -> None:
        """Write this rank's state to a folder, if the model is compressed."""
        if self._model is not None:
            super().save(folder)

    def load(self, folder: str) -> None:
        """Load the state from a folder, now or once the model is wrapped."""
        if self._processes != 1:
            super().load(folder)
        elif checkpoint_files.has_files(folder):
            _log.warning(
                "%s: the state of compression in %s is not used, and the residuals in it are lost: this job has "
                "one process",
                self._integration.name,
                folder,
            )

    def model_is_wrapped(self, model: Any) -> None:
        """Compress a model that the framework has just wrapped, unless that has been done."""
        model = torch_compat.original_module(model)  # torch.compile's wrapper is the outer one
        if not isinstance(model, torch.nn.Module) or model is self._model:
            return
        if not self._integration.accepts(model):
            if (obstacle := self._integration.obstacle(model)) and obstacle != self._obstacle:
                self._obstacle = obstacle
                _log.warning("%s: %s", self._integration.name, obstacle)
            return
        if self._model is not None:
            _log.warning(
                "%s: a second model was wrapped; `state` and checkpoints have the state of the last one",
                self._integration.name,
            )
        self._current = self._integration.compress(model)
        self._model = model
        if self._folder_to_load is not None:
            self.load(self._folder_to_load)
