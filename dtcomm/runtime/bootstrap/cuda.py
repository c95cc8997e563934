"""How ranks join that bring CUDA tensors: what the group moves bytes of a device with, and what serves them."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from dtcomm import _C, env
from dtcomm.device.streams import Streams, streams_of
from dtcomm.errors import CollectiveMismatch, DtcommError
from dtcomm.kernels import dispatch
from dtcomm.runtime.bootstrap.cpu import PROTOCOL, CpuBootstrap
from dtcomm.runtime.bootstrap.gpu_topology import describe, why_not_peers
from dtcomm.runtime.bootstrap.store_exchange import StoreExchange, host_id, require_equal
from dtcomm.runtime.cuda_peer.launch import FusedRanks, launcher_of, room_of
from dtcomm.runtime.cuda_peer.memory import reach
from dtcomm.runtime.cuda_peer.runtime import PeerRuntime
from dtcomm.runtime.torchdist.host_runtime import ProcessGroupRuntime
from dtcomm.runtime.torchdist.stream_runtime import StreamRuntime
from dtcomm.runtime.torchdist.transport import GroupExchange
from dtcomm.runtime.types import Runtime


class CudaBootstrap(CpuBootstrap):
    """As :class:`CpuBootstrap`, for tensors on ``device``.

    A group that has NCCL for the device gets a NCCL group of its own, whose work is queued on streams; any other one
    sends messages of Gloo through the host's memory. Where all ranks reach each other's memory, fused kernels over that
    serve what they can, and the group the rest.
    """

    def __init__(
        self,
        device: torch.device,
        rank: int,
        ranks: list[int],
        group: dist.ProcessGroup,
        epoch: int | str,
        store: c10d.Store | None = None,
    ) -> None:
        super().__init__(rank, ranks, group, epoch, store)
        self._device = device
        self._pair = store is not None  # two ranks that send and receive

    def meet(self) -> None:
        """With all ranks. DtcommError where they differ, or where what a variable asks for cannot be had."""
        chosen = env.get("DTCOMM_RUNTIME")
        if chosen == "native":
            raise DtcommError(
                f"DTCOMM_RUNTIME=native: the engine moves CPU tensors; this one is on {self._device}"
            )
        if env.get("DTCOMM_LINK"):
            raise DtcommError(f"DTCOMM_LINK: emulated links carry CPU tensors; this one is on {self._device}")
        meeting = StoreExchange(
            self._store, f"dtcomm/{PROTOCOL}/{self._epoch}", self.rank, self.ranks, self._timeout
        )
        backend = backend_of(self._group, self._device)
        words = meeting.exchange(
            {
                "name": f"rank {self.ranks[self.rank]} (host {socket.gethostname()}, pid {os.getpid()})",
                "host": host_id(),
                "protocol": PROTOCOL,
                "variables": env.shared(),
                "backend": backend,
                "seat": describe(self._device),
                "factors": dispatch.low_rank_backend(),
            }
        )
        for key, what in (
            ("protocol", "the version of dtcomm"),
            ("variables", "DTCOMM_ variables"),
            ("backend", f"the group's backend for {self._device.type}"),
            # Each rank makes PowerSGD's factors orthonormal for itself, so all have to do it to the same bits.
            ("factors", "what serves factors of low rank: cuda where dtcomm._cuda is built, else torch"),
        ):
            require_equal(words, key, what)
        self.names = [word["name"] for word in words]
        hosts: dict[str, list[int]] = {}
        for rank, word in enumerate(words):
            hosts.setdefault(word["host"], []).append(rank)
        self.groups = tuple(map(tuple, hosts.values()))
        self._serve(meeting, words, backend)
        meeting.close()

    def _serve(self, meeting: StoreExchange, words: Sequence[dict[str, Any]], backend: str) -> None:
        streams = streams_of(self._device)
        below = self._below(streams, backend)
        self.runtime, self.why = below, f"the group has {backend} for {self._device.type}"
        forced = env.get("DTCOMM_RUNTIME") == "peer"
        if env.get("DTCOMM_RUNTIME") == "process_group":
            return
        if self._pair and not forced:  # memory that no call of theirs would use
            self.why += "; send and recv have no fused kernels"
            return
        made, reason = None, why_not_peers([word["seat"] for word in words], self.groups, forced)
        if not reason:
            room = room_of([word["seat"] for word in words])
            size, ids = _C.fused_bytes(self.size, room), [word["seat"]["id"] for word in words]
            made, reason = reach(meeting, self.names, self._group, self._device, size, self.rank, ids)
        if made is not None:
            pads = [made.own[_C.MISSING_OFFSET :][:4].view(torch.int32)]
            budget = int(self._timeout.total_seconds() * 1e9)
            launcher = launcher_of(self._device)
            fused = FusedRanks(launcher, room, made.addresses, pads, self.rank, 1, budget)
            self.runtime = PeerRuntime(fused, streams, below, self.names, made.kind, made, forced)
            self.why = "all ranks reach each other's memory" + (f"; no {reason}" if reason else "")
        elif forced:
            below.close()
            self.runtime = None
            raise DtcommError(f"DTCOMM_RUNTIME=peer, but {reason}")
        else:
            self.why += f"; no fused kernels: {reason}"

    def _below(self, streams: Streams, backend: str) -> Runtime[Any]:
        """What the group's own backend serves."""
        if backend == "nccl":
            exchange = GroupExchange(self._private_backend("nccl"), "nccl", self._device)
            compare = self._compare if env.get("DTCOMM_CHECK") == "1" else None
            return StreamRuntime(exchange, streams, self.rank, exchange.close, compare=compare)
        blames = c10d.PrefixStore(f"dtcomm/{PROTOCOL}/{self._epoch}", self._store)
        gloo, timeout_s = self._private_backend("gloo"), self._timeout.total_seconds()
        return ProcessGroupRuntime(gloo, self.names, timeout_s, blames, streams=streams)

    def _compare(self, text: str) -> None:
        """What this rank is about to do, with all others, by way of the store."""
        number, _, what = text.partition(": ")
        prefix = f"dtcomm/{PROTOCOL}/{self._epoch}/{number.replace(' ', '')}"
        meeting = StoreExchange(self._store, prefix, self.rank, self.ranks, self._timeout)
        said = [word["said"] for word in meeting.exchange({"said": what})]
        meeting.close()
        if len(set(said)) > 1:
            listing = "; ".join(
                f"{name}: {number}: {word}" for name, word in zip(self.names, said, strict=True)
            )
            raise CollectiveMismatch(f"ranks disagree on what they do: {listing}")


def backend_of(group: dist.ProcessGroup, device: torch.device) -> str:
    """What the group moves tensors of ``device`` with: nccl, gloo, or another backend's name.

    ValueError where it has none for them.
    """
    if dist.get_backend(group) == "dtcomm":  # which hands devices to NCCL where torch has it
        return "nccl" if dist.is_nccl_available() else "gloo"
    try:
        return str(group._get_backend(device).name()).lower()
    except RuntimeError:
        raise ValueError(
            f"group: its backend, {dist.get_backend(group)}, moves no tensors of {device.type}; make the group with "
            'backend "cpu:gloo,cuda:nccl", "nccl" or "gloo"'
        ) from None
