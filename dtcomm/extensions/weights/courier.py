"""A trainer publishes versions of its weights, and engines follow them."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from dtcomm.arguments import require_int
from dtcomm.cli import show_progress
from dtcomm.errors import CollectiveTimeout, DtcommError, PayloadCorrupt
from dtcomm.extensions.weights.files import INDEX, Files, Index, MissingFile, Release, Store, route
from dtcomm.extensions.weights.patch import HEAD_BYTES, Patch, PatchRefused, Weights, diff
from dtcomm.extensions.weights.slices import Slice, State, checksum, on_cpu, slices_of
from dtcomm.extensions.weights.store import Server, open_store

# A version is divided into up to this many parts, so that they are encoded, sent and received at one time.
_PARTS, _LEAST_PART = 64, 2 << 20
_POLL_SECONDS = 0.05


class _Reports:
    _report: dict[str, Any]

    def report(self) -> dict[str, Any]:
        """Return the figures of the last call, of all ranks: bytes, share changed, bits per change, seconds."""
        return dict(self._report)

    def log(self, logger: Callable[[dict[str, float]], object]) -> None:
        """Pass the figures to ``logger``, such as ``wandb.log``, by names that begin with ``weights/``."""
        logger({f"weights/{name}": float(value) for name, value in self._report.items()})


class Publisher(_Reports):
    """Publishes the weights of a trainer: a version is what changed since the one before, and sometimes all of it.

    Each rank of the group publishes its own shards; no rank gathers the model. What several ranks hold is published
    by the first of them. A publisher keeps one copy of its shards in host memory. One that begins, and one whose last
    `publish` failed, publishes whole weights.

    Args:
        weights: A module, whose state dict is published, or tensors by name; DTensors and `Slice` are shards.
        store: A folder or URL of fsspec, which all ranks reach; None: this process's memory, for one rank.
        listen: ``host:port`` at which the first rank serves the store over TCP; None: nowhere.
        model: A name of the model, which patches carry.
        dtype: Floating-point weights are published in this dtype, such as ``torch.bfloat16``; None: their own.
        anchor_every: Each so many versions are published whole, too, for receivers that come late.
        keep: How many of these whole versions stay, and the changes since the first of them.
        group: The ranks of the trainer; None: all, or this process alone where torch.distributed is not used.
        part_bytes: Bytes of weights in one patch at most. Patches are sent while the next ones are encoded.
        threads: Threads that encode; 0: as many as torch uses.
        progress: Whether to show a line of progress on a terminal.
    """

    def __init__(
        self,
        weights: nn.Module | State,
        store: str | Path | Store | None = None,
        *,
        listen: str | None = None,
        model: str = "",
        dtype: torch.dtype | None = None,
        anchor_every: int = 50,
        keep: int = 2,
        group: dist.ProcessGroup | None = None,
        part_bytes: int = 256 << 20,
        threads: int = 0,
        progress: bool = False,
    ) -> None:
        for name, value in (("anchor_every", anchor_every), ("keep", keep), ("part_bytes", part_bytes)):
            require_int(name, value, 1)
        is_one_of_many = dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1
        self._rank = dist.get_rank(group) if is_one_of_many else 0
        self._group, self._is_one_of_many = group, is_one_of_many
        if store is None and (is_one_of_many or listen is None):
            raise ValueError(
                "store=None: expected a folder or URL; only a single rank with listen= needs none"
            )
        self._weights, self._model, self._dtype, self._threads = weights, model, dtype, threads
        self._store = Store() if store is None else open_store(store)
        self._anchor_every, self._keep, self._part_bytes = anchor_every, keep, part_bytes
        self._shows = progress
        self._old: dict[str, Slice] | None = None  # what was published last, by this rank
        self._sums: dict[str, int] = {}
        self._since_anchor, self._report = 0, {}
        self.version = Index.read(self._store.index()).newest
        self._owned = self._find_owned()
        self._server = Server(self._store, listen) if listen is not None and self._rank == 0 else None

    @property
    def address(self) -> str:
        """``host:port`` at which this rank serves the store.

        Raises:
            ValueError: It does not serve it: only the first rank of a publisher with ``listen`` does.
        """
        if self._server is None:
            raise ValueError("address: only the first rank of a publisher with listen= serves the store")
        return self._server.address

    def publish(self, version: int | None = None) -> int:
        """Publish the weights as they are now; all ranks call it.

        Args:
            version: Its number, above the last one; None: the next one.

        Returns:
            The version.

        Raises:
            DtcommError: A rank could not; nothing was published, and the next version is whole.
        """
        version = self.version + 1 if version is None else version
        require_int("version", version, self.version + 1)
        begun, olds = time.perf_counter(), self._old
        base = self.version if olds is not None else None
        is_anchor = olds is None or self._since_anchor + 1 >= self._anchor_every
        # Until the version is complete, what this rank holds as the last one may be a mixture.
        self._old, report = None, dict.fromkeys(("bytes", "weights_bytes", "elements", "changed"), 0)
        releases: list[list[tuple[str, int]]] = [[], []]  # changes, whole weights
        error, run, announced = "", os.urandom(4).hex(), 0.0  # a name is not used again after a failure

        def put(number: int, olds: dict[str, Slice] | None, news: dict[str, Slice]) -> None:
            patch = diff(olds, news, base=self.version, version=version, model=self._model, threads=self._threads,
                         checksums=self._sums)  # fmt: skip
            name = f"{version}.{self._rank}.{number}.{run}.{'full' if olds is None else 'delta'}"
            self._store.put(name, patch)
            releases[olds is None].append((name, len(patch)))
            if base is None or olds is not None:
                entries = Patch.read(patch, head_only=True).entries
                report["changed"] += sum(each.changed for each in entries) if olds is not None else 0
                report["bytes"] += len(patch)

        try:
            before = Index.read(self._store.index()).releases
            news = {name: part for name, part in self._slices().items() if name in self._owned}
            kept, parts = {} if olds is None else olds, list(self._parts(news))
            for number, names in enumerate(parts):
                show_progress(f"version {version}: part {number + 1}") if self._shows else None
                part = {name: self._cast(news[name]) for name in names}
                put(number, None if olds is None else {name: olds[name] for name in names}, part)
                if self._rank == 0 and time.monotonic() >= announced + self._store.poll_s:
                    opened = Release(version, base, tuple(releases[base is None]))
                    self._store.put(INDEX, Index(before, opened).write())
                    announced = time.monotonic()
                for name, each in part.items():
                    if name in kept:
                        kept[name].tensor.copy_(each.tensor)
                    else:
                        kept[name] = each._replace(tensor=each.tensor.clone())
                    report["elements"] += each.tensor.numel()
                    report["weights_bytes"] += each.tensor.nbytes
            for number, names in enumerate(parts if is_anchor and olds is not None else ()):
                put(number, None, {name: kept[name] for name in names})
        except (DtcommError, OSError, ValueError, RuntimeError) as caught:
            if not self._is_one_of_many:
                raise
            error = f"rank {self._rank}: {caught}"
        gathered = self._gather((error, releases, report))
        if errors := [each[0] for each in gathered if each[0]]:
            raise DtcommError(f"version {version} was not published: {'; '.join(errors)}")
        if self._rank == 0:
            self._write_index(version, base, before, [each[1] for each in gathered])
        self._gather(None)  # the index is there when the call returns
        show_progress() if self._shows else None
        self._old, self.version = kept, version
        self._since_anchor = 0 if is_anchor else self._since_anchor + 1
        totals = {key: sum(each[2][key] for each in gathered) for key in report}
        self._report = {
            "version": version,
            **totals,
            **_ratios(totals),
            "diff_s": time.perf_counter() - begun,
        }
        return version

    def close(self) -> None:
        """Stop serving."""
        if self._server is not None:
            self._server.close()

    def _slices(self) -> dict[str, Slice]:
        state = self._weights.state_dict() if isinstance(self._weights, nn.Module) else self._weights
        return slices_of(state)

    def _cast(self, part: Slice) -> Slice:
        tensor = part.tensor
        if self._dtype is not None and tensor.is_floating_point():
            tensor = tensor.to(self._dtype)
        return part._replace(tensor=on_cpu(tensor))

    def _parts(self, slices: Mapping[str, Slice]) -> Iterator[list[str]]:
        whole = sum(part.tensor.nbytes for part in slices.values())
        most = min(self._part_bytes, max(_LEAST_PART, whole // _PARTS))
        names: list[str] = []
        size = 0
        for name, part in slices.items():
            if names and size + part.tensor.nbytes > most:
                yield names
                names, size = [], 0
            names.append(name)
            size += part.tensor.nbytes
        if names:
            yield names

    def _find_owned(self) -> set[str]:
        """Return the names that this rank publishes: what several ranks hold belongs to the first of them."""
        slices = self._slices()
        if not self._is_one_of_many:
            return set(slices)
        held = {
            name: (part.offset, tuple(part.tensor.shape), checksum(on_cpu(part.tensor)))
            for name, part in slices.items()
        }
        owned = set(slices)
        for rank, others in enumerate(self._gather(held)[: self._rank]):
            for name in owned & others.keys():
                if others[name][:2] == held[name][:2]:
                    owned.discard(name)
                    if others[name] != held[name]:
                        raise ValueError(
                            f"tensor {name!r}: ranks {rank} and {self._rank} hold other values of it; where each holds"
                            " a shard, give a DTensor or a Slice"
                        )
        return owned

    def _gather(self, value: Any) -> list[Any]:
        if not self._is_one_of_many:
            return [value]
        values: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(values, value, group=self._group)
        return values

    def _write_index(
        self,
        version: int,
        base: int | None,
        before: tuple[Release, ...],
        of_ranks: list[list[list[tuple[str, int]]]],
    ) -> None:
        """Add a version to the index, delete what no receiver needs any more, and what no index names."""
        releases = list(before)
        for kind, its_base in enumerate((base, None)):
            if parts := tuple(part for of_rank in of_ranks for part in of_rank[kind]):
                releases.append(Release(version, its_base, parts))
        anchors = sorted(each.version for each in releases if each.base is None)
        oldest = anchors[-self._keep :][0]
        kept = [each for each in releases if (each.version if each.base is None else each.base) >= oldest]
        self._store.put(INDEX, Index(tuple(kept)).write())
        named = {name for each in kept for name, _ in each.parts}
        for name in {name for each in before for name, _ in each.parts} - named:
            self._store.delete(name)


class Subscriber(_Reports):
    """Keeps the weights of an engine at the newest version.

    Args:
        weights: The engine's weights: a module, or tensors by name; see `Weights`. They are changed in place. Or
            `Weights`, such as `Resharded`; then ``version``, ``buffers`` and ``model`` are not used.
        source: Where versions come from: a folder, a URL of fsspec, or ``tcp://host:port`` of a publisher or relay.
        version: The version of the weights, if it is known. Else they are compared with the newest versions, and
            received whole if they equal none.
        buffers: 1: a version is decoded in place during the pause; 2: before it, into a second buffer.
        model: The name of the model; empty: any.
        connections: TCP connections that carry a version.
        timeout_s: Seconds without any progress after which `update` raises.
        pause: Called before weights change; returns a context manager that is left after it, such as one that stops
            and resumes the engine.
        progress: Whether to show a line of progress on a terminal.
    """

    def __init__(
        self,
        weights: nn.Module | State | Weights,
        source: str | Path | Store,
        *,
        version: int | None = None,
        buffers: int = 1,
        model: str = "",
        connections: int = 4,
        timeout_s: float = 60.0,
        pause: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
        progress: bool = False,
    ) -> None:
        if isinstance(weights, Weights):
            self.weights = weights
        else:
            state = weights.state_dict() if isinstance(weights, nn.Module) else weights
            self.weights = Weights(state, version=version, buffers=buffers, model=model)
        self._source = open_store(source, connections=connections, timeout_s=timeout_s)
        self._timeout_s, self._pause, self._shows = timeout_s, pause, progress
        self._ahead: dict[str, Patch] = {}  # parts of a version that is not complete, and what they take
        self._totals, self._seconds, self._report = dict[str, int](), dict[str, float](), {}

    @property
    def version(self) -> int | None:
        """The version of the weights; None if it is not known."""
        return self.weights.version

    def update(self, *, at_least: int | None = None, timeout_s: float | None = None) -> int | None:
        """Receive and apply all versions up to the newest one.

        Args:
            at_least: Wait for this version. Default None: wait for none.
            timeout_s: Seconds to wait for it; None: those of the subscriber.

        Returns:
            The version of the weights; None if nothing was published yet.

        Raises:
            CollectiveTimeout: The version did not come in time.
            PeerLost: The server cannot be reached.
            PatchRefused, PayloadCorrupt: A version does not fit these weights or is damaged; nothing was changed.
        """
        deadline = time.monotonic() + (self._timeout_s if timeout_s is None else timeout_s)
        if self.weights.interrupted is not None:
            self.weights.commit(self.weights.interrupted)
        self._ahead, self._totals = {}, dict.fromkeys(("bytes", "weights_bytes", "elements", "changed"), 0)
        self._seconds = dict.fromkeys(("receive_s", "check_s", "pause_s"), 0.0)
        index = Index.read(self._source.index())
        while True:
            try:
                if self.version is None and index.releases:
                    self._adopt(index.releases)
                for release in route(index.releases, self.version):
                    self._apply(release)
                if at_least is None or (self.version is not None and self.version >= at_least):
                    break
                if (left := deadline - time.monotonic()) <= 0:
                    raise CollectiveTimeout(
                        f"version {at_least} was not published in time; the newest is {self.version}"
                    )
                index = self._receive(self._source.follow(index, left), follows=True) or index
            except MissingFile:  # it was deleted after the index was read
                if time.monotonic() >= deadline:
                    raise
                time.sleep(_POLL_SECONDS)
                self._ahead, index = {}, Index.read(self._source.index())
        version = -1 if self.version is None else self.version
        self._report = {"version": version, **self._totals, **_ratios(self._totals), **self._seconds}
        return self.version

    def close(self) -> None:
        """End the connections."""
        self._source.close()

    def _adopt(self, releases: tuple[Release, ...]) -> None:
        """Take the number of a version that the weights have already, by its checksums alone."""
        for release in sorted(releases, key=lambda each: (each.version, each.base is None), reverse=True):
            starts = self._source.fetch((name, HEAD_BYTES) for name, _ in release.parts)
            sizes = [(name, HEAD_BYTES + int.from_bytes(start[8:12], "little")) for name, start in starts]
            if self.weights.adopt(
                [Patch.read(head, head_only=True) for _, head in self._source.fetch(sizes)]
            ):
                return

    def _apply(self, release: Release) -> None:
        if self._shows:
            show_progress(f"version {release.version}: {release.size / 1e6:.0f} MB")
        ahead = {name: len(patch.data) for name, patch in self._ahead.items()}
        self._receive(self._source.fetch(part for part in release.parts if ahead.get(part[0]) != part[1]))
        show_progress() if self._shows else None
        received = time.perf_counter()
        prepared = self.weights.prepare([self._ahead[name] for name, _ in release.parts])
        self._seconds["check_s"] += time.perf_counter() - received
        with self._pause():
            before = time.perf_counter()
            self.weights.commit(prepared)
            self._seconds["pause_s"] += time.perf_counter() - before
        self._ahead = {}
        self._totals["bytes"] += release.size
        for entry in (entry for patch in prepared.patches for entry in patch.entries):
            self._totals["elements"] += entry.numel
            self._totals["weights_bytes"] += entry.numel * getattr(torch, entry.dtype).itemsize
            self._totals["changed"] += entry.changed if release.base is not None else 0

    def _receive(self, files: Files, *, follows: bool = False) -> Index | None:
        """Check patches while others are received, and return the index if one comes.

        What follows an index is not published yet: if it is wrong, it is received again once it is.
        """
        begun = None if follows else time.perf_counter()
        for name, data in files:
            now = time.perf_counter()
            self._seconds["receive_s"] += now - (begun or now)
            if name == INDEX:
                return Index.read(bytes(data))
            with contextlib.suppress(*((PatchRefused, PayloadCorrupt) if follows else ())):
                patch = Patch.read(data)
                self.weights.check(patch)
                self._ahead[name] = patch
            begun = time.perf_counter()
            self._seconds["check_s"] += begun - now
        return None


def _ratios(totals: Mapping[str, int]) -> dict[str, float]:
    changed, elements = totals["changed"], totals["elements"]
    return {
        "share_changed": changed / elements if elements else 0.0,
        "bits_per_changed": totals["bytes"] * 8 / changed if changed else 0.0,
    }
