"""Bootstrap of a communicator for CPU tensors.

The ranks of a group exchange addresses through its store, try to reach each other with the native engine, and agree on
one runtime: the engine if it works on every rank, else the group's own backend.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from dtcomm import env
from dtcomm.errors import CollectiveTimeout, DtcommError
from dtcomm.kernels import dispatch
from dtcomm.runtime import emulated_link
from dtcomm.runtime.bootstrap import between_hosts, processes
from dtcomm.runtime.bootstrap.reconnect import ConnectionKeeper
from dtcomm.runtime.bootstrap.rendezvous import (
    Rendezvous,
    StoreExchange,
    host_id,
    places,
    require_equal,
)
from dtcomm.runtime.bootstrap.tcp import Listener
from dtcomm.runtime.native import NativeRuntime
from dtcomm.runtime.native.copy_policy import SOCKET_SLOT_BYTES, local_ranks, threads_per_rank, usable_cores
from dtcomm.runtime.process_groups import Deadline, group_store, group_timeout, private_store, server_address
from dtcomm.runtime.types import Runtime
from dtcomm.streams import HostStreams, Streams
from dtcomm.system import allowed_cores

Infos = Sequence[dict[str, Any]]

_ANSWERS_POLL_S = 0.25  # looks ask the store for every rank, and connecting seldom takes as long
_UCX_POLL_S = 0.2e-3
_MAX_UCX_CONNECT = timedelta(seconds=30)  # also if the group's timeout is longer
_GRACE_S = 0.5  # for the process of a rank to end after its memory and connections have


class _PeerFailed(ConnectionError):
    """Another rank could not connect and has said why, after it has looked whether a rank has died."""


class CpuBootstrap:
    """One rank's part in making a communicator of the global ranks ``ranks``, of which it is the one at ``rank``.

    Attributes:
        runtime: What executes operations, once ``join`` has returned; ``reason`` says why this one.
        names: How errors name each rank.
        groups: The ranks of each host.
        tuning_table: The table of ``dtcomm tune`` that rank 0 brought.
        links: The text of the file of DTCOMM_TOPOLOGY that rank 0 brought.
        epoch: Counts the attempts of the ranks to make this communicator; equal on all ranks.

    Args:
        name: Distinguishes this communicator from others of the same group; equal on all ranks.
        deadline: When waiting for the other ranks ends; None: after the group's timeout.
    """

    def __init__(
        self,
        rank: int,
        ranks: list[int],
        group: dist.ProcessGroup,
        name: str,
        deadline: Deadline | None = None,
    ) -> None:
        self.rank = rank
        self.ranks = ranks
        self.size = len(ranks)
        self.names = [f"rank {rank}" for rank in ranks]
        self.groups: tuple[tuple[int, ...], ...] = ((0,),)
        self.tuning_table = ""
        self.links = ""
        self.reason = ""
        self.epoch = 0
        self.runtime: Runtime | None = None
        self._name = name
        self._prefix = self._places = ""
        self._exchange: StoreExchange | None = None  # of the present attempt
        self._several: dict[int, int] = {}  # connections to the peers that have more than one
        self._group = group
        self._timeout = group_timeout(group)
        self._deadline = Deadline(self._timeout) if deadline is None else deadline

    def join(self) -> None:
        """Agree on a runtime with all ranks; raises what `Rendezvous.run` does.

        Also CollectiveMismatch if ranks differ in dtcomm's version or its variables, and DtcommError if what a variable
        asks for is not possible.
        """
        store = group_store(self._group)
        rendezvous = Rendezvous(store, self._name, self.rank, self.ranks, self._deadline)

        def attempt(exchange: StoreExchange) -> Runtime:
            self.epoch, self._prefix, self._exchange = rendezvous.epoch, rendezvous.prefix, exchange
            return self._attempt(exchange)

        self.runtime = rendezvous.run(attempt, lambda runtime: runtime.close())

    def _attempt(self, exchange: StoreExchange) -> Runtime:
        if env.get("DTCOMM_RUNTIME") == "peer" and not torch.cuda.is_available():
            raise ValueError("DTCOMM_RUNTIME=peer: fused kernels need CUDA tensors, and torch sees no GPU")
        with contextlib.ExitStack() as on_failure:
            listener, why_closed = _listen(server_address(group_store(self._group)))
            if listener is not None:
                on_failure.callback(listener.close)
            native, infos = self._exchange_info(exchange, listener, why_closed, on_failure)
            no_engine = next((info["no_engine"] for info in infos if info["no_engine"]), "")
            if native is None or no_engine:
                self._use_messages(no_engine, infos)
            elif self._agree(exchange, native, infos, self._attach(native, infos, listener, exchange)):
                if listener is not None and self._several:
                    peers = {peer: infos[peer]["listener"] for peer in self._several}
                    timeout_s = self._timeout.total_seconds()
                    native.keeper = ConnectionKeeper(
                        native.native, self.rank, listener, peers, self._several, self.names, timeout_s
                    )
                elif listener is not None:
                    listener.close()
                on_failure.pop_all()
                return native
        return self._message_runtime(self._private_group(), None)

    @functools.cached_property
    def _store(self) -> c10d.Store:
        """The store of a runtime over the group's own backend, which waits in it and keeps it."""
        return private_store(self._group)

    def _base_info(self) -> dict[str, Any]:
        return {
            "host": host_id(),
            "name": f"rank {self.ranks[self.rank]} (host {socket.gethostname()}, pid {os.getpid()})",
            "process": processes.own(),
            "variables": env.shared(),
            "links": env.links_text() if self.rank == 0 else "",
        }

    def _read_base_info(self, infos: Infos) -> None:
        require_equal(infos, "variables", "DTCOMM_ variables")
        self.names = [info["name"] for info in infos]
        processes.remember(self.ranks, self.names, [info["process"] for info in infos])
        self.links = infos[0]["links"]
        hosts: dict[str, list[int]] = {}
        for rank, info in enumerate(infos):
            hosts.setdefault(info["host"], []).append(rank)
        self.groups = tuple(map(tuple, hosts.values()))
        self._places = places(hosts)

    def _exchange_info(
        self,
        exchange: StoreExchange,
        listener: Listener | None,
        why_closed: str,
        on_failure: contextlib.ExitStack,
    ) -> tuple[NativeRuntime | None, Infos]:
        """Tell all ranks how to reach this one; returns this rank's engine, if it can be made, and every rank's info.

        The ranks ask each other first for all that the sizes of the engine's memory depend on, so each makes it once.
        """
        world_size = dist.get_world_size() if dist.is_initialized() else self.size
        infos = exchange.all_gather(
            {
                **self._base_info(),
                "listener": {"closed": why_closed} if listener is None else listener.info(),
                "machine": emulated_link.machine(),
                "cores": allowed_cores(),
                "usable_cores": usable_cores(),
                "local_ranks": local_ranks(self.size, world_size),
                "table": env.tune_text() if self.rank == 0 else "",
            }
        )
        self._read_base_info(infos)
        if emulated_link.links() and len({info["machine"] for info in infos}) > 1:
            raise DtcommError(
                "DTCOMM_EMULATE_LINK: emulated links join processes of one machine; these ranks are on more"
            )
        self.tuning_table = infos[0]["table"]
        # Sockets and ranks with several threads have pieces of another size, so the shared memory is too.
        slot_bytes, longest_ms = None, 0.0
        if self._uses_sockets():
            slot_bytes = SOCKET_SLOT_BYTES
            library, missing = _open_ucx()
            _extend(infos, exchange.all_gather({"ucx_missing": missing, **self._round_trips(infos)}))
            if not self._uses_ucx(infos) and not emulated_link.links():
                longest_ms = max(max(info["round_trips"]) for info in infos)
        is_far = between_hosts.is_far(longest_ms)
        if is_far:
            slot_bytes = between_hosts.slot_bytes(longest_ms, self._fastest_gbit(infos))
        threads = min(self._threads(infos, ranks) for ranks in self.groups)
        native: NativeRuntime | None = None
        own: dict[str, Any] = {"no_engine": "", "address": None, "ucx": {}}
        try:
            native = NativeRuntime(
                self.rank, self.size, self._timeout.total_seconds(), slot_bytes, threads, wide_area=is_far
            )
            on_failure.callback(native.close)
            native.round_trip_ms = longest_ms
            own["address"] = native.native.address()
            own["ucx"] = _ucx_offer(native, library, missing) if self._uses_sockets() else {}
        except OSError as error:  # a sandbox or a limit refuses what the engine needs
            own["no_engine"] = f"{self.names[self.rank]}: {error}"
        _extend(infos, exchange.all_gather(own))
        return native, infos

    def _round_trips(self, infos: Infos) -> dict[str, Any]:
        """The round trips to each host in milliseconds, and the bytes that a connection holds."""
        first = [ranks[0] for ranks in self.groups]
        probed = {
            host: infos[rank]["listener"]
            for host, rank in enumerate(first)
            if self.rank not in self.groups[host] and "closed" not in infos[rank]["listener"]
        }
        measured = dict(zip(probed, between_hosts.round_trip_ms(list(probed.values())), strict=True))
        return {
            "round_trips": [measured.get(host, 0.0) for host in range(len(self.groups))],
            "gbit": [between_hosts.measured_gbit(infos[rank]["host"]) for rank in first],
            "buffer_bytes": between_hosts.buffer_bytes(),
        }

    def _fastest_gbit(self, infos: Infos) -> float:
        """The rate that the slots are to fill, of the fastest link between hosts; the same answer on all ranks."""
        hosts = range(len(self.groups))
        known = [
            max(max(infos[rank]["gbit"][there] for rank in self.groups[here]),
                max(infos[rank]["gbit"][here] for rank in self.groups[there]))
            for here in hosts for there in hosts if here < there
        ]  # fmt: skip
        return max((between_hosts.rate_gbit(gbit) for gbit in known), default=between_hosts.REACHED_GBIT)

    def _connections(self, infos: Infos, peer: int) -> int:
        """How many connections carry the payloads to a peer; the same answer on both."""
        if emulated_link.links() or self._uses_ucx(infos):
            return 1
        host = {rank: index for index, ranks in enumerate(self.groups) for rank in ranks}
        own, other = infos[self.rank], infos[peer]
        there, here = host[peer], host[self.rank]
        round_trip_ms = max(own["round_trips"][there], other["round_trips"][here])
        gbit = between_hosts.rate_gbit(own["gbit"][there], other["gbit"][here])
        return between_hosts.connections(round_trip_ms, min(own["buffer_bytes"], other["buffer_bytes"]), gbit)

    def _uses_ucx(self, infos: Infos) -> bool:
        """Whether all ranks have opened UCX, so that payloads go through it; the same answer on all ranks."""
        return env.get("DTCOMM_TRANSPORT") == "ucx" or all(info["ucx_missing"] is None for info in infos)

    def _threads(self, infos: Infos, ranks: Sequence[int]) -> int:
        """With how many threads the ranks of a host may work; the same answer on all ranks."""
        usable = max(infos[rank]["usable_cores"] for rank in ranks)
        return threads_per_rank(
            [infos[rank]["cores"] for rank in ranks], usable, _ranks_of_host(infos, ranks)
        )

    def _uses_sockets(self) -> bool:
        """Whether any ranks are to reach each other through sockets; the same answer on all ranks."""
        if env.get("DTCOMM_RUNTIME") == "process_group":
            return False
        return len(self.groups) > 1 or env.get("DTCOMM_TRANSPORT") in ("sockets", "ucx")

    def _attach(
        self, native: NativeRuntime, infos: Infos, listener: Listener | None, exchange: StoreExchange
    ) -> str:
        """Connect the engine to all peers; returns why that is not possible, or an empty string."""
        if env.get("DTCOMM_RUNTIME") == "process_group":
            return "DTCOMM_RUNTIME=process_group"
        if len(self.groups) > 1 and env.get("DTCOMM_TRANSPORT") == "memory":
            return f"the ranks are {self._places}"
        host = next(group for group in self.groups if self.rank in group)
        in_memory = () if env.get("DTCOMM_TRANSPORT") in ("sockets", "ucx") else host
        by_socket = {
            rank: info["listener"]
            for rank, info in enumerate(infos)
            if rank != self.rank and rank not in in_memory
        }
        if by_socket and dispatch.current() == "reference":
            return "the reference kernels are in force, which the engine does not run"
        try:
            sockets = self._connect(infos, listener, by_socket, exchange)
        except OSError as error:
            self._require_alive(error)
            return f"cannot connect to a peer: {error}"
        if isinstance(sockets, str):
            return sockets
        affinities = [infos[rank]["cores"] for rank in host]
        addresses = [info["address"] for info in infos]
        try:
            native.attach(addresses, self.names, affinities, _ranks_of_host(infos, host), sockets, host)
            self._several = {peer: len(fds) for peer, fds in sockets.items() if len(fds) > 1}
            native.remote_hosts = {peer: infos[peer]["host"] for peer in sockets}
            native.remember_rate = between_hosts.remember
            native.connections = max(map(between_hosts.payload_connections, sockets.values()), default=0)
        except (OSError, RuntimeError) as error:
            self._require_alive(error)
            return f"cannot map the memory of a peer: {error}"
        return self._connect_ucx(native, infos, exchange) if self._uses_sockets() else ""

    def _connect_ucx(self, native: NativeRuntime, infos: Infos, exchange: StoreExchange) -> str:
        """Send payloads through UCX if all ranks offer it; returns why it failed, or an empty string."""
        offers = [info["ucx"] for info in infos]
        missing = {
            rank: offer["missing"] for rank, offer in enumerate(offers) if offer.get("missing") is not None
        }
        if missing:
            rank, reason = next(iter(missing.items()))
            native.no_ucx = f"{self.names[rank]}: {reason}" if reason else ""
            return native.no_ucx if env.get("DTCOMM_TRANSPORT") == "ucx" else ""
        own = offers[self.rank]
        check, deadline = self._failure_check(exchange), Deadline(min(self._timeout, _MAX_UCX_CONNECT))
        try:
            native.connect_ucx(
                [base64.b64decode(offer["address"]) for offer in offers],
                {"version": own["version"], "devices": own["devices"]},
            )
            while not native.native.ucx_is_connected():
                check()
                if not deadline.left_s() or not self._deadline.left_s():
                    return "UCX does not reach all ranks"
                time.sleep(_UCX_POLL_S)
        except (OSError, RuntimeError) as error:
            if isinstance(error, DtcommError):
                raise
            self._require_alive(error)
            return f"cannot connect to a peer through UCX: {error}"
        return ""

    def _require_alive(self, error: Exception | None = None) -> None:
        """PeerLost if a rank has died, to be called where that may be the cause of an error."""
        grace_s = 0.0 if isinstance(error, _PeerFailed) else min(_GRACE_S, self._deadline.left_s())
        processes.require_alive(self.ranks, grace_s)

    def _connect(
        self,
        infos: Infos,
        listener: Listener | None,
        peers: Mapping[int, Mapping[str, Any]],
        exchange: StoreExchange,
    ) -> dict[int, list[int]] | str:
        """Connected sockets for each of ``peers``, or why there can be none."""
        if not peers:
            return {}
        for rank, info in [(self.rank, infos[self.rank]["listener"]), *peers.items()]:
            if "closed" in info:
                return f"{self.names[rank]} cannot be connected to: {info['closed']}"
        assert listener is not None
        check = self._failure_check(exchange)
        counts = {peer: between_hosts.sockets(self._connections(infos, peer)) for peer in peers}
        return listener.connect(self.rank, peers, self.names, self._deadline.left_s(), check, counts)

    def _failure_check(self, exchange: StoreExchange) -> Callable[[], None]:
        """A function that raises what ends a wait for connections: a failure of this attempt or of another rank."""
        next_look = time.monotonic() + _ANSWERS_POLL_S

        def check() -> None:
            nonlocal next_look
            exchange.check()
            if time.monotonic() < next_look:
                return
            next_look = time.monotonic() + _ANSWERS_POLL_S
            # A rank that could not connect says so to `_agree` and will not come.
            for rank, answer in exchange.early_answers().items():
                if answer["failure"]:
                    raise _PeerFailed(f"{self.names[rank]}: {answer['failure']}")

        return check

    def _agree(self, exchange: StoreExchange, native: NativeRuntime, infos: Infos, failure: str) -> bool:
        """Whether the engine serves the group: every rank is attached. The same answer on all ranks."""
        single_copy = failure or native.why_no_single_copy()
        trials = failure or native.why_no_trials()
        answers = exchange.all_gather({"failure": failure, "single_copy": single_copy, "trials": trials})
        failures = [
            f"{infos[rank]['name']}: {answer['failure']}"
            for rank, answer in enumerate(answers)
            if answer["failure"]
        ]
        if failures:
            self._use_messages(failures[0], infos)
            return False
        native.single_copy = next((answer["single_copy"] for answer in answers if answer["single_copy"]), "")
        native.no_trials = next((answer["trials"] for answer in answers if answer["trials"]), "")
        if native.single_copy and env.get("DTCOMM_SINGLE_COPY") == "on":
            self._require_alive()
            raise DtcommError(f"DTCOMM_SINGLE_COPY=on, but {native.single_copy}")
        self.reason = self._engine_reason(native.transport)
        return True

    def _use_messages(self, reason: str, infos: Infos) -> None:
        """Remember why the engine cannot serve the group; DtcommError if a variable asks for what needs the engine."""
        self.reason = reason
        if variable := _variable_that_requires_engine():
            raise DtcommError(f"{variable}, but {reason}")
        if env.get("DTCOMM_EMULATE_LINK"):
            raise DtcommError(f"DTCOMM_EMULATE_LINK: only the native engine emulates links, but {reason}")
        if env.get("DTCOMM_PORTS") and self._uses_sockets():
            # Messages of the group's backend would use other ports, which a firewall may drop silently.
            raise DtcommError(f"DTCOMM_PORTS={env.get('DTCOMM_PORTS')}, but {reason}")
        if self._uses_sockets() and any(info["listener"].get("has_secret") for info in infos):
            # Connections of the group's backend ask for no secret.
            raise DtcommError(f"DTCOMM_SECRET is set, but {reason}")

    def _engine_reason(self, transport: str) -> str:
        if transport == "memory":
            return "all ranks share this host's memory"
        if len(self.groups) > 1:
            return f"the ranks are {self._places}: {transport}"
        return f"DTCOMM_TRANSPORT={env.get('DTCOMM_TRANSPORT')}"

    def _message_runtime(self, group: Any, streams: Streams | None) -> Runtime:
        """A runtime over the point-to-point messages of a group; ``streams`` are those of the device, None: the CPU."""
        # Imported here: most processes use the engine and never need it.
        from dtcomm.runtime.torchdist.runtime import TorchDistRuntime
        from dtcomm.runtime.torchdist.transport import GlooTransport

        wait_records = c10d.PrefixStore(self._prefix, self._store)
        timeout_s = self._timeout.total_seconds()
        # Looked up here: the runtime may outlive the default group that its ranks belong to.
        known = processes.of(self.ranks)

        def has_ended(peer: int) -> bool:
            process = known[peer]
            return process is not None and process.has_ended()

        transport = GlooTransport(group, self.names, timeout_s, wait_records, streams, has_ended)
        compare = transport.require_same_operation if env.get("DTCOMM_CHECK") == "1" else None
        return TorchDistRuntime(transport, streams or HostStreams(), self.rank, compare=compare)

    def _private_group(self) -> Any:
        """A group or backend over the same ranks that carries dtcomm's messages alone."""
        group = self._group
        if dist.get_backend(group) in ("gloo", "dtcomm"):
            # Not through torch's registry: pairs are made in threads, several at once, and a second group of the same
            # ranks would get the name of the first and read its addresses.
            return self._private_backend("gloo")
        private: dist.ProcessGroup = dist.new_group(
            self.ranks,
            timeout=self._timeout,
            backend=dist.get_backend(group),
            use_local_synchronization=True,
            group_desc="dtcomm",
        )
        self._require_connected(True)  # a rank that could not make its own raises on all
        return private

    def _private_backend(self, name: str) -> Any:
        """A Gloo backend over the same ranks, outside any process group."""
        prefix = f"{self._prefix}/{name}"
        store = c10d.PrefixStore(prefix, self._store)
        flags = c10d.PrefixStore(prefix, group_store(self._group))
        assert self._exchange is not None
        check = self._exchange.check
        backend = processes.connect_gloo(
            store, flags, self.rank, self.size, self._timeout, self._deadline, check
        )
        self._require_connected(backend is not None)
        return backend

    def _require_connected(self, connected: bool) -> None:
        """CollectiveTimeout on all ranks if one was not connected to the others in time."""
        assert self._exchange is not None
        answers = self._exchange.all_gather({"connected": connected})
        late = [name for name, answer in zip(self.names, answers, strict=True) if not answer["connected"]]
        if late:
            raise CollectiveTimeout(
                f"{', '.join(late)} could not connect to the other ranks through Gloo before the timeout of "
                f"{self._deadline.timeout_s:g} s"
            )


