"""`Reporting`: what the states of all integrations can be asked for, by the same methods.

`report`, `print_report`, `log`, `observe`, `state_dict`, `load_state_dict`, `detach` and `config`. A state adds what is
its own. `GroupTraffic` is the state of operations that keep none: it counts what they send over a process group.
"""

from __future__ import annotations

import logging
import weakref
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, ClassVar, NoReturn, Protocol

import torch
import torch.distributed as dist

from dtcomm import env
from dtcomm.compress import checkpoint
from dtcomm.compress.guard import Guard
from dtcomm.compress.policy import Policy
from dtcomm.compress.report import DEFAULT_RULES, Report
from dtcomm.compress.spec import Scheme
from dtcomm.compress.traffic import Traffic
from dtcomm.profiling.metrics import Metric, log_metrics
from dtcomm.profiling.timeline import Timeline
from dtcomm.work import Work

_log = logging.getLogger("dtcomm")


class CopiedState:
    """What copies and pickles of a model have in place of its state, which belongs to one process."""

    def __init__(self, name: str) -> None:
        self.__dict__["copied"] = name

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):  # copy and pickle ask for such names
            raise AttributeError(name)
        raise RuntimeError(
            f"{self.copied}.{name}: this is a copy, which compresses nothing; compress the copied model, and save "
            "state_dict() instead of the object"
        )


class LossWatch(Protocol):
    """What compares losses with a guard's limit."""

    def observe_loss(self, loss: float | torch.Tensor) -> None: ...


class Reporting(ABC):
    """The state of an integration: what a call of ``compress`` returns, or the object that compresses.

    Attributes:
        integration: The integration, as reports and checkpoints call it.
        arguments: The arguments of the call that made the state, for `config`.
        timeline: Recorder of training steps; None where there is none.
    """

    integration: str = ""
    arguments: Mapping[str, object]
    timeline: Timeline | None = None
    _loss_watch: LossWatch | None = None

    @abstractmethod
    def report(self) -> Report:
        """Return the report of this rank. Nothing is communicated."""

    def __reduce__(self) -> Any:
        if "_copied" not in self.__dict__:  # say it once
            self.__dict__["_copied"] = True
            _log.warning(
                "%s: copies are not compressed; compress a copied model by another call", self._home()
            )
        return CopiedState, (type(self).__qualname__,)

    def _home(self) -> str:
        """Return the name in logs: that of the package."""
        return type(self).__module__.rpartition(".")[0]

    def print_report(self, *, verbose: bool = False, all_ranks: bool = False) -> None:
        """Print six lines on the group's first rank: what was sent, what that cost and lost, and whether it paid.

        Call it on every rank, or on some: nothing is communicated.

        Args:
            verbose: Print the tables instead: a row for each codec and for each message. Default: False.
            all_ranks: Print on every rank, each with its own counters. Default: False.

        Example::

            state.print_report()  # one report, however many ranks there are
        """
        self.report().print(verbose=verbose, all_ranks=all_ranks)

    def metrics(self) -> list[Metric]:
        """Return the metrics of the report, and of the timeline if one is kept."""
        return self.report().metrics() + ([] if self.timeline is None else self.timeline.metrics())

    def log(self, logger: Any, step: int | None = None) -> None:
        """Give the metrics of the report to a logger, as values by name. Nothing is communicated.

        Call it on the ranks that have a logger; each gives its own counters.

        Args:
            logger: A logger of Weights & Biases, TensorBoard, MLflow, Lightning or Accelerate, or a function of a dict,
                as `dtcomm.profiling.log_metrics` takes it.
            step: The step that the logger gets; functions get none. Default None: what the logger itself counts.

        Raises:
            TypeError: ``logger`` is none of these.

        Example::

            state.log(wandb, step)
        """
        log_metrics(self, logger, step)

    def observe(self, loss: float | torch.Tensor) -> None:
        """Tell the guard this step's loss; call it on every rank, once a step and before the backward pass.

        Where there is no guard, the log says once that nothing watches the loss. With `LocalSGD` the last loss before
        an average counts.

        Args:
            loss: This rank's loss. A tensor on a device is not read by the host.
        """
        given: object = loss
        if isinstance(given, str):  # float() would take it
            raise TypeError(f"loss: expected a number or a tensor, got {loss!r}")
        if self._loss_watch is not None:
            self._loss_watch.observe_loss(loss)
        elif "_observed" not in self.__dict__:
            self.__dict__["_observed"] = True
            if checkpoint.rank_and_size()[0]:
                return
            _log.warning(
                "%s: observe: nothing watches the loss, because there is no guard here", self._home()
            )

    def state_dict(self) -> dict[str, Any]:
        """Return what this rank must save to continue bit for bit; every rank saves its own.

        Plain values and tensors, which torch.load reads with its defaults. Where nothing is kept from step to step it
        says only whose state it is.
        """
        return checkpoint.seal({"integration": self.integration})

    def load_state_dict(
        self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]], *, strict: bool = True
    ) -> None:
        """Continue from what `state_dict` returned.

        Args:
            state: This rank's own state, or the states of all ranks of the saved run in rank order.
            strict: Refuse a state that was saved with other options. There are none where nothing is kept.

        Raises:
            ValueError: The state is damaged, or another integration's. Nothing has changed.
        """
        for saved in [state] if isinstance(state, Mapping) else state:
            checkpoint.require_intact(saved, {"integration": checkpoint.TEXT}, integration=self.integration)

    @abstractmethod
    def detach(self) -> None:
        """Communicate uncompressed from the next step on; call it between two steps, on every rank."""

    def config(self) -> dict[str, Any]:
        """Return the arguments of the call that made this state, as JSON has them: ``compress(model, **config)``.

        All options are there, those left at their defaults too. Objects of the run (an optimizer, a GradScaler, a
        function, a process group, a `Schedule`, your own `Feedback`) have no such form: a line of the log names those
        that are left out and must be given again.

        Example::

            json.dump(state.config(), file)
            state = dtcomm.ddp.compress(model, **json.load(file))
        """
        left_out: list[str] = []
        config: dict[str, Any] = _plain(dict(self.arguments), "", left_out)
        if left_out:
            _log.warning("%s: config() leaves out %s; give it again", self._home(), ", ".join(left_out))
        return config


