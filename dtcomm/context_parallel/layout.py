"""How a sequence is divided among ranks, and which parts of two ranks' tokens attend to each other.

With n ranks the layouts are

- ``"zigzag"``: the sequence has 2n chunks of equal length, and rank r holds chunks r and 2n - 1 - r. With causal
  attention a chunk's work grows with its position; the two chunks of a rank add up to the same work on all ranks.
- ``"contiguous"``: rank r holds the r-th of n chunks.

A sequence that does not divide is padded at its end. Everything here is a pure function of integers, except `shard` and
`unshard`.
"""

from __future__ import annotations

import logging
from typing import NamedTuple

import torch
import torch.distributed as dist

from dtcomm.arguments import require_int, suggest
from dtcomm.collectives import all_gather
from dtcomm.collectives.groups import GroupOrMesh, process_group_of

LAYOUTS = ("zigzag", "contiguous")

_log = logging.getLogger("dtcomm")
_logged: set[tuple[int, int]] = set()  # (tokens, padded tokens) of the log lines so far


class Visible(NamedTuple):
    """The part of the attention of one rank's queries to another rank's keys that the mask leaves.

    Attributes:
        queries: The rank's queries that see any of these keys, as a slice of its sequence.
        keys: The keys that they see, as a slice of the other rank's sequence.
        causal: Whether query i of the slice sees only the keys up to i; otherwise every query sees every key.
    """

    queries: slice
    keys: slice
    causal: bool


def chunks_of(layout: str, rank: int, ranks: int) -> tuple[int, ...]:
    """Return the numbers of the chunks that a rank holds, in the order of its tokens."""
    return (rank, 2 * ranks - 1 - rank) if layout == "zigzag" else (rank,)


def chunk_count(layout: str, ranks: int) -> int:
    """Return the number of chunks of the whole sequence."""
    return 2 * ranks if layout == "zigzag" else ranks


def valid_tokens(layout: str, rank: int, ranks: int, tokens: int, length: int | None) -> int:
    """Return how many of a rank's ``tokens``, padding included, are no padding; they are its first ones.

    ``length`` is the whole sequence without padding; None if there is no padding.
    """
    if length is None:
        return tokens
    chunks = chunks_of(layout, rank, ranks)
    size = tokens // len(chunks)
    return sum(min(max(length - chunk * size, 0), size) for chunk in chunks)