def _extend(infos: Infos, answers: Infos) -> None:
    for info, answer in zip(infos, answers, strict=True):
        info.update(answer)


def _open_ucx() -> tuple[between_hosts.Ucx | None, str | None]:
    """UCX, or why this rank does not offer it; the reason is empty if UCX is not wanted, None if there is UCX."""
    try:
        if env.get("DTCOMM_TRANSPORT") == "ucx":
            return between_hosts.open_ucx(), None
        if env.get("DTCOMM_TRANSPORT") == "auto":
            return between_hosts.open_ucx_for_rdma(), None
    except RuntimeError as error:
        return None, str(error)
    return None, ""


def _ucx_offer(
    native: NativeRuntime, library: between_hosts.Ucx | None, missing: str | None
) -> dict[str, Any]:
    """How peers reach this rank through UCX, or under "missing" why they do not."""
    if library is None:
        return {"missing": missing}
    try:
        address = native.native.make_ucx_address()
    except RuntimeError as error:
        return {"missing": str(error)}
    return {
        "address": base64.b64encode(address).decode(),
        "version": library.version,
        "devices": library.devices,
    }


def _listen(towards: tuple[str, int] | None) -> tuple[Listener | None, str]:
    """A listener for peers of other hosts, or why there is none."""
    if env.get("DTCOMM_RUNTIME") == "process_group" or env.get("DTCOMM_TRANSPORT") == "memory":
        return None, "its variables say so"
    try:
        return Listener(towards), ""
    except OSError as error:
        return None, str(error)


def _ranks_of_host(infos: Infos, ranks: Sequence[int]) -> int:
    """Return how many ranks the host of some ranks has, those of other communicators included."""
    return max(len(ranks), *(int(infos[rank]["local_ranks"]) for rank in ranks))


def _variable_that_requires_engine() -> str:
    """The variable that rules the group's own backend out; empty if there is none."""
    for name, choices in (
        ("DTCOMM_RUNTIME", ("native",)),
        ("DTCOMM_TRANSPORT", ("memory", "sockets", "ucx")),
    ):
        if env.get(name) in choices and env.get("DTCOMM_RUNTIME") != "process_group":
            return f"{name}={env.get(name)}"
    return ""
