"""The options of `LocalSGD`: types, defaults and texts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypedDict

import torch

from dtcomm.arguments import complete_options, require_bool, require_int
from dtcomm.collectives import Algorithm
from dtcomm.compress.guard import Guard, as_guard

COMPARE = "compare report().seconds of some averages with those of codec='none'"
OuterOptimizer = Callable[[list[torch.Tensor]], torch.optim.Optimizer]


class Options(TypedDict, total=False):
    """What `LocalSGD` takes as keywords.

    Attributes:
        residual: How residuals are kept: "fp32", "bf16" or "int8". Default "fp32".
        outer: Makes the outer optimizer, which takes the averaged difference as the gradient, such as DiLoCo's
            ``lambda weights: torch.optim.SGD(weights, lr=0.7, momentum=0.9, nesterov=True)``. Default None: the
            weights are averaged.
        warmup: The number of steps at the start after each of which all weights are averaged. Default 0.
        save_residuals: Whether checkpoints have the residuals, in the form in which they are kept, so that a resumed
            run continues bit for bit. False: smaller checkpoints, and feedback starts anew. Default True.
        algorithm: The algorithm of the all-reduce, as `dtcomm.all_reduce` takes it. Default "direct".
        seed: The seed of stochastic rounding. Default 0.
        exclude: Shell patterns of parameters, or of modules with all that they contain, that are sent uncompressed.
            Default: none.
        bucket_bytes: The size of one message; the messages are in flight side by side. Default 25 MiB.
        guard: Limits beyond which compression counts as harmful; its steps are averages. None: no guard. Default
            ``Guard()``.
        sample_every: Measure errors in every average of a fragment that this divides; 0: never. Default 10.
        fragments: The number of fragments, of which each has every ``fragments``-th layer. Default 1.
        delay: The number of steps from the start of an average until it is applied, below ``every``; the paper's τ.
            Default 0: `step` waits for it.
        mixing: The weight of the common weights when an average is applied, above 0 and at most 1. It is 1 - α with
            the α of the Streaming DiLoCo paper. Default 1: the model's weights become the common ones.
    """

    residual: str
    save_residuals: bool
    outer: OuterOptimizer | None
    warmup: int
    algorithm: Algorithm
    seed: int
    exclude: str | Sequence[str]
    bucket_bytes: int
    guard: Guard | None
    sample_every: int
    fragments: int
    delay: int
    mixing: float


DEFAULTS: Options = {
    "residual": "fp32",
    "save_residuals": True,
    "outer": None,
    "warmup": 0,
    "algorithm": "direct",
    "seed": 0,
    "exclude": (),
    "bucket_bytes": 25 * 2**20,
    "guard": Guard(),
    "sample_every": 10,
    "fragments": 1,
    "delay": 0,
    "mixing": 1.0,
}


def checked(every: int, given: Mapping[str, object]) -> Options:
    """Return all options of a call; TypeError or ValueError if one is unknown, of a wrong type or out of range."""
    if "verify" in given:
        raise TypeError(
            "verify: LocalSGD has none: most steps send nothing, and with delay= an average is sent while others "
            f"compute, so no pair of steps shows what compression saves; {COMPARE}"
        )
    options = complete_options("LocalSGD", given, DEFAULTS)
    delay, mixing, outer = options["delay"], options["mixing"], options["outer"]
    require_int("every", every, 1)
    require_int("seed", options["seed"])
    require_bool("save_residuals", options["save_residuals"])
    for name, value, least in (
        ("warmup", options["warmup"], 0),
        ("bucket_bytes", options["bucket_bytes"], 1),
        ("sample_every", options["sample_every"], 0),
        ("delay", delay, 0),
    ):
        require_int(name, value, least)
    if delay >= every:
        raise ValueError(f"delay={delay}: expected less than every={every}")
    if not 0 < mixing <= 1:
        raise ValueError(f"mixing={mixing}: expected a number above 0 and at most 1")
    if outer is not None and not callable(outer):
        raise TypeError(f"outer: expected a function that makes an optimizer, got {type(outer).__name__}")
    options["guard"] = as_guard(options["guard"])
    return options
