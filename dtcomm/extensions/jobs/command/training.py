"""Training steps for ``dtcomm plan step``, estimated from the size of a model.

A step consists of messages, whose estimates are a `Sweep` in the dtype and at the sizes of the step. Its times and its
one verdict are computed from these.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dtcomm.codecs import codec as parse
from dtcomm.codecs.base import Codec
from dtcomm.compress.spec import needs_feedback
from dtcomm.extensions.jobs import training_model as predict
from dtcomm.extensions.jobs.command.flags import TrainingModel, count_name
from dtcomm.extensions.jobs.command.options import StepOptions
from dtcomm.extensions.jobs.estimate import Estimate, candidates
from dtcomm.extensions.jobs.hardware import System
from dtcomm.extensions.jobs.sweep import (
    MIN_SPEEDUP,
    Sweep,
    requested_algorithms,
    size_name,
    time_name,
    with_none,
)
from dtcomm.extensions.jobs.training_model import Bucket, TrainingStep
from dtcomm.planner.cost_model import Table

MAX_BUCKETS = 1_000_000  # more would take minutes to replay
#: What dtcomm.fsdp sums lossy gradients with, so that none is encoded again at every hop.
FSDP_SUMS = ("one_shot", "hierarchical")


@dataclass(frozen=True, kw_only=True)
class Messages:
    """The messages of one collective in a step.

    ``counts`` maps each size in bytes to the number of such messages, and ``fastest`` (codec, size) to the estimate.
    ``core_seconds`` (codec, size) are those of a core that a message takes.
    """

    sweep: Sweep
    counts: Mapping[int, int]
    fastest: Mapping[tuple[str, int], Estimate]
    core_seconds: Mapping[tuple[str, int], float]

    def seconds(self, codec: Codec, nbytes: int) -> float:
        """Return the time of a message while its rank computes."""
        busy = self.core_seconds[str(codec), nbytes] * self.sweep.system.ranks_per_core
        return max(self.fastest[str(codec), nbytes].seconds, busy)

    def delay(self, codec: Codec, nbytes: int) -> float:
        """Return the seconds by which a message delays the computing on its rank's cores."""
        return self.core_seconds[str(codec), nbytes] / predict.cores_per_rank(self.sweep.system)

    def replay(self, codec: Codec, buckets: Sequence[Bucket]) -> TrainingStep:
        """Return the step."""
        return predict.replay(
            buckets,
            lambda bucket: self.seconds(codec, bucket.nbytes),
            lambda bucket: self.delay(codec, bucket.nbytes),
        )

    def buffer_bytes(self, codec: Codec) -> int:
        return max(self.fastest[str(codec), size].memory_bytes for size in self.counts)

    def main_algorithm(self, codec: Codec) -> str:
        """Return the algorithm of the size that most of the bytes are in."""
        size = max(self.counts, key=lambda nbytes: nbytes * self.counts[nbytes])
        return self.fastest[str(codec), size].algorithm


@dataclass(frozen=True, kw_only=True)
class TrainingRow:
    """One codec: the step, its speed-up over ``none``, and the bytes of residuals and buffers on a rank.

    ``parameters`` is the codec of the parameters that FSDP gathers. ``mfu`` counts the whole step; it is None without
    FLOPs.
    """

    codec: str
    parameters: str
    step: TrainingStep
    speedup: float
    residual_bytes: int
    buffer_bytes: int
    mfu: float | None = None

    @property
    def label(self) -> str:
        """The codecs in words."""
        if self.parameters == "none":
            return self.codec
        if self.codec == "none":
            return f"{self.parameters} parameters alone"
        return f"{self.codec} with {self.parameters} parameters"

    def as_dict(self) -> dict[str, Any]:
        names = ("codec", "parameters", "residual_bytes", "buffer_bytes")
        step, times = self.step, ("compute", "communication")
        return {
            **{name: getattr(self, name) for name in names}, "step_ms": round(step.seconds * 1e3, 4),
            **{f"{name}_ms": round(getattr(step, name) * 1e3, 4) for name in times},
            "overlap": round(step.hidden, 4), "scaling_efficiency": round(step.efficiency, 4),
            "mfu": None if self.mfu is None else round(self.mfu, 4), "speedup": round(self.speedup, 4),
        }  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Training:
    """Estimates of a training step.

    ``strategy`` is DDP or FSDP, ``verdict`` the one answer to whether a codec pays in this step.
    """

    strategy: str
    title: str
    computing: str
    gradient_bytes: int
    flops: float | None
    messages: list[Messages]
    rows: list[TrainingRow]
    verdict: str
    assumptions: list[str]

    @property
    def best(self) -> TrainingRow:
        """The row that the verdict recommends: without a codec unless one pays."""
        row = max(self.rows, key=lambda row: row.speedup)
        return row if row.speedup > MIN_SPEEDUP else self.rows[0]

    def as_dict(self) -> dict[str, Any]:
        names = ("strategy", "title", "computing", "gradient_bytes", "flops")
        return {
            **{name: getattr(self, name) for name in names},
            "messages": [
                {"collective": messages.sweep.collective, "size": size, "count": count}
                for messages in self.messages
                for size, count in messages.counts.items()
            ],
            "rows": [row.as_dict() for row in self.rows],
        }


