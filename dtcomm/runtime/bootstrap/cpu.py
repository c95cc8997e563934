"""How the ranks of a group join: they meet, learn where the others are, and agree on what serves them."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from dtcomm import _C, env
from dtcomm.errors import DtcommError
from dtcomm.kernels import dispatch
from dtcomm.runtime import emulated_link
from dtcomm.runtime.bootstrap.store_exchange import StoreExchange, host_id, require_equal
from dtcomm.runtime.bootstrap.tcp import Listener
from dtcomm.runtime.native.chunk_size import MESSAGE_SLOT_BYTES
from dtcomm.runtime.native.runtime import NativeRuntime
from dtcomm.runtime.process_groups import group_store, group_timeout
from dtcomm.runtime.torchdist.checksum_frames import Wire
from dtcomm.runtime.types import Runtime

PROTOCOL = 2  # what ranks say to each other when they meet, and the layout of shared areas


class CpuBootstrap:
    """One rank's part. Once ``meet`` returned, ``runtime`` serves the ranks and ``why`` says why it is the one it is.

    ``names`` is how errors call the ranks, ``groups`` those of each host, ``table`` what rank 0 brought from tuning.

    ``rank`` counts among ``ranks``, which are global; ``store`` is where they meet, by default the group's.
    """

    def __init__(
        self,
        rank: int,
        ranks: list[int],
        group: dist.ProcessGroup,
        epoch: int | str,
        store: c10d.Store | None = None,
    ) -> None:
        self.rank = rank
        self.ranks = ranks
        self.size = len(ranks)
        self.names = [f"rank {rank}" for rank in ranks]
        self.groups: tuple[tuple[int, ...], ...] = ((0,),)
        self.table = ""
        self.why = ""
        self.runtime: Runtime[Any] | None = None
        self._group = group
        self._epoch = epoch
        self._store = group_store(group) if store is None else store
        self._timeout = group_timeout(group)

    @property
    def _hosts(self) -> int:
        return len(self.groups)

    def meet(self) -> None:
        """With all ranks. DtcommError where they differ, or where what a variable asks for cannot be had."""
        timeout, store, epoch = self._timeout, self._store, self._epoch
        meeting = StoreExchange(store, f"dtcomm/{PROTOCOL}/{epoch}", self.rank, self.ranks, timeout)
        native = NativeRuntime(self.rank, self.size, timeout.total_seconds())
        door, closed = _door()
        try:
            words = meeting.exchange(
                {
                    "address": native.address(),
                    "door": {"closed": closed} if door is None else door.word(),
                    "host": host_id(),
                    "name": f"rank {self.ranks[self.rank]} (host {socket.gethostname()}, pid {os.getpid()})",
                    "protocol": PROTOCOL,
                    "variables": env.shared(),
                    "machine": emulated_link.machine(),
                    "cores": sorted(os.sched_getaffinity(0)),
                    "table": env.tune_text() if self.rank == 0 else "",
                }
            )
            require_equal(words, "protocol", "the version of dtcomm")
            require_equal(words, "variables", "DTCOMM_ variables")
            links = emulated_link.links()
            if links and len({word["machine"] for word in words}) > 1:
                raise DtcommError(
                    "DTCOMM_LINK: emulated links join processes of one machine; these ranks are on more"
                )
            self.names = [word["name"] for word in words]
            self.table = words[0]["table"]
            hosts: dict[str, list[int]] = {}
            for rank, word in enumerate(words):
                hosts.setdefault(word["host"], []).append(rank)
            self.groups = tuple(map(tuple, hosts.values()))
            if self._crosses_sockets():  # pieces of another size
                native.close()
                native = NativeRuntime(self.rank, self.size, timeout.total_seconds(), MESSAGE_SLOT_BYTES)
                for word, more in zip(words, meeting.exchange({"address": native.address()}), strict=True):
                    word.update(more)
            trouble = self._attach(native, words, door, timeout.total_seconds())
            pulls = trouble or native.why_no_single_copy()
            answers = meeting.exchange({"trouble": trouble, "pulls": pulls})
            said = [word["trouble"] for word in answers]
            found = [f"{words[rank]['name']}: {what}" for rank, what in enumerate(said) if what]
            if not found:
                native.single_copy = next((word["pulls"] for word in answers if word["pulls"]), "")
                if native.single_copy and env.get("DTCOMM_SINGLE_COPY") == "on":
                    raise DtcommError(f"DTCOMM_SINGLE_COPY=on, but {native.single_copy}")
                self.runtime = native
                self.why = self._how()
            elif forced := _forced():
                raise DtcommError(f"{forced}, but {found[0]}")
            else:
                self.why = found[0]
        finally:
            if door is not None:
                door.close()
            if self.runtime is None:
                native.close()
        meeting.close()
        if self.runtime is None:
            from dtcomm.runtime.torchdist.host_runtime import ProcessGroupRuntime

            private = self._private_group()
            blames = c10d.PrefixStore(f"dtcomm/{PROTOCOL}/{epoch}", store)
            self.runtime = ProcessGroupRuntime(
                private, self.names, timeout.total_seconds(), blames, self._wires(links)
            )

    def _crosses_sockets(self) -> bool:
        """Whether some ranks are to reach others through sockets: the same answer on all."""
        if env.get("DTCOMM_RUNTIME") == "process_group":
            return False
        return self._hosts > 1 or env.get("DTCOMM_TRANSPORT") == "sockets"

    def _attach(
        self, native: NativeRuntime, words: Sequence[dict[str, Any]], door: Listener | None, timeout_s: float
    ) -> str:
        """What keeps the engine from serving the ranks; empty where nothing does."""
        if env.get("DTCOMM_RUNTIME") == "process_group":
            return "DTCOMM_RUNTIME=process_group"
        inside = next(group for group in self.groups if self.rank in group)
        near = () if env.get("DTCOMM_TRANSPORT") == "sockets" else inside
        far = {
            rank: word["door"] for rank, word in enumerate(words) if rank != self.rank and rank not in near
        }
        if self._hosts > 1 and env.get("DTCOMM_TRANSPORT") == "memory":
            return f"the ranks are on {self._hosts} hosts"
        if far and dispatch.current() == "reference":
            return "the reference kernels are in force, which the engine does not run"
        sockets: dict[int, int] = {}
        try:
            if far:
                for rank, word in [(self.rank, words[self.rank]["door"]), *far.items()]:
                    if "closed" in word:
                        return f"{words[rank]['name']} cannot be connected to: {word['closed']}"
                assert door is not None
                sockets = door.connect(self.rank, far, self.names, timeout_s)
            cores = len(set[int]().union(*(words[rank]["cores"] for rank in inside)))
            native.attach(
                [word["address"] for word in words], self.names, cores=cores, sockets=sockets, inside=inside
            )
        except (OSError, RuntimeError) as error:
            return f"cannot {'connect to' if far and not sockets else 'map the memory of'} a peer: {error}"
        return ""

    def _how(self) -> str:
        assert self.runtime is not None
        transport = self.runtime.info()["transport"]
        if transport == "memory":
            return "all ranks share this host's memory"
        if self._hosts > 1:
            return f"the ranks are on {self._hosts} hosts: {transport}"
        return f"DTCOMM_TRANSPORT={env.get('DTCOMM_TRANSPORT')}"

    def _wires(self, links: emulated_link.Links) -> list[Wire | None]:
        """The emulated link to each rank."""
        inside = next(group for group in self.groups if self.rank in group)
        wires: list[Wire | None] = []
        for rank in range(self.size):
            level = 0 if rank in inside else 1
            found = links.between if level else links.inside
            wires.append(None if found is None or rank == self.rank else Wire(_C.Nic(level), found))
        return wires

    def _private_group(self) -> Any:
        """A group of our own over the same ranks: our messages never mix with the user's."""
        group = self._group
        if dist.get_backend(group) in ("gloo", "dtcomm"):
            # Past torch's registry: pairs are made in threads, several at once, and a second group of the same
            # ranks would get the first one's name and read its addresses.
            return self._private_backend("gloo")
        made: dist.ProcessGroup = dist.new_group(
            self.ranks,
            timeout=self._timeout,
            backend=dist.get_backend(group),
            use_local_synchronization=True,
            group_desc="dtcomm",
        )
        return made

    def _private_backend(self, name: str) -> Any:
        """The same as a backend by itself: ``gloo``, or ``nccl``."""
        store = c10d.PrefixStore(f"dtcomm/{PROTOCOL}/{self._epoch}/{name}", self._store)
        if name == "gloo":
            return dist.ProcessGroupGloo(store, self.rank, self.size, self._timeout)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = self._timeout
        options.is_high_priority_stream = False
        return dist.ProcessGroupNCCL(store, self.rank, self.size, options)


def _door() -> tuple[Listener | None, str]:
    """Where ranks of other hosts connect to, or why they cannot."""
    if env.get("DTCOMM_RUNTIME") == "process_group" or env.get("DTCOMM_TRANSPORT") == "memory":
        return None, "its variables say so"
    try:
        return Listener(), ""
    except OSError as error:
        return None, str(error)


def _forced() -> str:
    """The variable that rules the group's own backend out; empty where none does."""
    for name, choices in (("DTCOMM_RUNTIME", ("native",)), ("DTCOMM_TRANSPORT", ("memory", "sockets"))):
        if env.get(name) in choices and env.get("DTCOMM_RUNTIME") != "process_group":
            return f"{name}={env.get(name)}"
    return ""
