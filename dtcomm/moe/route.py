"""What both forms of a dispatch share: options and codecs, checks, comparison between ranks, delivery, counters.

A rank whose arguments differ from those of the others would send rows that they cannot read. So every exchange of
counts begins with a header, and all ranks raise the same error, which names the argument.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypedDict

import torch
import torch.distributed as dist

from dtcomm.arguments import require_bool, require_int
from dtcomm.codecs import Codec
from dtcomm.codecs import codec as parse
from dtcomm.codecs.base import ELEMENT_TYPES, FLOAT_TYPES
from dtcomm.codecs.cast import RoundedExact
from dtcomm.compress.reporting import GroupTraffic, group_name
from dtcomm.compress.spec import message_codec
from dtcomm.errors import CollectiveMismatch
from dtcomm.moe.encoded_rows import EncodedRows, decode_rows, gradient_edge
from dtcomm.torch_compat import autograd_apply
from dtcomm.work import Work

#: Default of what comes back, and of gradients, where the rows are sent in a lossy codec.
COMBINE_CODEC = BACKWARD_CODEC = "bf16"
#: Argument → what its codec carries.
CARRIED = {"codec": "tokens", "combine_codec": "experts' outputs", "backward_codec": "gradients"}


class CodecOptions(TypedDict, total=False):
    """What `dispatch` and `dispatch_padded` take; the texts are those of their other common arguments too.

    Attributes:
        x: This rank's tokens, [tokens, features]; fp32, fp16 or bf16. The number of tokens may differ between ranks
            and may be 0; everything else is the same on all ranks.
        num_experts: Number of experts on all ranks together; divisible by the number of ranks.
        priorities: [tokens, choices], for example the router's weights: pairs with the lowest ones are dropped.
            Default: the last ones.
        encoded: Whether the rows are returned as they arrived. Default: False, they are decoded.
        group: Process group. Default: all ranks.
        codec: Codec of the tokens, a spec or a `Codec`. Default: ``"fp8_e4m3"``.
        combine_codec: Codec of the experts' outputs on their way back. Default: ``"bf16"``, because models lose more
            quality by 8-bit outputs than by 4-bit tokens; ``"none"`` if ``codec`` is. ``"exact:rounded=true"``
            (`dispatch_padded`): outputs are sent uncompressed, and the sum of a token's weighted outputs
            is the exact one, rounded once, so it has the same bits for any number of ranks.
        backward_codec: Codec of the gradients of both. Default: ``"bf16"``; ``"none"`` if both other codecs are.
        allow_inaccurate: Whether codecs are allowed that lose more than a fifth of what they carry. Default: False.
    """

    codec: str | Codec
    combine_codec: str | Codec | None
    backward_codec: str | Codec | None
    allow_inaccurate: bool


DEFAULTS: CodecOptions = {
    "codec": "fp8_e4m3",
    "combine_codec": None,
    "backward_codec": None,
    "allow_inaccurate": False,
}


@dataclass(frozen=True, kw_only=True)
class RowCodecs:
    """The codecs of a route: of tokens, of the experts' outputs, and of the gradients of both."""

    dispatch: Codec
    combine: Codec
    backward: Codec

    @property
    def identity(self) -> str:
        """What ranks compare."""
        return " ".join(codec.identity for codec in (self.dispatch, self.combine, self.backward))


def make_codecs(
    codec: str | Codec,
    combine_codec: str | Codec | None,
    backward_codec: str | Codec | None,
    allow_inaccurate: bool,
) -> RowCodecs:
    """Check what users wrote and fill in the defaults; see `dtcomm.moe.dispatch`."""
    require_bool("allow_inaccurate", allow_inaccurate)
    forward = _parse(codec, "codec", allow_inaccurate)
    none = parse("none")
    if combine_codec is None:
        combine_codec = none if forward == none else COMBINE_CODEC
    rounded = RoundedExact()
    if combine_codec in (rounded, str(rounded)):
        combine: Codec = rounded
    else:
        combine = _parse(combine_codec, "combine_codec", allow_inaccurate)
    if backward_codec is None:
        backward_codec = none if forward == none and combine in (none, rounded) else BACKWARD_CODEC
    backward = _parse(backward_codec, "backward_codec", allow_inaccurate)
    return RowCodecs(dispatch=forward, combine=combine, backward=backward)


def _parse(spec: str | Codec, argument: str, allow_inaccurate: bool) -> Codec:
    return message_codec(spec, argument, "rows", "" if allow_inaccurate else CARRIED[argument])


#: Fields of a header with the argument that an error names. All but the capacity are equal on all ranks.
FIELDS = {
    "features": "x",
    "dtype": "x",
    "choices": "experts",
    "capacity": "capacity",
    "hierarchical": "hierarchical",
    "codecs": "codec",
}
HEADER = len(FIELDS) + 2  # and the lowest and the highest expert
CAPACITY = list(FIELDS).index("capacity")  # its column