def visible(
    layout: str,
    is_causal: bool,
    rank: int,
    source: int,
    ranks: int,
    queries: int,
    keys: int,
    length: int | None = None,
) -> Visible | None:
    """Return which of ``rank``'s queries see which of ``source``'s keys; None if none do.

    With causal attention and the zigzag layout that is half of the pairs for every two different ranks. ``queries`` and
    ``keys`` are those of each rank, equal if causal. ``length`` is the number of keys of the whole sequence without
    padding; None if there is no padding. Causal attention does not need it: padding is behind every query that counts.
    """
    everything = slice(0, queries)
    if not is_causal:
        valid = valid_tokens(layout, source, ranks, keys, length)
        return Visible(everything, slice(0, valid), False) if valid else None
    if source == rank:
        return Visible(everything, slice(0, keys), True)
    if layout == "contiguous":
        return Visible(everything, slice(0, keys), False) if source < rank else None
    # The source's first chunk is before both of the rank's chunks, its second one behind them; or the other way round.
    if source < rank:
        return Visible(everything, slice(0, keys // 2), False)
    return Visible(slice(queries // 2, queries), slice(0, keys), False)


def order_by_position(x: torch.Tensor, dim: int, layout: str, ranks: int) -> torch.Tensor:
    """Return a sequence in its own order, of the ranks' shards concatenated in rank order along ``dim``."""
    held = [chunk for rank in range(ranks) for chunk in chunks_of(layout, rank, ranks)]
    parts = x.chunk(len(held), dim)
    return torch.cat([parts[held.index(chunk)] for chunk in range(len(held))], dim)


def order_by_rank(x: torch.Tensor, dim: int, layout: str, ranks: int) -> torch.Tensor:
    """Return the ranks' shards concatenated in rank order along ``dim``, of a sequence in its own order."""
    parts = x.chunk(chunk_count(layout, ranks), dim)
    return torch.cat([parts[chunk] for rank in range(ranks) for chunk in chunks_of(layout, rank, ranks)], dim)


def padded_length(length: int, ranks: int, layout: str = "zigzag") -> int:
    """Return the length to which `shard` pads a sequence.

    Args:
        length: Tokens of the whole sequence; at least 1.
        ranks: Number of ranks.
        layout: The layout. Default: ``"zigzag"``.

    Returns:
        The smallest multiple of 2 · ranks (``"zigzag"``) or of ranks (``"contiguous"``) that is not less than
        ``length``; on one rank ``length`` itself.

    Raises:
        ValueError: ``length`` or ``layout`` is not valid.

    Example:
        >>> from dtcomm.context_parallel import padded_length
        >>> padded_length(1001, 4), padded_length(1001, 4, "contiguous")
        (1008, 1004)
    """
    require_int("length", length, 1)
    require_layout(layout)
    unit = 1 if ranks == 1 else chunk_count(layout, ranks)
    return -(-length // unit) * unit


def shard(
    x: torch.Tensor, dim: int, *, group: GroupOrMesh = None, layout: str = "zigzag", pad_value: float = 0
) -> torch.Tensor:
    """Return this rank's part of a tensor that every rank holds whole. Differentiable.

    A sequence that does not divide is padded at its end, to `padded_length` tokens, and a log line says so. Then pass
    the true length to `attention` as ``length``, and leave the padded tokens out of the loss, for example with
    ``pad_value=-100`` for the targets of `torch.nn.functional.cross_entropy`.

    Args:
        x: A tensor with the sequence in dimension ``dim``; any dtype and device.
        dim: The dimension of the sequence.
        group: Process group, or a device mesh with one dimension. Default: all ranks.
        layout: ``"zigzag"`` or ``"contiguous"``; see `dtcomm.context_parallel`. Default: ``"zigzag"``.
        pad_value: Value of the padded elements. Default: 0.

    Returns:
        The rank's tokens, in the order of their positions; on one rank ``x`` itself.

    Raises:
        ValueError: ``dim`` or ``layout`` is not valid; the message names the argument.

    Example::

        tokens = dtcomm.context_parallel.shard(tokens, 1)                      # [batch, sequence]
        targets = dtcomm.context_parallel.shard(targets, 1, pad_value=-100)
    """
    process_group = process_group_of(group, "cp")
    rank, ranks = dist.get_rank(process_group), dist.get_world_size(process_group)
    dim = require_dim(x, dim, "dim")
    length = x.shape[dim]
    padded = padded_length(length, ranks, layout)
    if ranks == 1:
        return x
    if padded > length:
        if rank == 0 and (length, padded) not in _logged:
            _logged.add((length, padded))
            _log.warning(
                f"dtcomm.context_parallel: a sequence of {length} tokens is padded to {padded}, the next multiple of "
                f"{chunk_count(layout, ranks)}; calls of attention outside context_parallel() need length={length}"
            )
        shape = list(x.shape)
        shape[dim] = padded - length
        x = torch.cat([x, x.new_full(shape, pad_value)], dim)
    parts = x.chunk(chunk_count(layout, ranks), dim)
    return torch.cat([parts[chunk] for chunk in chunks_of(layout, rank, ranks)], dim)


def unshard(
    x: torch.Tensor, dim: int, *, group: GroupOrMesh = None, layout: str = "zigzag", length: int | None = None
) -> torch.Tensor:
    """Gather the ranks' parts and return the whole tensor, in the order of the sequence. It has no gradient.

    Args:
        x: This rank's part, of the same shape on all ranks; any dtype that `dtcomm.all_gather` takes.
        dim: The dimension of the sequence.
        group: Process group, or a device mesh with one dimension. Default: all ranks.
        layout: The layout of the parts. Default: ``"zigzag"``.
        length: Tokens of the whole sequence without padding. Default: there is no padding.

    Returns:
        The tensor with ``length`` tokens in dimension ``dim``.

    Raises:
        ValueError: An argument is not valid; the message names it.
        PeerLost, CollectiveTimeout, CollectiveMismatch: As `dtcomm.all_gather`.

    Example::

        logits = dtcomm.context_parallel.unshard(model(tokens), 1, length=1001)
    """
    process_group = process_group_of(group, "cp")
    ranks = dist.get_world_size(process_group)
    dim = require_dim(x, dim, "dim")
    require_layout(layout)
    tokens = x.shape[dim] * ranks
    if layout == "zigzag" and ranks > 1 and x.shape[dim] % 2:
        raise ValueError(
            f"x: dim {dim} has {x.shape[dim]} tokens; in the zigzag layout a rank has two equal chunks"
        )
    require_length(length, tokens)
    x = x.detach().contiguous()
    shards = torch.empty((ranks, *x.shape), dtype=x.dtype, device=x.device)
    all_gather(shards, x, group=process_group)
    whole = torch.cat(shards.unbind(), dim)
    if ranks > 1:
        whole = order_by_position(whole, dim, layout, ranks)
    return whole if length is None else whole.narrow(dim, 0, length)


def positions(
    tokens: int,
    *,
    group: GroupOrMesh = None,
    layout: str = "zigzag",
    device: torch.device | str | None = None,
) -> torch.Tensor:
    """Return the positions in the whole sequence of this rank's tokens, for position embeddings.

    Args:
        tokens: Number of tokens of this rank, padding included.
        group: Process group, or a device mesh with one dimension. Default: all ranks.
        layout: The layout. Default: ``"zigzag"``.
        device: Device of the result. Default: torch's default device.

    Returns:
        int64 [tokens], increasing.

    Raises:
        ValueError: An argument is not valid; the message names it.

    Example::

        x = token_embedding(tokens) + position_embedding(dtcomm.context_parallel.positions(tokens.shape[1]))
    """
    require_int("tokens", tokens, 1)
    require_layout(layout)
    process_group = process_group_of(group, "cp")
    rank, ranks = dist.get_rank(process_group), dist.get_world_size(process_group)
    if ranks == 1:
        return torch.arange(tokens, device=device)
    chunks = chunks_of(layout, rank, ranks)
    if tokens % len(chunks):
        raise ValueError(
            f"tokens: {tokens} tokens are not two equal chunks, which a rank of the zigzag layout has"
        )
    size = tokens // len(chunks)
    return torch.cat([torch.arange(chunk * size, (chunk + 1) * size, device=device) for chunk in chunks])


def require_layout(layout: object) -> None:
    """Require the name of a layout."""
    if layout not in LAYOUTS:
        raise ValueError(f"layout: {layout!r} is not one of {', '.join(LAYOUTS)}{suggest(layout, LAYOUTS)}")


def require_length(length: object, tokens: int) -> None:
    """Require a true length that fits the tokens of all ranks, or None."""
    if length is None:
        return
    require_int("length", length, 1)
    assert isinstance(length, int)
    if length > tokens:
        raise ValueError(f"length={length}: the ranks have {tokens} tokens together")


def require_dim(x: torch.Tensor, dim: object, argument: str) -> int:
    """Require a dimension of ``x``; return it as a number that is not negative."""
    require_int(argument, dim)
    assert isinstance(dim, int)
    if not -x.ndim <= dim < x.ndim:
        raise ValueError(f"{argument}={dim}: the tensor has {x.ndim} dimensions")
    return dim % x.ndim
