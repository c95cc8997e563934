"""The guard: limits beyond which compression counts as harmful, the actions, and the ladder of finer schemes.

A `Guard` is what users configure. `dtcomm.compress.monitor` compares what ranks measure with its limits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from dtcomm.arguments import complete_options
from dtcomm.codecs import Codec, Integer, codec
from dtcomm.compress.feedback import DGC
from dtcomm.compress.powersgd import PowerSGD
from dtcomm.compress.spec import LevelCodecs, Scheme
from dtcomm.errors import DtcommError

KINDS = ("harm", "error", "residual", "loss", "nonfinite")
ACTIONS = ("warn", "uncompressed", "error", "finer", "reset", "ignore")


class CompressionHarmful(DtcommError):
    """Raised by a guard whose action is "error"; the message says which limit was exceeded, and what caused it.

    Attributes:
        event: What exceeded a limit.
        cause: "compression"; "gradients" if a rank's gradients held NaN or Inf before they were compressed; or
            "unknown" (a loss that jumps may have either cause).
        rank: With "gradients": the only rank whose gradients were not finite; None if there are several.
    """

    def __init__(self, event: Event) -> None:
        super().__init__(str(event))
        self.event, self.cause, self.rank = event, event.cause, event.rank


@dataclass(frozen=True, kw_only=True, repr=False)
class Guard:
    """Limits beyond which compression counts as harmful, and the action for each of them.

    Every limit has an action ``on_<limit>``, one of:

    - ``"warn"``: log a warning and record an event.
    - ``"uncompressed"``: send everything uncompressed for ``steps`` steps.
    - ``"error"``: raise `CompressionHarmful` on every rank.
    - ``"finer"``: compress the parameter more finely by one step of the ladder (int4 -> int8 -> fp16 -> none; four
      times the ratio of a sparse codec; twice the rank of PowerSGD), one step each time.
    - ``"reset"``: set the parameter's residual to zero, which keeps its codec.
    - ``"ignore"``: nothing. With ``on_harm`` the measurement is left out too.

    Where a function takes a guard, a mapping of these attributes does too, as in a configuration file.

    All ranks see the same averaged values and do the same. Actions other than "error" are logged once for each limit
    and parameter; all of them are in ``state.events`` and in the report.

    Attributes:
        cosine: The smallest cosine between what the ranks applied in a window of steps and what they would have applied
            without compression: the sums over the window of the averaged gradients (``harm``). Feedback that catches
            up within the window does not count. None: `cosine_limit`, 0.7 for `sign` and 0.5 for the others. DGC is
            compared with gradients that have its momentum, and left out if it clips. Default None.
        norm_ratio: The largest ratio of the norms of these two sums, in either direction. With DGC of momentum m the
            sum that is applied may be smaller by another factor of 1 - m, because DGC drops the momentum of the
            elements that it sends. Default 2.
        window: The smallest number of steps in a window; with sparse codecs of a ratio r it is at least 1 / (2 r). Two
            windows in a row must exceed a limit. Default 24.
        error: FSDP and `ShardedOptimizer` only, which encode parameters too: the largest share of the 90 % smallest
            elements that one encoding may lose, as 1 less their projection on what arrives. It is near 1 where a few
            outliers set the scale of every block. Default 0.9.
        residual: The largest ``norm(residual) / norm(gradient)``. Default None: 10, and more for schemes that keep
            most elements waiting (`residual_limit`).
        loss: The largest loss, as passed to ``state.observe``, over its running mean, in two steps in a row. Default
            2. The mean is geometric, and a loss must also exceed it by four times the usual deviation.
        nonfinite: The number of steps in a row whose gradients may hold NaN or Inf. Default 25.
        on_harm: The action for ``cosine`` and ``norm_ratio``. Default "warn".
        on_error: The action for ``error``. Default "finer".
        on_residual: The action for ``residual``. Default "reset".
        on_loss: The action for ``loss``. Default "uncompressed".
        on_nonfinite: The action for ``nonfinite``. Default "error".
        steps: How long the action "uncompressed" lasts. Default 100 steps.
        on_event: Called with each `Event` after its action was taken, and before "error" raises, on every rank that has
            it, at the start of the step's communication. What it raises reaches the caller of ``backward()``, of FSDP's
            forward or of ``step()``. Ranks may have different functions. Default None: nothing is called.

    Raises:
        TypeError: ``on_event`` cannot be called.
        ValueError: An action is unknown or a limit is not positive.

    Example:
        >>> from dtcomm.compress.guard import Guard
        >>> Guard(cosine=0.6, on_loss="error").on_harm
        'warn'
    """

    cosine: float | None = None
    norm_ratio: float = 2.0
    window: int = 24
    error: float = 0.9
    residual: float | None = None
    loss: float = 2.0
    nonfinite: int = 25
    on_harm: str = "warn"
    on_error: str = "finer"
    on_residual: str = "reset"
    on_loss: str = "uncompressed"
    on_nonfinite: str = "error"
    steps: int = 100
    on_event: Callable[[Event], object] | None = field(default=None, repr=False, compare=False)

    def __repr__(self) -> str:
        shown = (each for each in fields(self) if each.repr and getattr(self, each.name) != each.default)
        return f"Guard({', '.join(f'{each.name}={getattr(self, each.name)!r}' for each in shown)})"

    def __post_init__(self) -> None:
        for kind in KINDS:
            action = getattr(self, f"on_{kind}")
            if action not in ACTIONS:
                raise ValueError(f"guard: on_{kind} is {action!r}; valid: {', '.join(ACTIONS)}")
        for name in ("error", "residual", "loss", "nonfinite"):
            limit = getattr(self, name)
            if limit is not None and not limit > 0:
                raise ValueError(f"guard: {name} is {limit!r}; valid: a number above 0")
        if self.cosine is not None and not 0 < self.cosine < 1:
            raise ValueError(f"guard: cosine is {self.cosine!r}; valid: None or a number between 0 and 1")
        if not self.norm_ratio > 1:
            raise ValueError(f"guard: norm_ratio is {self.norm_ratio!r}; valid: a number above 1")
        for name in ("steps", "window"):
            if getattr(self, name) < 1:
                raise ValueError(f"guard: {name} is {getattr(self, name)!r}; valid: 1 or more")
        if self.on_event is not None and not callable(self.on_event):
            raise TypeError(f"guard: on_event is {self.on_event!r}; valid: None or a function of an Event")


def as_guard(given: object) -> Guard | None:
    """Return a guard, which may be given as a mapping of its attributes; TypeError if it is none."""
    if isinstance(given, Mapping):
        defaults: Mapping[str, Any] = {each.name: each.default for each in fields(Guard)}
        return Guard(**complete_options("guard", given, defaults))
    if not isinstance(given, Guard | None):
        raise TypeError(f"guard: expected a dtcomm.ddp.Guard or None, got {type(given).__name__}")
    return given


@dataclass(frozen=True, kw_only=True)
class Event:
    """A limit of the guard was exceeded.

    Attributes:
        step: The step in which the ranks acted.
        kind: The limit: "harm", "error", "residual", "loss" or "nonfinite".
        name: The parameter, or an empty string for the whole model.
        value: What was measured; of "harm" the cosine or the ratio of norms, whichever is beyond its limit.
        limit: The limit it was compared with.
        action: What was done.
        explanation: What the value means here, as a sentence; empty if there is nothing to add.
        cause: "compression", "gradients" or "unknown", as in `CompressionHarmful`.
        rank: As in `CompressionHarmful`.
    """

    step: int
    kind: str
    name: str
    value: float
    limit: float
    action: str
    explanation: str = ""
    cause: str = "unknown"
    rank: int | None = None

    def __str__(self) -> str:
        subject = f"{self.kind} of {self.name}" if self.name else self.kind
        text = f"step {self.step}: {subject} is {self.value:.3g}, limit {self.limit:g}: {self.action}"
        return f"{text}; {self.explanation}" if self.explanation else text


def finer(scheme: Scheme) -> Scheme:
    """Return the next more precise scheme: more bits, more elements, a higher rank, in the end none."""
    if isinstance(scheme, PowerSGD):
        if scheme.rank >= 16:
            return codec("fp16")
        return PowerSGD(rank=2 * scheme.rank, alternate=scheme.alternate, factors=scheme.factors)
    if isinstance(scheme, DGC):
        return replace(scheme, ratio=4 * scheme.ratio) if scheme.ratio <= 0.0625 else codec("int8")
    if isinstance(scheme, LevelCodecs):
        inside, between = _finer_codec(scheme.inside), _finer_codec(scheme.between)
        return codec("none") if inside == between == codec("none") else LevelCodecs(inside, between)
    return _finer_codec(scheme)


def _finer_codec(scheme: Codec) -> Codec:
    if isinstance(scheme, Integer):
        return codec("int4" if scheme.bits < 4 else "int8" if scheme.bits < 8 else "fp16")
    name, ratio = scheme.name, getattr(scheme, "ratio", None)
    if ratio is not None:
        return codec(f"{name}:ratio={4 * ratio}" if ratio <= 0.0625 else "int8")
    if name in ("none", "fp16", "bf16"):
        return codec("none")
    return codec({"sign": "int4", "mxfp4": "int8", "nvfp4": "int8", "intv": "int8"}.get(name, "bf16"))


def residual_limit(scheme: Scheme) -> float:
    """Return the ``norm(residual) / norm(gradient)`` that error feedback with this scheme may reach, with some margin.

    If a share r of the elements is sent, an element waits about 1/r steps, in which gradients that agree add up to 1/r
    times their size; momentum m multiplies that by 1/(1 - m).
    """
    if isinstance(scheme, DGC):
        return max(10.0, 4.0 / scheme.ratio) / (1 - scheme.momentum)
    if isinstance(scheme, PowerSGD):
        return 1000.0
    if isinstance(scheme, LevelCodecs):
        return max(residual_limit(scheme.inside), residual_limit(scheme.between))
    if scheme.name == "sign":
        return 100.0  # a block has one magnitude, so its largest elements wait many steps
    ratio = getattr(scheme, "ratio", None)
    return 10.0 if ratio is None else max(10.0, 4.0 / float(ratio))


def cosine_limit(scheme: Scheme) -> float:
    """Return the default of `Guard.cosine`.

    With feedback `sign` catches up within a few steps: in healthy runs its cosine over a window is above 0.75, and
    below where the learning rate is too large for its delay. Other schemes come near 0.5 in healthy runs.
    """
    return 0.7 if not isinstance(scheme, PowerSGD | DGC | LevelCodecs) and scheme.name == "sign" else 0.5


def send_interval(scheme: Scheme) -> int:
    """Return the number of steps that an element waits until it is sent, on average; 1 if all are sent each time."""
    if isinstance(scheme, LevelCodecs):
        return max(send_interval(scheme.inside), send_interval(scheme.between))
    ratio = getattr(scheme, "ratio", None)
    return 1 if ratio is None else math.ceil(1 / float(ratio))


def count_events(events: Sequence[Event]) -> dict[str, int]:
    """Return how often each kind of event led to each action, such as ``{"error: finer": 2}``."""
    counts: dict[str, int] = {}
    for event in events:
        key = f"{event.kind}: {event.action}"
        counts[key] = counts.get(key, 0) + 1
    return counts
