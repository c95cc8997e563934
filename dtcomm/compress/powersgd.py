"""PowerSGD: gradients as products of two thin matrices that can be averaged as they are.

Vogels, Karimireddy, Jaggi 2019, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization"
(arXiv:1905.13727), with warm start and error feedback: ``P = M Q``, averaged and made orthonormal, ``Q = M' P``,
averaged; the gradient becomes ``P Q'`` and what that lost stays in the residual. ``alternate``: only one of the
factors is computed and averaged in a step, in turn, the other is the last step's, made orthonormal (ACP-SGD, Zhang
et al. 2023, ICDCS): one all-reduce instead of two, and half the bytes.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from dtcomm.codecs import Codec, codec
from dtcomm.codecs.base import FLOAT_TYPES
from dtcomm.collectives import Work, all_reduce_coalesced
from dtcomm.compress.stage_scheduler import Stages
from dtcomm.device.streams import match_device
from dtcomm.kernels import counter_rng, low_rank

NAME = "powersgd"


@dataclass(frozen=True, kw_only=True)
class PowerSGD:
    """A matrix as `rank` pairs of vectors, which travel in the codec `factors`.

    rank: 1 to 64; more keeps more of the gradient and costs bytes and time in proportion. alternate: one factor a
    step. Spec: ``powersgd:rank=4,alternate=true/int8``.
    """

    rank: int = 1
    alternate: bool = False
    factors: Codec = field(default_factory=lambda: codec("none"))

    def __post_init__(self) -> None:
        if isinstance(self.rank, bool) or not isinstance(self.rank, int):
            raise TypeError(f"powersgd: rank is {self.rank!r}; want an int")
        if not 1 <= self.rank <= low_rank.MOST_RANK:
            raise ValueError(f"powersgd: rank is {self.rank}; valid: 1 to {low_rank.MOST_RANK}")

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """Of the gradients that it takes."""
        return FLOAT_TYPES

    def lossless(self, dtype: torch.dtype) -> bool:
        return False

    def payload_bytes(self, rows: int, columns: int) -> int:
        """Of the factors of a matrix that are sent in one step."""
        rank = min(self.rank, rows, columns)
        sides = [self.factors.wire_bytes(rank * side) for side in (rows, columns)]
        return -(-sum(sides) // 2) if self.alternate else sum(sides)

    def __str__(self) -> str:
        options = [f"rank={self.rank}"] + ["alternate=true"] * self.alternate
        tail = "" if str(self.factors) == "none" else f"/{self.factors}"
        return f"{NAME}:{','.join(options)}{tail}"

    @staticmethod
    def parse(spec: str) -> PowerSGD:
        """The inverse of ``str``; ValueError names the option that is wrong."""
        head, slash, tail = spec.strip().partition("/")
        name, _, rest = head.partition(":")
        if name != NAME:
            raise ValueError(f"compressor: unknown {name!r}; valid: {NAME}")
        rank, alternate = 1, False
        for part in rest.split(",") if rest else ():
            key, _, value = (piece.strip() for piece in part.partition("="))
            if key == "rank" and value.isascii() and value.isdigit():
                rank = int(value)
            elif key == "alternate" and value in ("true", "false"):
                alternate = value == "true"
            else:
                raise ValueError(
                    f"powersgd: option {part.strip()!r}; valid: rank=1 to 64, alternate=true or false"
                )
        factors = codec(tail) if slash else codec("none")
        return PowerSGD(rank=rank, alternate=alternate, factors=factors)


@dataclass
class Task:
    """One matrix of a bucket: gradient (flat) and residual (fp32, flat, or None) are rewritten."""

    name: str
    scheme: PowerSGD
    rows: int
    columns: int
    gradient: torch.Tensor
    residual: torch.Tensor | None

    @property
    def rank(self) -> int:
        return min(self.scheme.rank, self.rows, self.columns)


class Factors:
    """The factors of the last step, by parameter name: the same on all ranks."""

    def __init__(self) -> None:
        self._left: dict[str, torch.Tensor] = {}
        self._right: dict[str, torch.Tensor] = {}

    def left(self, task: Task) -> torch.Tensor:
        """[rank, rows], as the last step left it."""
        return _kept(self._left, task, task.rows)

    def right(self, task: Task) -> torch.Tensor:
        """[rank, columns], as the last step left it; at first sight random numbers that the name decides."""
        return _kept(self._right, task, task.columns)

    def forget(self, name: str) -> None:
        """Start anew: after numbers that are none, or with another rank."""
        self._left.pop(name, None)
        self._right.pop(name, None)

    def nbytes(self) -> int:
        return sum(4 * factor.numel() for factor in (*self._left.values(), *self._right.values()))

    def state_dict(self) -> dict[str, dict[str, torch.Tensor]]:
        """Copies on the CPU, by side and name."""
        return {
            side: {name: factor.to("cpu", copy=True) for name, factor in factors.items()}
            for side, factors in (("left", self._left), ("right", self._right))
        }

    def load_state_dict(self, state: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        for side, factors in (("left", self._left), ("right", self._right)):
            factors.clear()
            factors.update({name: factor.clone() for name, factor in state.get(side, {}).items()})


def stages(
    tasks: Sequence[Task],
    others: Sequence[torch.Tensor],
    codecs: Sequence[Codec],
    residuals: Sequence[torch.Tensor | None],
    *,
    factors: Factors,
    step: int,
    algorithm: str,
    group: object,
    seed: int,
    reduce: Callable[..., Work | None] = all_reduce_coalesced,
) -> Stages:
    """Average one bucket: `tasks` by their factors, `others`, with codecs and residuals, in the first message."""
    lefts, rights = [factors.left(task) for task in tasks], [factors.right(task) for task in tasks]

    def average(sides: list[tuple[Task, torch.Tensor]], first: bool) -> Work:
        sent = [factor.view(-1) for _, factor in sides] + (list(others) if first else [])
        work = reduce(
            sent,
            "avg",
            codec=[task.scheme.factors for task, _ in sides] + (list(codecs) if first else []),
            algorithm=algorithm,
            group=group,
            async_op=True,
            seed=seed,
            residuals=[None] * len(sides) + (list(residuals) if first else []),
            bucket_bytes=1 << 40,
        )
        assert work is not None  # it is with async_op
        return work

    def orthonormalise(sides: list[tuple[Task, torch.Tensor]]) -> None:
        low_rank.orthonormalise_all([side for _, side in sides], [_key(task.name) for task, _ in sides])

    by_rows = [not task.scheme.alternate or step % 2 == 0 for task in tasks]
    every = list(zip(tasks, lefts, rights, by_rows, strict=True))
    first, second = [], []
    orthonormalise(
        [(task, right if rows else left) for task, left, right, rows in every if task.scheme.alternate]
    )
    for task, left, right, rows in every:
        if rows:
            low_rank.project_rows(task.gradient, task.residual, right, left)
            first.append((task, left))
        else:
            low_rank.project_columns(task.gradient, task.residual, left, right)
            first.append((task, right))
    yield average(first, True)
    orthonormalise([(task, left) for task, left, _, _ in every if not task.scheme.alternate])
    for task, left, right, _ in every:
        if not task.scheme.alternate:
            low_rank.project_columns(task.gradient, task.residual, left, right)
            second.append((task, right))
    if second:
        yield average(second, False)
    if tasks and not lefts[0].is_cpu:  # nobody waits to see: from zeros both factors begin anew
        found = low_rank.factors_finite(lefts, rights)
        for task, left, right, finite in zip(tasks, lefts, rights, found, strict=True):
            low_rank.expand(task.gradient, task.residual, left, right, finite)
        return
    for task, left, right in zip(tasks, lefts, rights, strict=True):
        if torch.isfinite(left).all() and torch.isfinite(right).all():
            low_rank.expand(task.gradient, task.residual, left, right)
        else:
            # Somebody's NaN or Inf reached everybody: it must reach the optimiser, and no residual.
            task.gradient.fill_(float("nan"))
            factors.forget(task.name)


def _kept(factors: dict[str, torch.Tensor], task: Task, length: int) -> torch.Tensor:
    factor = factors.get(task.name)
    if factor is None:
        numbers = counter_rng.uniform(_key(task.name), length, task.rank * length) - 0.5
        factor = torch.from_numpy(numbers).to(torch.float32).view(task.rank, length)
    elif factor.shape != (task.rank, length):
        raise ValueError(
            f"the factor of {task.name!r} has shape {tuple(factor.shape)}, want {(task.rank, length)}: "
            "was the state saved from another model or with another rank?"
        )
    factor = factors[task.name] = match_device(factor, task.gradient)
    return factor


def _key(name: str) -> int:
    return zlib.crc32(name.encode())