_LEFT_OUT = object()


def _plain(value: object, name: str, left_out: list[str]) -> Any:
    """Return a value as JSON has it, and add the names of those that have no such form to ``left_out``."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Policy):
        scheme = str(value).removeprefix(DEFAULT_RULES)
        return str(value) if "->" in scheme else scheme
    if isinstance(value, Path | Scheme):
        return str(value)
    if isinstance(value, Guard):
        value = {field.name: getattr(value, field.name) for field in fields(value)}
    if isinstance(value, Mapping):
        inner = f"{name}." if name else ""
        entries = {str(key): _plain(entry, f"{inner}{key}", left_out) for key, entry in value.items()}
        return {key: entry for key, entry in entries.items() if entry is not _LEFT_OUT}
    if isinstance(value, list | tuple):
        return [_plain(entry, f"{name}[{index}]", left_out) for index, entry in enumerate(value)]
    left_out.append(name)
    return _LEFT_OUT


def why_unused(home: str, more: str = "") -> str:
    """Return why a state compresses nothing: DTCOMM_DISABLE, or else that there is one rank, which is logged too.

    ``home`` is the name in the log, and ``more`` what follows from there being one rank.
    """
    if env.disabled():
        return env.DISABLED
    reason = f"nothing is compressed: the process group has one rank{more}"
    _log.warning("%s: %s", home, reason)
    return reason


Key = tuple[str, str, str, str]  # name of the message, what, codec, dtype


class GroupTraffic(Reporting):
    """Counts what an integration sends over a process group on this rank, from now on; ``str()`` gives one line.

    A subclass is one integration. Its operations call `record`, which counts in all of the subclass's objects for the
    group.
    """

    _live: ClassVar[weakref.WeakSet[GroupTraffic]]

    def __init_subclass__(cls) -> None:
        cls._live = weakref.WeakSet()

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group_name, self.arguments = group_name(group), {}
        self._rank, self._ranks = dist.get_rank(group), dist.get_world_size(group)
        self._traffic: dict[Key, Traffic] = {}
        self._live.add(self)

    @classmethod
    def is_counting(cls) -> bool:
        """Return whether there is an object that counts."""
        return len(cls._live) > 0

    @classmethod
    def record(
        cls,
        group_name: str,
        message: str,
        what: str,
        codec: str,
        dtype: torch.dtype,
        numel: int,
        work: Work,
    ) -> None:
        """Count a completed operation in every object of its group; ``what`` is what was sent, such as ``"tokens"``.

        ``message`` is its name in reports, ``dtype`` that in which ``numel`` elements would be sent uncompressed.
        """
        key = (message, what, codec, str(dtype).removeprefix("torch."))
        for state in list(cls._live):
            if state.group_name == group_name:
                traffic = state._traffic.setdefault(key, Traffic(codec=codec, what=what, dtype=key[3]))
                traffic.numel += numel
                traffic.add(work, numel * dtype.itemsize)

    def detach(self) -> None:
        """Count no longer. What is compressed, and with what, the arguments of each operation say."""
        self._live.discard(self)

    def report(self) -> Report:
        """Return what was sent on this rank since the state was made. Nothing is communicated.

        Returns:
            A row for each kind of message, with its codec. Bytes are those that this rank sent; what it sends to itself
            does not count.
        """
        counted = [(key[0], replace(traffic)) for key, traffic in self._traffic.items()]
        return Report.of_traffic(
            counted,
            integration=self.integration,
            rank=self._rank,
            world_size=self._ranks,
            policy=str(self),
            feedback=False,
            steps=None,
            residual_bytes=0,
        )

    def __str__(self) -> str:
        parts = {f"{traffic.what} {traffic.codec}" for traffic in self._traffic.values()}
        return ", ".join(sorted(parts)) or "nothing sent yet"


def group_name(group: dist.ProcessGroup | None) -> str:
    """Return the name of a group; None is the default group. RuntimeError if no process group is initialized."""
    named = dist.group.WORLD if group is None else group
    if named is None:
        raise RuntimeError(
            "group: no process group is initialized; call torch.distributed.init_process_group"
        )
    name: str = named.group_name
    return name