def of_model(options: StepOptions, table: Table) -> Training:
    """Estimate a step of DDP or of FSDP."""
    estimate = _fsdp_step if options.strategy == "fsdp" else _ddp_step
    return estimate(options, options.model, table)


def _ddp_step(options: StepOptions, model: TrainingModel, table: Table) -> Training:
    seconds = model.compute_seconds(options.system.device)
    count = model.learning * model.dtype.itemsize / model.bucket_bytes
    if count > MAX_BUCKETS:
        raise ValueError(
            f"--model: {count_name(model.params)} parameters in buckets of {size_name(model.bucket_bytes)} are "
            f"{count_name(count)} messages; give a larger bucket=, so that there are at most {MAX_BUCKETS:,}"
        )
    buckets = predict.even_buckets(model.learning, model.dtype.itemsize, seconds, model.bucket_bytes)
    messages = _ddp_messages(options, buckets, model.dtype, table)
    codecs = with_none(options.codecs)
    steps = {
        (codec, codecs[0]): (messages.replay(codec, buckets), messages.buffer_bytes(codec))
        for codec in codecs
    }
    assumptions = [
        f"gradients become ready evenly over the last {predict.BACKWARD_SHARE:.0%} of the computing, in buckets of "
        f"{size_name(model.bucket_bytes)} that are sent one after the other",
        *_core_notes(options.system, hook=True),
        *_algorithm_notes(messages, codecs, model.dtype),
    ]
    return _training_of_model(options, model, "DDP", [messages], steps, assumptions)


def _fsdp_step(options: StepOptions, model: TrainingModel, table: Table) -> Training:
    compute = model.compute_seconds(options.system.device)
    unit_bytes, reduced_bytes = (
        max(1, int(count / model.layers)) * model.dtype.itemsize for count in (model.params, model.learning)
    )
    codecs, parameter_codec = with_none(options.codecs), parse(options.parameters)
    none = codecs[0]

    def names(collective: str, codec: Codec) -> tuple[str, ...]:
        valid = candidates(collective, codec, options.system)
        lossy_sum = collective == "reduce_scatter" and not codec.lossless(model.dtype)
        return tuple(name for name in valid if name in FSDP_SUMS) if lossy_sum else valid

    def estimated(collective: str, sent: Sequence[Codec], nbytes: int, count: int) -> Messages:
        sweep = Sweep(system=options.system, collective=collective, table=table, dtype=model.dtype)
        return _messages(sweep, {nbytes: count}, {codec: names(collective, codec) for codec in sent})

    reductions = estimated("reduce_scatter", codecs, reduced_bytes, model.layers)
    sent = list(dict.fromkeys((none, parameter_codec)))
    gathers = estimated("all_gather", sent, unit_bytes, 2 * model.layers)
    pairs = [(none, none), *((codec, parameter_codec) for codec in codecs)]
    steps: dict[tuple[Codec, Codec], tuple[TrainingStep, int]] = {}
    backward = compute * predict.BACKWARD_SHARE / model.layers
    layers = model.layers, compute / model.layers - backward, backward
    for codec, gathered in pairs:
        seconds = gathers.seconds(gathered, unit_bytes), reductions.seconds(codec, reduced_bytes)
        delays = gathers.delay(gathered, unit_bytes), reductions.delay(codec, reduced_bytes)
        step = predict.replay_sharded(*layers, *seconds, *delays)
        steps[codec, gathered] = step, max(gathers.buffer_bytes(gathered), reductions.buffer_bytes(codec))
    assumptions = [
        f"the model consists of {model.layers} equal layers (layers= sets another number): each is gathered before "
        "its forward and its backward, one layer ahead, and its gradients are reduce-scattered after its backward; "
        "these collectives take place one after the other",
        *_core_notes(options.system, hook=False),
    ]
    return _training_of_model(options, model, "FSDP", [reductions, gathers], steps, assumptions)


