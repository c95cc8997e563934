"""The options of `dtcomm.ddp.compress`, `attach` and `DDPState`: types, defaults, texts and checks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from dtcomm.arguments import complete_options, require_bool, require_int
from dtcomm.collectives import Algorithm
from dtcomm.compress.guard import Guard, as_guard
from dtcomm.compress.spec import Scheme


class Options(TypedDict, total=False):
    """What `compress`, `attach` and `DDPState` take.

    Attributes:
        codec: What matrices of 1024 elements or more are compressed with; the other parameters stay uncompressed. A
            codec or compressor or its text ("int8", "powersgd:rank=4"), or one codec inside hosts and another between
            them ("int8/int4"). A `Policy` or its text ("ndim<2 -> none; * -> int4") chooses by name, size or module.
            "auto" tries candidates in the first steps and keeps what pays. Default "int8".
        feedback: Error feedback. True: add each rank's encoding errors to its next gradients, by parameter; "ef21" or
            "diana": send differences to a reference that all ranks share; a `Feedback`: your own; False: none. "auto":
            True if a scheme loses more than 20 % of Gaussian numbers in one encoding (int3, int2, sign, topk, randk) or
            is a compressor, else False; the log and the report say which. Default "auto".
        residual: How error feedback keeps residuals between steps: "fp32" (4 bytes for each element of a compressed
            parameter), "bf16" or "int8". Default "fp32".
        save_residuals: Whether checkpoints have the residuals, in the form in which they are kept, so that a resumed
            run continues bit for bit. False: smaller checkpoints, and feedback starts anew. Default True.
        algorithm: The algorithm of the all-reduce, as `dtcomm.all_reduce` takes it: a name or a Schedule. With the
            direct ones ("direct", "one_shot", "two_shot") a result does not depend on the bucket a parameter is in. So
            a resumed run continues bit for bit although DDP starts with other buckets. On several hosts that have
            several ranks each, and with codecs for two levels, "direct" means "hierarchical", of which the same is
            true. Default "direct".
        seed: The seed of stochastic rounding; the step is mixed in. Default 0.
        exclude: Shell patterns of parameters, or of modules with all that they contain, that are sent uncompressed,
            such as ``"lm_head"`` or ``["*.norm*", "embed"]``. Default: none.
        sample_every: Measure the relative error in every step that this divides, for the guard and the report; 0:
            never. Default 50.
        guard: Limits beyond which compression counts as harmful, and what is done then; None: no guard. What happened
            is in ``state.events`` and in the report. Default ``Guard()``.
        warmup: The number of uncompressed steps at the start. Default 0.
        timeline: Record the times of so many last steps, for ``state.timeline.summary()`` and ``state.trace(path)``;
            0: none (``state.timeline.start()`` switches it on later). Default 0.
        verify: How many pairs of steps, with compression and with plain DDP, are measured at the start of the run. The
            report can then say whether compression paid. Not with "auto", which measures by itself. 0: none. Default 0.
        candidates: With "auto": the schemes to choose from. Default None: bf16:round=stochastic, int8, int4.
        grad_scaler: The ``torch.amp.GradScaler`` of the training loop. Residuals follow its scale, and a step that it
            skips leaves them as they were, which takes a second copy of them. Default None: that of the framework, with
            `attach`; else call `DDPState.rescale`.
    """

    residual: str
    save_residuals: bool
    algorithm: Algorithm
    seed: int
    exclude: str | Sequence[str]
    sample_every: int
    guard: Guard | None
    warmup: int
    timeline: int
    verify: int
    candidates: Sequence[str | Scheme] | None
    grad_scaler: Any


DEFAULTS: Options = {
    "residual": "fp32",
    "save_residuals": True,
    "algorithm": "direct",
    "seed": 0,
    "exclude": (),
    "sample_every": 50,
    "guard": Guard(),
    "warmup": 0,
    "timeline": 0,
    "verify": 0,
    "candidates": None,
    "grad_scaler": None,
}


def checked(given: Mapping[str, object]) -> Options:
    """Return all options of a call; TypeError or ValueError if one is unknown, of a wrong type or too small."""
    options = complete_options("dtcomm.ddp", given, DEFAULTS)
    require_int("seed", options["seed"])
    require_bool("save_residuals", options["save_residuals"])
    for name, number in (
        ("sample_every", options["sample_every"]),
        ("warmup", options["warmup"]),
        ("timeline", options["timeline"]),
        ("verify", options["verify"]),
    ):
        require_int(name, number, 0)
    options["guard"] = as_guard(options["guard"])
    scaler = options["grad_scaler"]
    if scaler is not None and not callable(getattr(scaler, "get_scale", None)):
        raise TypeError(f"grad_scaler: expected a torch.amp.GradScaler, got {type(scaler).__name__}")
    return options
