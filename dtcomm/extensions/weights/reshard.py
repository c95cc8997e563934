"""Weights of a trainer in the layout of an engine: merged, split over ranks, transposed, tied or padded.

`plan` says which box of which published tensor fills which box of which parameter. `Resharded` keeps this rank's part
of the trainer's weights in host memory, where patches are applied, and copies changed shards into the parameters.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dtcomm.extensions.weights.files import Index
from dtcomm.extensions.weights.patch import HEAD_BYTES, Patch, Prepared, Slice, Weights
from dtcomm.extensions.weights.store import MissingFile, RemoteStore, Store, open_store


class Part(NamedTuple):
    """One of the published tensors of which an engine's parameter consists.

    Attributes:
        name: The published name.
        dim: The dimension of the parameter that the engine's ranks split, and along which its parts follow each other.
            None: each rank holds the whole part, and parts follow each other along dimension 0.
        transposed: Whether the parameter holds the transpose of the published matrix.
        span: First index and end along ``dim`` of what belongs to the part; None: all.
        copies: How many neighbouring ranks hold the same share, such as key heads that are fewer than ranks.
        padded: The size along ``dim`` after padding, such as that of a vocabulary; 0: it is not padded.
    """

    name: str
    dim: int | None = 0
    transposed: bool = False
    span: tuple[int, int] | None = None
    copies: int = 1
    padded: int = 0


class Piece(NamedTuple):
    """A box of a published tensor, and where it lies in a parameter of this rank.

    Attributes:
        source: The published name.
        begin: Where the box begins in the whole published tensor.
        shape: The shape of the box.
        target: The name of the parameter.
        at: Where the box, transposed if need be, begins in the parameter.
        transposed: Whether the parameter holds the transpose.
    """

    source: str
    begin: tuple[int, ...]
    shape: tuple[int, ...]
    target: str
    at: tuple[int, ...]
    transposed: bool = False

    def within(self, begin: Sequence[int], shape: Sequence[int]) -> Piece | None:
        """Return what the piece shares with a shard of the published tensor; None if nothing."""
        first = tuple(map(max, self.begin, begin))
        mine, its = (map(sum, zip(*box)) for box in ((self.begin, self.shape), (begin, shape)))
        size = tuple(min(one, other) - start for one, other, start in zip(mine, its, first))
        moved = tuple(start - origin for start, origin in zip(first, self.begin))
        moved = moved[::-1] if self.transposed else moved
        at = tuple(map(sum, zip(self.at, moved)))
        return self._replace(begin=first, shape=size, at=at) if all(n > 0 for n in size) else None


def plan(
    published: Mapping[str, Tensor],
    parameters: Mapping[str, Tensor],
    layout: Mapping[str, Sequence[Part]] | None = None,
    *,
    rank: int = 0,
    ranks: int = 1,
    skip: Sequence[str] = (),
) -> list[Piece]:
    """Return which parts of published tensors fill the parameters of one rank of an engine.

    Args:
        published: The trainer's whole tensors by name; their shapes and dtypes count, so they may be meta tensors.
        parameters: What this rank holds, by name; views are parameters, too, such as the weights of one expert.
        layout: The parts of parameters by name. One that is not named is a published tensor of its own name, whole.
        rank: This rank among those that split parameters.
        ranks: How many they are.
        skip: Patterns, such as ``"*.rotary.*"``, of published names that no parameter needs.

    Returns:
        The pieces, in the order of the parameters.

    Raises:
        ValueError: A name, dtype or shape does not fit; the message names the tensor and its slice.

    Example:
        >>> trainer = {"q": torch.zeros(4, 2), "k": torch.zeros(2, 2)}
        >>> layout = {"qk": (Part("q"), Part("k"))}
        >>> for piece in plan(trainer, {"qk": torch.zeros(3, 2)}, layout, rank=1, ranks=2):
        ...     print(piece.source, piece.begin, piece.shape, piece.at)
        q (2, 0) (2, 2) (0, 0)
        k (1, 0) (1, 2) (2, 0)
    """
    if not 0 <= rank < ranks:
        raise ValueError(f"rank={rank}: expected 0 to {ranks - 1}, below ranks={ranks}")
    layout = layout or {}
    for name in sorted(layout.keys() - parameters.keys()):
        raise ValueError(f"layout: the engine has no parameter {name!r}")
    pieces: list[Piece] = []
    used: set[str] = set()
    for target, parameter in parameters.items():
        filled, axis = 0, 0
        for part in layout.get(target, (Part(target, None),)):
            where = f"parameter {target!r}, part {part}"
            if part.name not in published:
                raise ValueError(f"{where}: no tensor of this name is published")
            source = published[part.name]
            shape = tuple(source.shape[::-1] if part.transposed else source.shape)
            axis = part.dim or 0
            held, begin, size = _share(where, part, shape[axis] if shape else 1, rank, ranks)
            rest = [list(each[:axis]) + list(each[axis + 1 :]) for each in (shape, parameter.shape)]
            if rest[0] != rest[1] or source.dtype != parameter.dtype or len(shape) != parameter.dim():
                raise ValueError(
                    f"{where}: {source.dtype} {list(shape)} is published, and the parameter has {parameter.dtype}"
                    f" {list(parameter.shape)}"
                )
            used.add(part.name)
            if size and source.numel():
                first, extent, at = [0] * len(shape), list(shape), [0] * len(shape)
                if shape:
                    first[axis], extent[axis], at[axis] = begin, size, filled
                step = -1 if part.transposed else 1
                box = tuple(first[::step]), tuple(extent[::step])
                pieces.append(Piece(part.name, *box, target, tuple(at), part.transposed))
            filled += held
        if filled != (parameter.shape[axis] if parameter.dim() else 1):
            raise ValueError(
                f"parameter {target!r}: its parts fill [0:{filled}] of dimension {axis}, of {list(parameter.shape)}"
            )
    for name in sorted(published.keys() - used):
        if not any(fnmatch.fnmatchcase(name, pattern) for pattern in skip):
            raise ValueError(
                f"tensor {name!r} is published, but fills no parameter; name it in layout or skip"
            )
    return pieces


def _share(where: str, part: Part, extent: int, rank: int, ranks: int) -> tuple[int, int, int]:
    """Return the size of this rank's share with padding, where it begins in the published tensor, its size there."""
    begin, end = part.span or (0, extent)
    if not 0 <= begin < end <= extent and extent:
        raise ValueError(f"{where}: [{begin}:{end}] is not inside [0:{extent}]")
    whole = part.padded or end - begin
    if part.copies < 1 or ranks % part.copies:
        raise ValueError(f"{where}: copies={part.copies}: expected a divisor of ranks={ranks}")
    number, groups = (0, 1) if part.dim is None else (rank // part.copies, ranks // part.copies)
    if whole < end - begin or whole % groups:
        raise ValueError(
            f"{where}: {whole} indices cannot hold {end - begin}, or {groups} shares of equal size"
        )
    first = begin + number * (whole // groups)
    return whole // groups, first, max(0, min(first + whole // groups, end) - first)


class Resharded(Weights):
    """The parameters of an engine's rank, which follow a trainer of any layout; pass it to `Subscriber`.

    Patches are applied to a copy in host memory, in the trainer's layout; then the changed shards are copied. It takes
    the memory of the rank's parameters, and of whole shards of the trainer that the rank holds in part. The first
    update receives whole weights.

    Args:
        published: The trainer's whole tensors by name; see `plan` and `published_tensors`.
        parameters: What this rank holds, by name, on any device.
        layout: The parts of parameters by name.
        rank: This rank among those that split parameters.
        ranks: How many they are.
        skip: Patterns of published names that no parameter needs.
        buffers: As of `Weights`.
        model: The name of the model; empty: any.

    Raises:
        ValueError: A name, dtype or shape does not fit; the message names the tensor and its slice.
    """

    def __init__(
        self,
        published: Mapping[str, Tensor],
        parameters: Mapping[str, Tensor],
        layout: Mapping[str, Sequence[Part]] | None = None,
        *,
        rank: int = 0,
        ranks: int = 1,
        skip: Sequence[str] = (),
        buffers: int = 1,
        model: str = "",
    ) -> None:
        self._parameters = {name: parameter.detach() for name, parameter in parameters.items()}
        pieces = plan(published, self._parameters, layout, rank=rank, ranks=ranks, skip=skip)
        self._pieces: dict[str, list[Piece]] = {name: [] for name in published}
        for piece in pieces:
            self._pieces[piece.source].append(piece)
        pin = any(parameter.is_cuda for parameter in self._parameters.values())
        host = {}
        for name, tensor in published.items():
            mine = self._pieces[name]
            begin = tuple(map(min, zip(*(piece.begin for piece in mine)))) if mine else (0,) * tensor.dim()
            ends = [tuple(map(sum, zip(piece.begin, piece.shape))) for piece in mine]
            shape = (
                [max(end) - start for end, start in zip(zip(*ends), begin)] if mine else [0] * tensor.dim()
            )
            part = torch.zeros(shape, dtype=tensor.dtype, pin_memory=pin)
            host[name] = Slice(part, tuple(tensor.shape), begin)
        super().__init__(host, buffers=buffers, model=model)

    def commit(self, prepared: Prepared) -> int:
        version = super().commit(prepared)
        # Until the parameters have the version, too, a repeated call must complete it.
        self.version, self.interrupted = None, prepared
        entries = [entry for patch in prepared.patches for entry in patch.entries if entry.coding != "same"]
        for entry in entries:
            for whole in self._pieces[entry.name]:
                if (piece := whole.within(entry.offset, entry.shape)) is not None:
                    host, _, offset = self.slices[entry.name]
                    source, target = host, self._parameters[piece.target]
                    shape = piece.shape[::-1] if piece.transposed else piece.shape
                    for dim in range(host.dim()):
                        source = source.narrow(dim, piece.begin[dim] - offset[dim], piece.shape[dim])
                        target = target.narrow(dim, piece.at[dim], shape[dim])
                    target.copy_(source.t() if piece.transposed else source)
        self.version, self.interrupted = version, None
        return version

    def adopt(self, heads: Sequence[Patch]) -> bool:
        """Return False: the copy in host memory is filled by whole weights alone."""
        return False


def published_tensors(source: str | Store) -> dict[str, Tensor]:
    """Return the names, shapes and dtypes of what a trainer publishes, as meta tensors.

    Args:
        source: A folder, a URL of fsspec, or ``tcp://host:port``.

    Returns:
        The tensors by name, each with the shape of the whole.

    Raises:
        MissingFile: Nothing was published yet.
    """
    store = open_store(source)
    whole = [each for each in Index.read(store.index()).releases if each.base is None]
    if not whole:
        raise MissingFile(f"source={source!r}: nothing was published yet")
    tensors = {}
    for name, _ in whole[-1].parts:
        size = HEAD_BYTES + int.from_bytes(store.get(name, 0, HEAD_BYTES)[8:12], "little")
        for entry in Patch.read(store.get(name, 0, size), head_only=True).entries:
            dtype = getattr(torch, entry.dtype)
            tensors[entry.name] = torch.empty(entry.full_shape, dtype=dtype, device="meta")
    if isinstance(store, RemoteStore):
        store.close()
    return tensors
