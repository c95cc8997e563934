"""Files of versions: stores where each is written whole, and their index, which is written last."""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from dtcomm.errors import DtcommError, PayloadCorrupt
from dtcomm.runtime.bootstrap.tcp import prove
from dtcomm.system import write_file

INDEX = "index.json"
NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,199}")
Files = Iterator[tuple[str, bytearray]]  # by name


class MissingFile(DtcommError):
    """A store has no such file: it never had, or the version is so old that it was deleted."""


@dataclass(frozen=True)
class Release:
    """One way to a version: from the version before, or as whole weights.

    Attributes:
        version: The version.
        base: The version that the patches are applied to; None: whole weights.
        parts: Name and bytes of each patch.
    """

    version: int
    base: int | None
    parts: tuple[tuple[str, int], ...]

    @property
    def size(self) -> int:
        """Bytes of all patches."""
        return sum(size for _, size in self.parts)


class Index(NamedTuple):
    """What a store holds: what was published, and the parts so far of what is being published."""

    releases: tuple[Release, ...] = ()
    opened: Release | None = None

    @classmethod
    def read(cls, data: bytes) -> Index:
        """Return the index of these bytes, an empty one of none; PayloadCorrupt if it is not valid."""
        try:
            listed = json.loads(data) if data else {"releases": []}
            every = [
                Release(version, base, tuple((name, size) for name, size in parts))
                for version, base, parts in [*listed["releases"], *listed.get("open", ())]
            ]
            numbers = [
                n for each in every for n in (each.version, each.base or 0, *(n for _, n in each.parts))
            ]
            names = [name for each in every for name, _ in each.parts]
            is_number = all(type(n) is int and n >= 0 for n in numbers)
            if (
                is_number
                and all(map(NAME.fullmatch, names))
                and all(n for each in every for _, n in each.parts)
            ):
                count = len(listed["releases"])
                return cls(tuple(every[:count]), every[count] if len(every) > count else None)
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
            pass
        raise PayloadCorrupt("the index of versions is not valid")

    def write(self) -> bytes:
        """Return the bytes of the index."""
        listed = [[each.version, each.base, each.parts] for each in self.releases]
        opened = {} if self.opened is None else {"open": [[*vars(self.opened).values()]]}
        return json.dumps({"format": 1, "releases": listed, **opened}).encode()

    @property
    def token(self) -> str:
        """Stands for what was published, in requests."""
        return prove(b"", Index(self.releases).write())[:8].hex()

    @property
    def newest(self) -> int:
        """The newest version; -1 if there is none."""
        return max((each.version for each in self.releases), default=-1)


def route(releases: Sequence[Release], version: int | None) -> list[Release]:
    """Return what leads from a version, None: an unknown one, to the newest in the fewest bytes."""
    goal = Index(tuple(releases)).newest
    after = {each.base: each for each in releases if each.base is not None}
    routes = []
    for first in [None, *(each for each in releases if each.base is None)]:
        chain, at = ([], version) if first is None else ([first], first.version)
        while at != goal and at in after:
            chain.append(after[at])
            at = chain[-1].version
        if at == goal:
            routes.append(chain)
    return min(routes, key=lambda chain: sum(each.size for each in chain), default=[])


