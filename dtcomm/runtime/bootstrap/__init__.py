"""How a communicator's ranks are connected, and the operations that are issued before they are.

Each communicator of several ranks has a `Connection`. The first call that needs the ranks makes them meet:
`CpuBootstrap` or `CudaBootstrap` chooses a runtime, and the communicator gets it.

Connecting takes all ranks of the communicator. Ranks use their groups for the first time in different orders, so a rank
that starts an asynchronous operation must not wait for the others: the operation is deferred, a thread connects the
ranks, and then starts the deferred operations in the order in which they were issued.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from dtcomm.errors import CollectiveTimeout, CommunicatorClosed, DtcommError
from dtcomm.runtime.bootstrap.cpu import CpuBootstrap
from dtcomm.runtime.communicator import Communicator
from dtcomm.runtime.plans import PlanCache
from dtcomm.runtime.process_groups import Deadline, group_timeout
from dtcomm.streams import HostStreams, Streams, streams_of
from dtcomm.work import DeferredWork, Work, completion

_GRACE_SECONDS = 0.5
_RELEASED = "group: its communicators have been released"


class Connection:
    """The connection of one communicator. It is made once, by the first call that needs it.

    Attributes:
        plans: The plans of deferred operations. Other calls may use them once the connection is complete: until then
            they would overtake what is deferred.

    Args:
        timeout: Returns how long the ranks wait for each other, when connecting begins.
        streams: The streams of the tensors' device.
        connect: Waits for the other ranks until a deadline, and raises if it fails.
        connected: Called when the ranks are connected and all deferred operations have been started.
        close: Called if the ranks are connected but ``cancel`` was called meanwhile.
    """

    def __init__(
        self,
        timeout: Callable[[], timedelta],
        streams: Streams,
        connect: Callable[[Deadline], None],
        connected: Callable[[], None],
        close: Callable[[], None],
    ) -> None:
        self.plans = PlanCache()
        self._timeout = timeout
        self._deadline: Deadline | None = None  # there is one once connecting has begun
        self._streams = streams
        self._connect = connect
        self._connected = connected
        self._close = close
        self._lock = threading.Lock()
        self._cancelled = self._joined = False
        self._complete = threading.Event()  # the ranks are connected, or an error is known
        self._error: BaseException | None = None
        self._deferred: list[tuple[DeferredWork, Callable[[], Work]]] = []

    def wait(self) -> None:
        """Connect the ranks, or wait until another thread has done so; raises what `Rendezvous.run` does."""
        with self._lock:
            deadline, first = self._deadline, self._deadline is None
            if deadline is None:
                deadline = self._deadline = Deadline(self._timeout())
        if first:
            error = self._run(deadline)
            if error is not None:
                completion.hold_at_exit()
                raise error
            return
        completion.about_to_block()
        limit_s = deadline.left_s() + _GRACE_SECONDS
        if not completion.wait_for(self._complete.wait, limit_s, self._interrupted):
            raise CollectiveTimeout(
                f"another thread of this rank did not make the communicator before the timeout of "
                f"{deadline.timeout_s:g} s"
            )
        self._raise_error()

    def start(self, outputs: Sequence[torch.Tensor], start: Callable[[], Work]) -> Work:
        """Start an operation now if the ranks are connected, else as soon as they are.

        ``start`` may be called in another thread, with the current stream and inference mode of this one.
        """
        with self._lock:
            if not self._complete.is_set():
                streams, stream = self._streams, self._streams.current()
                inference = torch.is_inference_mode_enabled()

                def start_on_stream() -> Work:
                    with streams.on(stream), torch.inference_mode(inference), torch.no_grad():
                        return start()

                if self._deadline is None:
                    deadline = Deadline(self._timeout())

                    def run() -> None:
                        with streams.on(stream):  # which chooses the device too
                            self._run(deadline)

                    completion.start_thread(run, "dtcomm-connect")
                    self._deadline = deadline
                work = DeferredWork(outputs, streams.future(), self._interrupted)
                self._deferred.append((work, start_on_stream))
                return work
        self._raise_error()
        return start()

    def cancel(self) -> bool:
        """Stop connecting: all that waits for the connection raises CommunicatorClosed.

        False if the ranks are connected already; the caller then closes what they are connected by.
        """
        with self._lock:
            if self._joined:
                return False
            self._cancelled = True
            if self._deadline is None:
                self._deadline = Deadline(timedelta())
                self._error = CommunicatorClosed(_RELEASED)
                self._complete.set()
            else:
                self._deadline.cancel(_RELEASED)
            return True

    def _interrupted(self, error: BaseException) -> None:
        """A wait for the connection was interrupted: the rendezvous tells all ranks."""
        if self._deadline is not None and not self._complete.is_set():
            self._deadline.cancel(f"a wait was interrupted by {type(error).__name__}", DtcommError)

    def _run(self, deadline: Deadline) -> BaseException | None:
        """Connect, start what is deferred, and return the error, if any."""
        with completion.running_native():  # the store's functions are native
            error = self._join(deadline)
            self._start_deferred(error)
            return error

    def _join(self, deadline: Deadline) -> BaseException | None:
        """Connect, and return the error, if any."""
        error: BaseException | None = None
        try:
            self._connect(deadline)
        except BaseException as raised:
            error = raised
        with self._lock:
            self._joined = error is None and not self._cancelled
        if self._cancelled and not self._joined:
            if error is None:
                self._close()
            error = CommunicatorClosed(_RELEASED)
        self._error = error
        return error

    def _start_deferred(self, error: BaseException | None) -> None:
        while True:
            with self._lock:
                deferred, self._deferred = self._deferred, []
                if not deferred:
                    if error is None:
                        self._connected()
                    self._complete.set()
                    return
            for work, start in deferred:
                work.begin(start if error is None else self._fail)
                work.connect_future()

    def _raise_error(self) -> None:
        error = self._error
        if error is not None:
            completion.hold_at_exit()
        if isinstance(error, Exception):
            raise copy.copy(error) from error  # every call raises its own
        if error is not None:
            raise DtcommError(f"the communicator was not made: {error!r}") from error

    def _fail(self) -> Work:
        self._raise_error()
        raise AssertionError("called without an error")


def make_connection(
    communicator: Communicator,
    group: dist.ProcessGroup,
    name: str,
    is_pair: bool,
    failed: Callable[[Communicator], None] = lambda communicator: None,
) -> Connection:
    """Return what connects the ranks of a communicator once a call needs them; it waits for no other rank itself.

    ``name`` distinguishes the communicator from others of its group and is equal on all ranks. ``failed`` is called if
    the ranks could not be connected: later calls need another communicator.
    """
    rank, ranks, device = communicator.rank, communicator.ranks, communicator.device

    def connect(deadline: Deadline) -> None:
        try:
            if device is None:
                communicator.join(CpuBootstrap(rank, ranks, group, name, deadline))
                return
            # Imported here: groups of CPU tensors need none of it.
            from dtcomm.runtime.bootstrap.cuda import CudaBootstrap

            communicator.join(CudaBootstrap(device, rank, ranks, group, name, deadline, is_pair))
        except BaseException:
            failed(communicator)
            raise

    return Connection(
        lambda: group_timeout(group),
        HostStreams() if device is None else streams_of(device),
        connect,
        communicator.connected,
        lambda: communicator.runtime.close(),
    )
