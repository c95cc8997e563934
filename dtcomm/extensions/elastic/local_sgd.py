"""`ElasticLocalSGD`: local SGD whose ranks may die, leave and join.

After the collectives of an average each rank tells the coordinator whether they succeeded, and no rank applies the
average unless they did on all (`_complete`). If they did not, the survivors form a new group and repeat it
(`_regroup`). Ranks that wait are admitted at the end of the step in which an average was applied (`_change_members`):
one of those that have the state sends it to them.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import logging
import socket
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import dtcomm
from dtcomm.collectives import barrier, recv, release, send
from dtcomm.compress.checkpoint import require_intact, seal
from dtcomm.compress.policy import Policy
from dtcomm.compress.spec import LevelCodecs, Scheme
from dtcomm.errors import CollectiveMismatch, DtcommError
from dtcomm.extensions.elastic.member import Member
from dtcomm.extensions.elastic.protocol import PROTOCOL, View
from dtcomm.local_sgd.fragments import Fragment, PendingAverage
from dtcomm.local_sgd.local_sgd import LocalSGD

_log = logging.getLogger("dtcomm")

MAX_ATTEMPTS = 10  # of an average or of a view, one after the other


class _StateReplaced(Exception):
    """The others went on without this rank, and it has their state now: there is nothing left of its own average."""


class ElasticLocalSGD(LocalSGD):
    """`LocalSGD` over the members of a coordinator; ranks may be killed, leave and join while the others train on.

    Every rank is a process of its own, which torchrun need not start and which initialises no process group: the
    default group belongs to this object, and is a new one after each change. Ranks that join get the common weights,
    the outer optimizer's state and the step from one that has them; they take part from the next average on.

    What is lost when a rank dies: what it learnt since its last average, and its residual of error feedback. Those of
    the others stay, to the last bit, also when it dies in the middle of an average, which they repeat without it.

    Args:
        model: The model, which nothing else synchronises; the islands of `LocalSGD` are not possible.
        coordinator: The address of the `Coordinator`, ``"host:port"`` or ``"[IPv6 address]:port"``.
        every: As for `LocalSGD`, and so are the other options.
        codec: As for `LocalSGD`.
        feedback: True, False or "auto", as for `dtcomm.ddp.compress`; others cannot follow a change of ranks. Default
            "auto".
        state: What `state_dict` returned in an earlier run; the members with the most steps give theirs to the others.
            Default None.
        timeout_s: Seconds after which a rank that does not take part, or the coordinator, counts as gone. Default 60.
        name: What others call this rank in logs. Default: host and process.
        **options: The other options of `LocalSGD`, but ``group``.

    Attributes:
        view: The members, and this one's rank.

    Raises:
        JoinRefused: The others have another secret, version, model or options; the message names both.
        OSError: The coordinator cannot be reached.
        TypeError, ValueError: An argument is not valid; the others have not noticed.

    Example::

        local = ElasticLocalSGD(model, "coordinator.example:29400", every=30, codec="int4")
        while local.steps < 10_000:
            loss(model, batch(local.steps, local.view.rank)).backward()
            optimizer.step()
            optimizer.zero_grad()
            local.step()
        local.close()
    """

    view: View

    def __init__(
        self,
        model: torch.nn.Module,
        coordinator: str,
        every: int = 16,
        codec: str | Scheme | Policy = "int8",
        feedback: bool | str = "auto",
        *,
        state: Mapping[str, Any] | None = None,
        timeout_s: float = 60.0,
        name: str = "",
        **options: Any,
    ) -> None:
        if "group" in options:
            raise ValueError("group: not possible with ElasticLocalSGD, whose group changes")
        if feedback not in (True, False, "auto"):
            raise ValueError(f"feedback: {feedback!r}; valid with ElasticLocalSGD: True, False, 'auto'")
        if dist.is_initialized():
            text = "ElasticLocalSGD makes the default process group itself"
            raise ValueError(f"torch.distributed: is initialised already; {text}")
        if not timeout_s > 0:
            raise ValueError(f"timeout_s={timeout_s}: expected seconds above 0")
        self._timeout = timedelta(seconds=timeout_s)
        self._change, self._failures, self._is_single = False, 0, True
        self._was_replaced = False
        self._repeat: list[tuple[list[int], int]] = []
        # Alone at first: arguments are checked before the others hear of this rank.
        alone = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=alone, rank=0, world_size=1)
        try:
            super().__init__(model, every, codec, None, feedback, **options)
            self._error_state.keeps_backups = True
            tensors = model.state_dict()
            self._fixed = {name: tensor for name, tensor in tensors.items() if name not in self._weights}
            self._has_state = state is not None
            if state is not None:
                require_intact(state)
                self.load_state_dict(seal({**state, "rank": 0, "world_size": 1}))
                with torch.no_grad():
                    self._move_model(self._weights, mixing=1.0)
            facts = self._facts(options)
        finally:
            self._disconnect()
        self._member = Member(coordinator, facts, self._steps_of_state(), name, timeout_s)
        try:
            self._regroup(self._member.join())
        except BaseException:
            self.close()
            raise

    def step(self) -> bool:
        """Count a step, start and apply the averages that are due, then change the group if ranks came or went.

        Returns:
            Whether an average was applied.

        Raises:
            FloatingPointError: A rank sent NaN or Inf, as for `LocalSGD.sync`.
            PeerLost: The coordinator is gone for longer than ``timeout_s``. This rank's state stays; see ``state``.
            DtcommError: An average failed again and again, although no rank is gone.
        """
        try:
            applied = super().step()
        except _StateReplaced:
            applied = True
        self._change_members()
        return applied

    def sync(self) -> None:
        """Average all fragments now, as `LocalSGD.sync`, then change the group if ranks came or went."""
        with contextlib.suppress(_StateReplaced):
            super().sync()
        self._change_members()

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state, for ``state`` of a later run; averages in flight are applied before.

        With averages in flight all ranks call it after the same step.
        """
        with contextlib.suppress(_StateReplaced):
            while self._in_flight:
                self._apply(self._in_flight.popleft(), self.mixing)
        self._change_members()
        return super().state_dict()

    def close(self) -> None:
        """Leave the others, who go on, and destroy the process group. A second call does nothing."""
        self._member.close()
        self._disconnect()

    def _start(self, fragments: Sequence[Fragment], due: int) -> PendingAverage:
        """Start to average fragments; if a rank is gone already, return an average without messages, which fails."""
        try:
            return super()._start(fragments, due)
        except CollectiveMismatch:
            raise
        except (DtcommError, RuntimeError) as error:
            _log.warning("dtcomm: average %d could not be started: %s", self.syncs + 1, error)
            average = PendingAverage(list(fragments), self.syncs, due)
            self.syncs += 1
            for fragment in fragments:
                fragment.averages += 1
            return average

    def _complete(self, average: PendingAverage) -> None:
        """Wait for an average, and repeat it with the survivors until it has succeeded on all of them."""
        while not average.means:
            error: Exception | None = None
            try:
                if not average.buckets:
                    raise DtcommError("it could not be started")
                super()._complete(average)
            except CollectiveMismatch:
                raise
            except (DtcommError, RuntimeError) as raised:
                error = _without_frames(raised)
                average.buckets = []  # their handles keep the group alive
                self._disconnect()  # those that wait for this rank see it
            verdict = self._member.vote(error is None, self.steps)
            if verdict.commit:
                self._change |= verdict.change
                self._failures = 0
                names = (name for fragment in average.fragments for name in fragment.weights)
                self._error_state.drop_backups(names)
                return
            self._count_failure(f"average {average.number + 1}", error)
            average.means, average.buckets = {}, []
            self._in_flight.appendleft(average)
            self._was_replaced = False
            self._regroup(self._member.reform(admit=False, steps=self.steps))
            if self._was_replaced:
                raise _StateReplaced
            average.__dict__.update(self._in_flight.popleft().__dict__)  # the caller holds this object

    def _change_members(self) -> None:
        """Make a new group, if an average was applied since ranks came or went."""
        if self._change:
            self._change = False
            self._regroup(self._member.reform(admit=True, steps=self.steps))

    def _regroup(self, view: View) -> None:
        """Form the group of a view or of a later one, give the state to those without, repeat what was in flight."""
        before = getattr(self, "view", None)
        while True:
            error: Exception | None = None
            self._disconnect()  # first: its threads write into residuals
            self._take_back()
            try:
                self._connect(view)
                self._begin_group()
                self._share_state(view)
                barrier()  # connects all ranks while the coordinator still notices who is missing
            except CollectiveMismatch:
                raise
            except (DtcommError, RuntimeError) as raised:
                error = _without_frames(raised)
            verdict = self._member.vote(error is None, self._steps_of_state())
            if verdict.commit:
                break
            self._count_failure(f"view {view.number}", error)
            view = self._member.reform(admit=False, steps=self._steps_of_state())
        self._change, self._failures = verdict.change, 0
        self.view = view
        self._log_change(before, view)
        for indices, due in self._repeat:
            self._in_flight.append(self._start([self._fragments[index] for index in indices], due))
        self._repeat = []

    def _connect(self, view: View) -> None:
        """Make the default process group of a view."""
        _require_store(self._member.host, view.store_port, self._timeout.total_seconds())
        where, wait = (self._member.host, view.store_port), self._timeout
        store = dist.TCPStore(*where, is_master=False, timeout=wait)  # type: ignore[attr-defined]
        dist.init_process_group(
            "gloo", store=store, rank=view.rank, world_size=len(view.names), timeout=self._timeout
        )

    def _disconnect(self) -> None:
        if dist.is_initialized():
            release()
            dist.destroy_process_group()

    def _take_back(self) -> None:
        """Take back the averages in flight, as if they had not been started, and note them in `_repeat`.

        The differences of weights are still those of the model, and residuals are set to what they were.
        """
        if not self._in_flight:
            return
        for average in self._in_flight:
            for fragment in average.fragments:
                fragment.averages -= 1
            indices = [self._fragments.index(fragment) for fragment in average.fragments]
            self._repeat.append((indices, average.due))
        self.syncs = self._in_flight[0].number
        self._in_flight.clear()
        self._error_state.begin_step(undo=True)
        self._averager.factors.load_state_dict({})  # some ranks may have changed them already

    def _begin_group(self) -> None:
        """Make anew what depends on the ranks of the group."""
        self._averager = self._make_averager(self._averager.seed, self._averager.factors)
        monitor = self._make_monitor()  # windows begin anew, on all ranks
        monitor.load_state_dict(self._monitor.state_dict())
        monitor.events.extend(self._monitor.events)
        self._monitor = monitor
        is_single = dist.get_world_size() == 1
        if is_single != self._is_single or any(isinstance(scheme, LevelCodecs) for scheme in self._schemes):
            self._retired += [layout for _, layout in self._buckets]
            for fragment in self._fragments:
                fragment.buckets = []
        for _, layout in self._buckets:
            layout.revision = monitor.revision
        self._is_single = is_single

    def _share_state(self, view: View) -> None:
        """Send the state to the ranks without it, or receive it."""
        newest = max(view.steps)
        owners = [rank for rank, steps in enumerate(view.steps) if steps == newest]
        if newest < 0:
            owners = owners[:1]  # all are new, and the first one's weights count
        behind = [rank for rank in range(len(view.names)) if rank not in owners]
        for index, rank in enumerate(behind):
            owner = owners[index % len(owners)]
            if rank == view.rank:
                self._load_shared(_receive(owner))
            elif owner == view.rank:
                _send(self._shared_state(), rank)
        self._has_state = True

    def _steps_of_state(self) -> int:
        return self.steps if self._has_state else -1

    def _shared_state(self) -> dict[str, Any]:
        """Return what all ranks have in common."""
        state = super().state_dict()
        own = ("residuals", "velocities", "references", "rank", "world_size")
        shared = {name: value for name, value in state.items() if name not in own}
        return seal({**shared, "fixed": self._fixed, "repeat": self._repeat})

    @torch.no_grad()
    def _load_shared(self, state: dict[str, Any]) -> None:
        require_intact(state)
        rank, size = dist.get_rank(), dist.get_world_size()
        own = {"rank": rank, "world_size": size, "residuals": {}, "velocities": {}, "references": {}}
        self._was_replaced = self._has_state
        if self._has_state:  # it was here before and fell behind: its residuals are still its own
            own |= self._error_state.state_dict()
        self.load_state_dict(seal({**state, **own}))
        for name, tensor in self._fixed.items():
            tensor.copy_(state["fixed"][name])
        self._move_model(self._weights, mixing=1.0)
        self._repeat = [(list(indices), due) for indices, due in state["repeat"]]

    def _count_failure(self, what: str, error: Exception | None) -> None:
        self._failures += 1
        reason = "it failed on another rank" if error is None else str(error)
        _log.warning("dtcomm: %s failed, and is repeated: %s", what, reason)
        if self._failures >= MAX_ATTEMPTS:
            text = f"{what} failed {self._failures} times one after the other: {reason}"
            raise DtcommError(text) from error

    def _log_change(self, before: View | None, view: View) -> None:
        if before is None:
            text = "dtcomm: joined view %d with %d ranks, at step %d"
            _log.info(text, view.number, len(view.names), self.steps)
            return
        gone = [name for name in before.names if name not in view.names]
        new = [name for name in view.names if name not in before.names]
        if gone:
            lost = "with what they learnt since their last average and their residuals"
            _log.warning("dtcomm: after %d steps: gone: %s, %s", self.steps, ", ".join(gone), lost)
        if new:
            _log.info("dtcomm: after %d steps: joined: %s", self.steps, ", ".join(new))

    def _facts(self, options: Mapping[str, Any]) -> dict[str, str]:
        """Return what must be equal on all ranks, by name."""
        tensors = {**self._weights, **self._fixed}
        text = ";".join(f"{name} {tuple(t.shape)} {t.dtype}" for name, t in tensors.items())
        elements = sum(tensor.numel() for tensor in tensors.values())
        digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        outer = "none"
        if self._outer is not None:
            outer = f"{type(self._outer).__name__} {sorted(self._outer.defaults.items())}"
        return {
            "dtcomm": dtcomm.__version__,
            "protocol": str(PROTOCOL),
            "model": f"{len(tensors)} tensors with {elements} elements, digest {digest} of names, shapes and dtypes",
            "codec": str(self.policy),
            "feedback": str(self._error_state.kind),
            "every": str(self.every),
            "outer": outer,
            **{name: str(value) for name, value in sorted(options.items()) if name != "outer"},
        }


def _without_frames(error: Exception) -> Exception:
    """Return an error whose traceback does not keep the process group alive in which it was raised."""
    link: BaseException | None = error
    while link is not None:
        link.__traceback__, link = None, link.__cause__ or link.__context__
    return error


def _require_store(host: str, port: int, timeout_s: float) -> None:
    """Raise at once if a view's store does not exist any more, where TCPStore would try until its timeout."""
    try:
        socket.create_connection((host, port), timeout=timeout_s).close()
    except OSError as error:
        raise DtcommError(f"the store of the view, port {port}, cannot be reached: {error}") from error


def _send(state: dict[str, Any], rank: int) -> None:
    packed = io.BytesIO()
    torch.save(state, packed)
    data = torch.frombuffer(packed.getbuffer(), dtype=torch.uint8)
    send(torch.tensor([data.numel()]), rank)
    send(data, rank)


def _receive(rank: int) -> dict[str, Any]:
    size = torch.empty(1, dtype=torch.int64)
    recv(size, rank)
    data = torch.empty(int(size), dtype=torch.uint8)
    recv(data, rank)
    state: dict[str, Any] = torch.load(io.BytesIO(data.numpy().tobytes()), weights_only=True)
    return state