class Store:
    """Files by name; what a publisher writes to and a subscriber reads. This one is in the memory of its process."""

    poll_s = 0.005  # between two looks at the index

    def __init__(self) -> None:
        self._files: dict[str, bytes] = {}

    def put(self, name: str, data: bytes) -> None:
        """Write a file whole: readers see nothing or all of it."""
        self._files[name] = data

    def get(self, name: str, offset: int = 0, size: int = -1) -> bytearray:
        """Return ``size`` bytes from ``offset`` on, all if it is negative; raises MissingFile."""
        if name not in self._files:
            raise MissingFile(f"no file {name}")
        return bytearray(memoryview(self._files[name])[offset:][: None if size < 0 else size])

    def list(self) -> list[str]:
        """Return the names of all files."""
        return list(self._files)

    def delete(self, name: str) -> None:
        """Delete a file, if it is there."""
        self._files.pop(name, None)

    def index(self) -> bytes:
        """Return the index, empty if there is none; the same object if it has not changed."""
        return self._files.get(INDEX, b"")

    def fetch(self, files: Iterable[tuple[str, int]]) -> Files:
        """Yield files, given by name and bytes, in any order; raises MissingFile."""
        for name, size in files:
            yield name, self.get(name, 0, size)

    def follow(self, seen: Index, wait_s: float) -> Files:
        """Yield each part of what is published behind an index as soon as it is there, and the new index at the end.

        It ends without an index after ``wait_s`` seconds without a part.
        """
        deadline, had = time.monotonic() + wait_s, set[str]()
        while True:
            index = Index.read(data := self.index())
            if index.releases != seen.releases:
                yield INDEX, bytearray(data)
                return
            for name, size in index.opened.parts if index.opened else ():
                if name not in had:
                    had.add(name)
                    yield name, self.get(name, 0, size)
                    deadline = time.monotonic() + wait_s
            if time.monotonic() >= deadline:
                return
            time.sleep(self.poll_s)

    def close(self) -> None:
        """End its connections, if it has any."""


class DirectoryStore(Store):
    """A store in a folder, which several hosts may share.

    Args:
        path: The folder; it is made if it is not there.
    """

    poll_s = 0.02

    def __init__(self, path: str | Path) -> None:
        self._path, self._seen = Path(path), ((0, 0, 0), b"")
        self._path.mkdir(parents=True, exist_ok=True)

    def put(self, name: str, data: bytes) -> None:
        write_file(self._path / name, data)

    def get(self, name: str, offset: int = 0, size: int = -1) -> bytearray:
        try:
            with open(self._path / name, "rb") as file:
                length = max(0, file.seek(0, 2) - offset)
                data = bytearray(length if size < 0 else min(size, length))
                file.seek(offset)
                return data[: file.readinto(data)]
        except FileNotFoundError:
            raise MissingFile(f"no file {name} in {self._path}") from None

    def index(self) -> bytes:
        with contextlib.suppress(FileNotFoundError), open(self._path / INDEX, "rb") as file:
            state = os.fstat(file.fileno())
            identity = state.st_ino, state.st_mtime_ns, state.st_size
            if identity != self._seen[0]:
                self._seen = identity, file.read()
            return self._seen[1]
        return b""

    def list(self) -> list[str]:
        return [path.name for path in self._path.iterdir() if NAME.fullmatch(path.name)]

    def delete(self, name: str) -> None:
        (self._path / name).unlink(missing_ok=True)


class ObjectStore(Store):
    """A store that fsspec reaches, such as ``s3://bucket/folder``.

    Args:
        url: The folder.
    """

    poll_s = 0.1

    def __init__(self, url: str) -> None:
        import fsspec

        self._fs, self._path = fsspec.core.url_to_fs(url)
        self._fs.makedirs(self._path, exist_ok=True)

    def put(self, name: str, data: bytes) -> None:
        self._fs.pipe_file(f"{self._path}/{name}", data)

    def get(self, name: str, offset: int = 0, size: int = -1) -> bytearray:
        try:
            end = None if size < 0 else offset + size
            return bytearray(self._fs.cat_file(f"{self._path}/{name}", start=offset, end=end))
        except FileNotFoundError:
            raise MissingFile(f"no file {name} in {self._path}") from None

    def index(self) -> bytes:
        with contextlib.suppress(MissingFile):
            return bytes(self.get(INDEX))
        return b""

    def list(self) -> list[str]:
        self._fs.invalidate_cache()
        return [path.rpartition("/")[2] for path in self._fs.ls(self._path, detail=False)]

    def delete(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(f"{self._path}/{name}")