def make_header(
    x: torch.Tensor, choices: torch.Tensor, capacity: int | None, hierarchical: bool, codecs: RowCodecs
) -> torch.Tensor:
    """Return this rank's header, int64 [HEADER], on the device of ``x``. The host does not wait."""
    values = (
        x.shape[1],
        ELEMENT_TYPES[x.dtype],
        choices.shape[1],
        capacity or 0,
        int(hierarchical),
        zlib.crc32(codecs.identity.encode()),
    )
    header = choices.new_empty(HEADER)
    for index, value in enumerate(values):  # no copy from the host, so that a graph can capture it
        header[index].fill_(value)
    bounds = torch.aminmax(choices if choices.numel() else choices.new_zeros(1))
    header[len(values) :] = torch.stack(bounds)
    return header


def check_headers(
    headers: Sequence[Sequence[int]], rank: int, num_experts: int, group: dist.ProcessGroup | None
) -> None:
    """Raise an error if an expert does not exist, or CollectiveMismatch if the ranks' headers differ."""
    names = [f"rank {number}" for number in dist.get_process_group_ranks(group or dist.group.WORLD)]
    for index, (field, argument) in enumerate(FIELDS.items()):
        for other, header in enumerate(headers):
            if header[index] == headers[0][index] or index == CAPACITY:
                continue
            if field == "codecs":
                raise CollectiveMismatch(
                    f"codec: {names[0]} and {names[other]} pass different codecs; codec, combine_codec and "
                    "backward_codec are the same on all ranks"
                )
            first, second = (_text(field, value) for value in (headers[0][index], header[index]))
            raise CollectiveMismatch(
                f"{argument}: {names[0]} passes {first} and {names[other]} {second}; all ranks pass the same"
            )
    for other, (*_, lowest, highest) in enumerate(headers):
        if not 0 <= lowest <= highest < num_experts:
            whose = "" if other == rank else f" on {names[other]}"
            raise ValueError(f"experts: expected 0 to {num_experts - 1}, got {lowest} to {highest}{whose}")


def _text(field: str, value: int) -> str:
    if field == "dtype":
        return next(str(dtype) for dtype, number in ELEMENT_TYPES.items() if number == value)
    if field == "hierarchical":
        return str(bool(value))
    return f"{value} {field}"


def mismatch(num_experts: int, error: CollectiveMismatch) -> CollectiveMismatch:
    """Return the error for ranks whose messages of counts differ in size, or that call different operations."""
    return CollectiveMismatch(
        f"num_experts: the ranks pass different numbers of experts (this one {num_experts}), or call different "
        f"functions: {error}"
    )


def checked_choices(
    x: torch.Tensor, experts: torch.Tensor, num_experts: int, priorities: torch.Tensor | None, world_size: int
) -> torch.Tensor:
    """Return the experts of each token, int64 [tokens, choices], if the arguments of a dispatch fit each other.

    The experts' numbers are not checked, because the host would wait for the device.
    """
    if x.ndim != 2 or not x.shape[1]:
        raise ValueError(f"x: expected [tokens, features], got {tuple(x.shape)}")
    if x.dtype not in FLOAT_TYPES:
        raise ValueError(f"x: expected fp32, fp16 or bf16, got {x.dtype}")
    if (
        experts.dtype not in (torch.int32, torch.int64)
        or experts.ndim not in (1, 2)
        or len(experts) != len(x)
    ):
        raise ValueError(
            f"experts: expected integers [{len(x)}] or [{len(x)}, choices], got {experts.dtype} {tuple(experts.shape)}"
        )
    if experts.device != x.device:
        raise ValueError(f"experts: expected a tensor on {x.device}, as x, got one on {experts.device}")
    if num_experts < 1 or num_experts % world_size:
        raise ValueError(f"num_experts: {num_experts} experts are not divisible by the {world_size} ranks")
    if experts.ndim == 2 and not 1 <= experts.shape[1] <= num_experts:
        raise ValueError(
            f"experts: expected 1 to {num_experts} choices a token, as there are {num_experts} experts, "
            f"got {experts.shape[1]}"
        )
    choices = (experts if experts.ndim == 2 else experts[:, None]).to(torch.int64)
    require_weights("priorities", priorities, (len(x), choices.shape[1]))
    return choices


def require_capacity(capacity: object) -> None:
    """Raise ValueError if a capacity is not a positive integer."""
    if not isinstance(capacity, int) or isinstance(capacity, bool) or capacity < 1:
        raise ValueError(f"capacity: expected a positive number of rows, got {capacity!r}")


