"""PowerSGD: gradients as products of two thin matrices, which can be averaged as they are.

Vogels, Karimireddy, Jaggi 2019, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization"
(arXiv:1905.13727), with warm start and error feedback. One step of a matrix M (gradient + residual):

1. P = M Q, averaged over ranks and made orthonormal. Q comes from the last step.
2. Q = M' P, averaged over ranks.
3. The gradient becomes P Q', and M - P Q' stays in the residual.

With ``alternate`` only one of the factors is computed and averaged in a step, in turn; the other is the last step's,
made orthonormal (ACP-SGD, Zhang et al. 2023, ICDCS): one all-reduce instead of two, and half the bytes.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from dtcomm.codecs import Codec, codec
from dtcomm.codecs.base import FLOAT_TYPES
from dtcomm.collectives import Algorithm, Work, all_reduce_coalesced
from dtcomm.compress import checkpoint
from dtcomm.compress.residuals import cpu_copies
from dtcomm.compress.stage_scheduler import Stages
from dtcomm.kernels import counter_rng, low_rank
from dtcomm.streams import match_device

NAME = "powersgd"


@dataclass(frozen=True, kw_only=True)
class PowerSGD:
    """PowerSGD (Vogels et al. 2019, arXiv:1905.13727), a compressor for matrices.

    A matrix is sent as `rank` pairs of vectors. The spec is ``powersgd:rank=4,alternate=true,factors=int8``.

    Attributes:
        rank: The number of pairs, 1 to 64. More keeps more of the gradient, and costs bytes and time in proportion.
            Default 1.
        alternate: Compute and send one factor in a step, in turn (ACP-SGD). Default False.
        factors: The codec of the factors. Default none.

    Example:
        >>> from dtcomm.compress.powersgd import PowerSGD
        >>> scheme = PowerSGD.parse("powersgd:rank=4,factors=int8")
        >>> scheme.payload_bytes(1024, 1024), scheme.rank
        (8704, 4)
    """

    rank: int = 1
    alternate: bool = False
    factors: Codec = field(default_factory=lambda: codec("none"))

    def __post_init__(self) -> None:
        if isinstance(self.rank, bool) or not isinstance(self.rank, int):
            raise TypeError(f"powersgd: rank is {self.rank!r}; expected an int")
        if not 1 <= self.rank <= low_rank.MAX_RANK:
            raise ValueError(f"powersgd: rank is {self.rank}; valid: 1 to {low_rank.MAX_RANK}")

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """The dtypes of gradients that can be compressed."""
        return FLOAT_TYPES

    def lossless(self, dtype: torch.dtype) -> bool:
        """Return False: PowerSGD loses something of every dtype."""
        return False

    def payload_bytes(self, rows: int, columns: int) -> int:
        """Return the bytes of the factors of a matrix that are sent in one step."""
        rank = min(self.rank, rows, columns)
        sides = [self.factors.wire_bytes(rank * side) for side in (rows, columns)]
        return -(-sum(sides) // 2) if self.alternate else sum(sides)

    def __str__(self) -> str:
        options = [f"rank={self.rank}"] + ["alternate=true"] * self.alternate
        options += [] if str(self.factors) == "none" else [f"factors={self.factors}"]
        return f"{NAME}:{','.join(options)}"

    @staticmethod
    def parse(spec: str) -> PowerSGD:
        """Parse the output of ``str``; options that follow ``factors=CODEC`` and are not PowerSGD's are the codec's.

        Raises:
            ValueError: An option is wrong; the message names it and what is valid.
        """
        name, colon, rest = spec.strip().partition(":")
        if name != NAME or (colon and not rest):
            raise ValueError(f"compressor: {spec!r}; valid: {NAME}:OPTION=VALUE,…")
        rank, alternate, factors = 1, False, ""
        for part in rest.split(",") if rest else ():
            key, equals, value = (piece.strip() for piece in part.partition("="))
            if key == "rank" and value.isascii() and value.isdigit():
                rank = int(value)
            elif key == "alternate" and value in ("true", "false"):
                alternate = value == "true"
            elif key == "factors" and not factors and value:
                factors = value
            elif factors and equals and key not in ("rank", "alternate", "factors"):
                factors += f",{part.strip()}"
            else:
                raise ValueError(
                    f"powersgd: option {part.strip()!r}; valid: rank=1 to {low_rank.MAX_RANK}, alternate=true or "
                    "false, factors=CODEC"
                )
        return PowerSGD(rank=rank, alternate=alternate, factors=codec(factors or "none"))


@dataclass
class LowRankTask:
    """One matrix of a bucket; its gradient (flat) and its residual (fp32, flat, or None) are overwritten."""

    name: str
    scheme: PowerSGD
    rows: int
    columns: int
    gradient: torch.Tensor
    residual: torch.Tensor | None

    @property
    def rank(self) -> int:
        """The rank of the factors, which is at most that of the matrix."""
        return min(self.scheme.rank, self.rows, self.columns)


class Factors:
    """The factors of the last step, by parameter name; the same on all ranks."""

    def __init__(self) -> None:
        self._left: dict[str, torch.Tensor] = {}
        self._right: dict[str, torch.Tensor] = {}

    def left(self, task: LowRankTask) -> torch.Tensor:
        """Return P' [rank, rows] of the last step."""
        return _factor(self._left, task, task.rows)

    def right(self, task: LowRankTask) -> torch.Tensor:
        """Return Q' [rank, columns] of the last step; at first use random numbers that depend on the name only."""
        return _factor(self._right, task, task.columns)

    def forget(self, name: str) -> None:
        """Start the parameter's factors anew: after NaN or Inf, or with another rank."""
        self._left.pop(name, None)
        self._right.pop(name, None)

    def nbytes(self) -> int:
        """Return the bytes of all factors."""
        return sum(4 * factor.numel() for factor in (*self._left.values(), *self._right.values()))

    def state_dict(self) -> dict[str, dict[str, torch.Tensor]]:
        """Return copies on the CPU, by side and name."""
        return {"left": cpu_copies(self._left), "right": cpu_copies(self._right)}

    def check(self, sizes: Mapping[str, int] | None) -> checkpoint.Check:
        """Return the check of what `state_dict` returns; ``sizes`` are the elements of the parameters."""
        sides = checkpoint.entries(may_be_empty=True, left=checkpoint.tensors(), right=checkpoint.tensors())

        def check_factors(name: str, state: Any) -> None:
            sides(name, state)
            for parameter, left in state.get("left", {}).items():
                right = state["right"].get(parameter)
                shapes = left.shape, None if right is None else right.shape
                fits = right is not None and left.dim() == right.dim() == 2 and len(left) == len(right)
                if fits and sizes is not None:
                    fits = left.shape[1] * right.shape[1] == sizes.get(parameter)
                if not fits:
                    raise ValueError(f"{name}: the shapes {shapes} are no factors of {parameter!r}")

        return check_factors

    def load_state_dict(self, state: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """Replace all factors with copies of ``state``."""
        for side, factors in (("left", self._left), ("right", self._right)):
            factors.clear()
            factors.update({name: factor.clone() for name, factor in state.get(side, {}).items()})


def low_rank_stages(
    tasks: Sequence[LowRankTask],
    other_tensors: Sequence[torch.Tensor],
    codecs: Sequence[str | Codec],
    residuals: Sequence[torch.Tensor | None],
    *,
    factors: Factors,
    step: int,
    algorithm: Algorithm,
    group: object,
    seed: int,
    all_reduce: Callable[..., Work | None] = all_reduce_coalesced,
) -> Stages:
    """Average one bucket; yields each collective that it starts, and continues when that is done.

    The matrices of ``tasks`` are averaged by their ``factors``, which are updated. ``other_tensors``, with ``codecs``
    and ``residuals`` of their own, are sent in the first message. With ``alternate`` the step decides which factor is
    computed.
    """
    lefts, rights = [factors.left(task) for task in tasks], [factors.right(task) for task in tasks]

    def average(sides: list[tuple[LowRankTask, torch.Tensor]], first: bool) -> Work:
        work = all_reduce(
            [factor.view(-1) for _, factor in sides] + (list(other_tensors) if first else []),
            "avg",
            codec=[task.scheme.factors for task, _ in sides] + (list(codecs) if first else []),
            algorithm=algorithm,
            group=group,
            async_op=True,
            seed=seed,
            residuals=[None] * len(sides) + (list(residuals) if first else []),
            bucket_bytes=1 << 40,
        )
        assert work is not None  # because of async_op
        return work

    def orthonormalize(sides: list[tuple[LowRankTask, torch.Tensor]]) -> None:
        low_rank.orthonormalize_all([side for _, side in sides], [_key(task.name) for task, _ in sides])

    by_rows = [not task.scheme.alternate or step % 2 == 0 for task in tasks]
    matrices = list(zip(tasks, lefts, rights, by_rows, strict=True))
    first, second = [], []
    orthonormalize(
        [(task, right if rows else left) for task, left, right, rows in matrices if task.scheme.alternate]
    )
    for task, left, right, rows in matrices:
        if rows:
            low_rank.project_rows(task.gradient, task.residual, right, left)
            first.append((task, left))
        else:
            low_rank.project_columns(task.gradient, task.residual, left, right)
            first.append((task, right))
    yield average(first, True)
    orthonormalize([(task, left) for task, left, _, _ in matrices if not task.scheme.alternate])
    for task, left, right, _ in matrices:
        if not task.scheme.alternate:
            low_rank.project_columns(task.gradient, task.residual, left, right)
            second.append((task, right))
    if second:
        yield average(second, False)
    # NaN or Inf of one rank reached all of them. It must reach the optimizer, and no residual.
    finite_by_task = low_rank.factors_finite(lefts, rights)
    for task, left, right, finite in zip(tasks, lefts, rights, finite_by_task, strict=True):
        low_rank.expand(task.gradient, task.residual, left, right, finite)
        if (
            finite.is_cpu and not finite
        ):  # on a device the host does not wait, and the factors start from zeros
            factors.forget(task.name)


def _factor(factors: dict[str, torch.Tensor], task: LowRankTask, length: int) -> torch.Tensor:
    factor = factors.get(task.name)
    if factor is None:
        numbers = counter_rng.uniform(_key(task.name), length, task.rank * length) - 0.5
        factor = torch.from_numpy(numbers).to(torch.float32).view(task.rank, length)
    elif factor.shape != (task.rank, length):
        raise ValueError(
            f"the factor of {task.name!r} has shape {tuple(factor.shape)}, expected {(task.rank, length)}: "
            "was the state saved from another model or with another rank?"
        )
    factor = factors[task.name] = match_device(factor, task.gradient)
    return factor


def _key(name: str) -> int:
    return zlib.crc32(name.encode())