def _residual_bytes(codec: Codec, elements: float) -> int:
    """Return what error feedback keeps on a rank, where `dtcomm.ddp.compress` and `dtcomm.fsdp.compress` turn it on."""
    return round(4 * elements) if needs_feedback(codec) else 0


def _speedup(rows: Sequence[TrainingRow], step: TrainingStep) -> float:
    """Return that over the first row, which has no codec."""
    return rows[0].step.seconds / step.seconds if rows else 1.0


def _ddp_messages(
    options: StepOptions, buckets: Sequence[Bucket], dtype: torch.dtype, table: Table
) -> Messages:
    sweep = Sweep(system=options.system, collective="all_reduce", table=table, dtype=dtype)
    none, *codecs = with_none(options.codecs)
    # --algorithm is that of the codecs: without one, DDP sends as it always does.
    names = {none: candidates("all_reduce", none, options.system)}
    names |= {codec: requested_algorithms(sweep, codec, options.algorithms) for codec in codecs}
    counts = Counter(bucket.nbytes for bucket in buckets)
    return _messages(sweep, counts, names, predict.bucket_core_seconds(options.system))


def _messages(
    sweep: Sweep, counts: Mapping[int, int], names: Mapping[Codec, Sequence[str]], hook_seconds: float = 0.0
) -> Messages:
    fastest: dict[tuple[str, int], Estimate] = {}
    for nbytes in counts:
        first = len(sweep.rows)
        sweep.add_rows([nbytes], names)
        fastest |= {(row.best.codec, nbytes): row.best for row in sweep.rows[first:]}
        for codec in names:
            if (str(codec), nbytes) not in fastest:
                raise ValueError(
                    f"{codec}: none of the algorithms of {sweep.collective} can carry it or be estimated for "
                    f"{sweep.system.ranks} ranks"
                )
    core_seconds = {
        (str(codec), nbytes): hook_seconds
        + predict.message_core_seconds(sweep.system, fastest[str(codec), nbytes], codec, sweep.dtype)
        for codec in names
        for nbytes in counts
    }
    return Messages(sweep=sweep, counts=counts, fastest=fastest, core_seconds=core_seconds)


def _training_of_model(
    options: StepOptions, model: TrainingModel, strategy: str, messages: list[Messages],
    steps: Mapping[tuple[Codec, Codec], tuple[TrainingStep, int]], assumptions: list[str],
) -> Training:  # fmt: skip
    system, dtype = options.system, str(model.dtype).removeprefix("torch.")
    peak = system.device.peak_flops(model.compute_type) if model.flops is not None else 0.0
    rows: list[TrainingRow] = []
    for (codec, parameters), (step, buffer_bytes) in steps.items():
        rows.append(TrainingRow(
            codec=str(codec), parameters=str(parameters), step=step, speedup=_speedup(rows, step),
            residual_bytes=_residual_bytes(codec, model.learning), buffer_bytes=buffer_bytes,
            mfu=None if model.flops is None else model.flops / (peak * step.seconds),
        ))  # fmt: skip
    computing = f"computing: {time_name(rows[0].step.compute)} a step"
    if model.flops is None:
        computing += " (step_ms)"
    else:
        factor = "6" if model.trainable is None else "4 to 6"
        computing += (
            f" = {factor} x {count_name(model.params)} parameters x {count_name(model.tokens or 0)} tokens of a rank "
            f"({_flops_name(model.flops)}) at an MFU of {model.utilization:.0%} of {peak / 1e12:g} TFLOP/s "
            f"({system.device.name}, {model.compute_type}, dense)"
        )
        if model.mfu is None:
            assumptions.append(
                f"an MFU of {model.utilization:.0%} while nothing waits for the network is typical of large language "
                "models; mfu= sets another"
            )
        if model.compute is None and model.dtype == torch.float32:
            assumptions.append("matrix products are computed in tf32; compute=bf16 or fp32 sets another type")
    assumptions.append(
        "the time of the optimizer's step is left out, and so are what a codec does to the training and whether the "
        "model fits in memory: `dtcomm plan job` counts the memory of a rank"
    )
    assumptions += dict.fromkeys(line for part in messages for line in part.sweep.assumptions)
    total = sum(nbytes * count for nbytes, count in messages[0].counts.items())
    gathered = "uncompressed" if options.parameters == "none" else f"with {options.parameters}"
    sent = f", parameters gathered {gathered}" if strategy == "FSDP" else ""
    learn = "" if model.trainable is None else f", of which {count_name(model.learning)} learn"
    return Training(
        strategy=strategy,
        title=f"{strategy} step of {count_name(model.params)} parameters{learn}: {dtype} gradients ({size_name(total)})"
        f"{sent}",
        computing=computing, gradient_bytes=total, flops=model.flops, messages=messages, rows=rows,
        verdict=_verdict(rows, system),
        assumptions=assumptions,
    )  # fmt: skip


