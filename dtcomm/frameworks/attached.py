"""What a framework's hooks call: compress the wrapped model, save its state with a checkpoint, restore it.

A checkpoint folder has a folder ``dtcomm`` with a file for each rank, because residuals differ: ``rank0-of-2.pt``,
``rank1-of-2.pt``, ..., which hold what ``state_dict()`` returned. Folders may be anything that fsspec opens; files on
this machine are replaced atomically.
"""

from __future__ import annotations

import io
import logging
import re
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import fsspec
import torch

from dtcomm import torch_compat
from dtcomm.compress.checkpoint import Compressor, gather, rank_and_size, require_intact
from dtcomm.profiling.metrics import scalars
from dtcomm.system import write_file

S = TypeVar("S", bound=Compressor)

_FILE = re.compile(r"rank(\d+)-of-(\d+)\.pt")
_log = logging.getLogger("dtcomm")


@dataclass(frozen=True, kw_only=True)
class Integration(Generic[S]):
    """How `dtcomm.ddp` or `dtcomm.fsdp` compresses a model.

    Attributes:
        name: Its name in messages, such as "dtcomm.ddp".
        wrapper: The wrapper that it needs, such as "DDP"; ``accepts`` says whether a model has it.
        obstacle: Why another model cannot be compressed; empty if there is nothing to say.
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


#: Of a state that the program made itself: the framework only saves and restores it.
NOTHING: Integration[Any] = Integration(
    name="dtcomm.frameworks",
    wrapper="",
    accepts=lambda model: False,
    obstacle=lambda model: "",
    compress=lambda model: None,
    unused=lambda: None,
)


class Attached(Generic[S]):
    """Compresses a model as soon as a framework has wrapped it, and saves the state with the framework's checkpoints.

    Args:
        integration: How the model is compressed.
        state: The state, if the program has compressed the model itself. Default None: there is none yet.

    Attributes:
        strict: Whether a resumed run must compress as the run that saved. Set it to False before resuming with another
            codec: then residuals alone are loaded.
    """

    def __init__(self, integration: Integration[S], state: S | None = None) -> None:
        self.strict = True
        self._integration, self._current = integration, state
        self._folder_to_load: str | None = None
        self._processes = 0
        self._model: torch.nn.Module | None = None
        self._compressed: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self._obstacle = ""

    @property
    def compresses(self) -> bool:
        """Whether it compresses the framework's model."""
        return self._integration is not NOTHING

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
        return self._current

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
        if self._current is not None and self._processes != 1:
            save_files(self._current, folder)

    def load(self, folder: str) -> None:
        """Load the state from a folder now, or once the model is wrapped; all ranks call it at the same point."""
        if self._processes == 1:
            if has_files(folder):
                _log.warning(
                    "%s: the state of compression in %s is not used, and the residuals in it are lost: this job has "
                    "one process", self._integration.name, folder,
                )  # fmt: skip
        elif self._current is None:
            self._folder_to_load = folder
        else:
            self._folder_to_load = None
            load_files(self._current, folder, strict=self.strict)

    def scalars(self) -> dict[str, float]:
        """Return the metrics of the state by name; none until the model is compressed."""
        state: Any = self._current
        return {} if self._model is None else scalars(state)

    def model_is_wrapped(self, model: Any) -> None:
        """Compress a model that the framework has just wrapped, unless that has been done."""
        model = torch_compat.original_module(model)  # torch.compile's wrapper is the outer one
        if not isinstance(model, torch.nn.Module) or model in self._compressed:
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
        self._compressed.add(model)
        if self._folder_to_load is not None:
            self.load(self._folder_to_load)


def save_files(state: Compressor, folder: str) -> None:
    """Write this rank's state; rank 0 removes the files of other numbers of ranks, left by an earlier run."""
    rank, size = rank_and_size()
    packed = io.BytesIO()
    torch.save(state.state_dict(), packed)
    files, path = fsspec.core.url_to_fs(folder)
    files.makedirs(path, exist_ok=True)
    target = f"{path}/{_file_name(rank, size)}"
    if "file" in files.protocol:
        write_file(target, packed.getvalue())
    else:
        with files.open(target, "wb") as file:
            file.write(packed.getvalue())
    if rank == 0:
        for number in set(_saved_sizes(files, path)) - {size}:
            for other in range(number):
                if files.exists(old := f"{path}/{_file_name(other, number)}"):
                    files.rm_file(old)


def load_files(state: Compressor, folder: str, *, strict: bool = True) -> bool:
    """Load what `save_files` wrote; all ranks must call it. If it is not complete, rank 0 warns, and it returns False.

    With another number of ranks than saved, every rank reads all files, and the sum of the residuals is kept.
    ValueError if the state is that of another model, or was saved with other options and ``strict`` is True.
    """
    rank, size = rank_and_size()
    files, path = fsspec.core.url_to_fs(folder)
    saved_sizes = _saved_sizes(files, path)
    saved_size = size if size in saved_sizes or len(saved_sizes) != 1 else saved_sizes[0]
    wanted = [rank] if saved_size == size else list(range(saved_size))
    states: list[Any] = []
    problem = ""
    for saved_rank in wanted:
        name = f"{path}/{_file_name(saved_rank, saved_size)}"
        try:
            with files.open(name, "rb") as file:
                states.append(torch.load(io.BytesIO(file.read()), weights_only=True))
            require_intact(states[-1])
        except FileNotFoundError:
            problem = f"{name} is missing"
        except Exception as error:  # torch.load has no error of its own for a damaged file
            problem = f"{name} cannot be read: {type(error).__name__}: {error}"
    counts = {saved.get("steps", saved.get("calls")) for saved in states}
    problems, counts_by_rank = gather(problem), gather(counts)
    if not any(problems) and len(set().union(*counts_by_rank)) > 1:
        problems = [f"the files in {path} are of different steps"]
    if any(problems):
        if rank == 0:
            _log.warning(
                "dtcomm: training continues without the state of compression: %s", _describe(problems)
            )
        return False
    saved = states[0] if saved_size == size else states
    options = {} if strict else {"strict": False}  # not every compressor has options that could differ
    try:
        state.load_state_dict(saved, **options)
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from error
    return True


def has_files(folder: str) -> bool:
    """Return whether a folder has the state of any rank."""
    return bool(_saved_sizes(*fsspec.core.url_to_fs(folder)))


def remove_files(folder: str) -> None:
    """Remove the folder, if it exists."""
    files, path = fsspec.core.url_to_fs(folder)
    if files.exists(path):
        files.rm(path, recursive=True)


def _file_name(rank: int, size: int) -> str:
    return f"rank{rank}-of-{size}.pt"


def _saved_sizes(files: Any, path: str) -> list[int]:
    """Return the numbers of ranks of which a folder has files."""
    if not files.isdir(path):
        return []
    names = [str(name).rpartition("/")[2] for name in files.ls(path, detail=False)]
    return sorted({int(match[2]) for name in names if (match := _FILE.fullmatch(name))})


def _describe(problems: list[str]) -> str:
    found = [problem for problem in problems if problem]
    more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    return (
        f"{found[0]}{more}. What error feedback still had to send is lost, once; PowerSGD's factors, DGC's momentum, "
        "references, the choice of 'auto', the guard's statistics and the warm-up start anew; and the run does not "
        "repeat an uninterrupted one bit for bit"
    )