def require_weights(name: str, weights: torch.Tensor | None, choices_shape: tuple[int, int]) -> None:
    """Raise ValueError if weights are not one for each (token, choice) pair."""
    tokens, choices = choices_shape
    if weights is not None and weights.numel() != tokens * choices:
        raise ValueError(f"{name}: expected [{tokens}, {choices}], got {tuple(weights.shape)}")


def positions_of_choices(
    experts: torch.Tensor, counts: torch.Tensor, priorities: torch.Tensor | None
) -> torch.Tensor:
    """Return the position, int64 [pairs], of each (token, choice) pair among those that chose the same expert.

    ``counts``, int64 [num_experts], says how often each expert occurs. Pairs with higher ``priorities`` come first;
    None: the order of the pairs.
    """
    if priorities is None:
        order = torch.argsort(experts, stable=True)
    else:
        by_priority = torch.argsort(priorities.detach().reshape(-1), descending=True, stable=True)
        order = by_priority.index_select(0, torch.argsort(experts.index_select(0, by_priority), stable=True))
    begins = counts.cumsum(0) - counts
    positions = torch.arange(len(experts), device=experts.device) - begins.index_select(
        0, experts.index_select(0, order)
    )
    return torch.empty_like(positions).scatter_(0, order, positions)


def expert_capacity(tokens: int, num_experts: int, *, choices: int = 1, factor: float = 1.25) -> int:
    """Return how many rows one rank may send to one expert: ``factor`` times what it sends if all experts are equal.

    Args:
        tokens: Number of tokens of a rank.
        num_experts: Number of experts on all ranks together.
        choices: Number of experts of a token. Default: 1.
        factor: The capacity factor of Switch Transformer. Default: 1.25.

    Returns:
        ``ceil(factor * tokens * choices / num_experts)``, at least 1.

    Raises:
        TypeError, ValueError: An argument is not valid; the message names it.

    Example:
        >>> import dtcomm
        >>> dtcomm.moe.expert_capacity(1024, 64, choices=2)
        40
    """
    require_int("tokens", tokens, 0)
    require_int("num_experts", num_experts, 1)
    require_int("choices", choices, 1)
    if not 0 < factor < math.inf:
        raise ValueError(f"factor: expected a positive number, got {factor!r}")
    return max(1, math.ceil(factor * tokens * choices / num_experts))


def count_choices(experts: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Return how often each expert occurs, int64. `torch.bincount` would wait for a CUDA device."""
    counts = torch.zeros(num_experts, dtype=torch.int64, device=experts.device)
    return counts.scatter_add_(0, experts.to(torch.int64), torch.ones_like(experts, dtype=torch.int64))


class GradientRoute(Protocol):
    """A route back to the tokens."""

    @property
    def codecs(self) -> RowCodecs:
        """The codecs of tokens, outputs and gradients."""

    def sum_gradients(self, gradient: torch.Tensor) -> torch.Tensor:
        """Send the gradients of the experts' rows back and return the sum for each token of this rank."""


class _Dispatched(torch.autograd.Function):
    """Connects rows that have arrived to the tokens, in the graph of gradients."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, rows: torch.Tensor, route: GradientRoute) -> torch.Tensor:
        ctx.route = route
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return ctx.route.sum_gradients(gradient), None, None


def deliver(
    x: torch.Tensor, payload: torch.Tensor, route: GradientRoute, encoded: bool
) -> torch.Tensor | EncodedRows:
    """Return the rows for this rank's experts, decoded or as they arrived, connected to the tokens for autograd.

    ``payload``, uint8 [..., rows, bytes], are the rows, and ``x`` this rank's tokens.
    """
    codec, features = route.codecs.dispatch, x.shape[1]
    if not encoded:
        rows: torch.Tensor = autograd_apply(
            _Dispatched, x, decode_rows(payload, codec, features, x.dtype), route
        )
        return rows
    edge = autograd_apply(_Dispatched, x, gradient_edge((*payload.shape[:-1], features), x), route)
    return EncodedRows(payload=payload, codec=codec, features=features, dtype=x.dtype, gradient_edge=edge)


class MoEState(GroupTraffic):
    """Counts what experts' rows send over a process group on this rank, from now on; ``str()`` gives one line.

    Forward and backward passes of `dispatch`, `combine` and their padded forms are counted.

    Args:
        group: Process group. Default: all ranks.

    Raises:
        RuntimeError: No process group is initialized.

    Example::

        state = dtcomm.moe.MoEState()
        train(model)  # calls dtcomm.moe.dispatch and combine
        state.print_report()
    """

    integration = "experts"


def record(
    group: dist.ProcessGroup | None,
    level: str,
    what: str,
    codec: str,
    dtype: torch.dtype,
    numel: int,
    work: Work,
) -> None:
    """Count a completed all-to-all; ``level`` says between which ranks it was, the rest is as of `MoEState.record`."""
    if MoEState.is_counting():
        MoEState.record(group_name(group), level, what, codec, dtype, numel, work)