def _flops_name(flops: float) -> str:
    for unit, scale in (("EFLOP", 1e18), ("PFLOP", 1e15), ("TFLOP", 1e12)):
        if flops >= scale:
            return f"{flops / scale:.4g} {unit}"
    return f"{flops / 1e9:.4g} GFLOP"


def _core_notes(system: System, hook: bool) -> list[str]:
    """Say what communication is taken to cost CPU ranks."""
    if system.device.generation or system.ranks == 1:
        return []
    bucket = f" and {predict.BUCKET_SECONDS * 1e3:g} ms for each bucket" if hook else ""
    byte_ns = predict.BYTE_SECONDS * 1e9
    bytes_sent = f", {byte_ns:g} ns for each byte sent or received" if system.hosts > 1 else ""
    number = predict.cores_per_rank(system)
    cores = f"{number:g} core{'s' if number != 1 else ''}"
    element = f"{predict.ELEMENT_SECONDS * 1e9:g} ns of a core for each element that is encoded or decoded"
    costs = f"communication takes {element}{bytes_sent}{bucket}"
    return [f"{costs}; a rank has {cores} for it and for computing (--cores)"]


def _algorithm_notes(messages: Messages, codecs: Sequence[Codec], dtype: torch.dtype) -> list[str]:
    """Say which ``algorithm=`` the messages assume of DDP's hook, whose default is two_shot for lossy codecs."""
    chosen: dict[str, list[str]] = {}
    for codec in codecs:
        if not codec.lossless(dtype) and messages.sweep.system.ranks > 1:
            chosen.setdefault(messages.main_algorithm(codec), []).append(str(codec))
    return [
        f"{', '.join(specs)}: with dtcomm.ddp.compress(..., algorithm={name!r}), which is not its default"
        for name, specs in chosen.items()
        if name != "two_shot"
    ]


def _verdict(rows: Sequence[TrainingRow], system: System) -> str:
    """Return the answer to whether a codec pays in this step."""
    none, *others = rows
    if not others:
        return f"the step takes {time_name(none.step.seconds)} without a codec; none was given to compare"
    speedups = ", ".join(f"{row.label} {row.speedup:.2f}x" for row in others)
    best = max(others, key=lambda row: row.speedup)
    if best.speedup > MIN_SPEEDUP:
        gain = f"{time_name(best.step.seconds)} a step instead of {time_name(none.step.seconds)}, {best.speedup:.2f}x"
        rest = ", ".join(f"{row.label} {row.speedup:.2f}x" for row in others if row is not best)
        return "; ".join([f"{best.label} pays: {gain}", *([rest] if rest else [])])
    limit = none.step.seconds / none.step.compute if none.step.compute else 1.0
    if system.ranks == 1:
        reason = "one rank sends nothing"
    elif best.speedup < 1 / MIN_SPEEDUP:
        reason = "its messages take longer with a codec than without"
    elif limit <= MIN_SPEEDUP:
        reason = (
            f"{none.step.hidden:.0%} of the {time_name(none.step.communication)} of communication is hidden behind "
            f"computing; a step without any communication would be {limit:.2f}x as fast"
        )
    else:
        reason = f"a gain below {MIN_SPEEDUP - 1:.0%} is within the error of the estimates"
    return f"no codec pays in this step ({speedups}): {reason}"
