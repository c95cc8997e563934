"""Calibration: measures how much compression each layer tolerates, and makes a plan within a perplexity budget.

Every layer that sends activations is compressed by itself, in every candidate codec, with the ranks emulated in one
process (`emulate`). Starting from uncompressed layers, the search then repeatedly takes the change of one layer's codec
that adds the least divergence of the logits per bit saved. The plan is the last state of this sequence whose
perplexity, measured on the whole model, is within the budget; bisection finds it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from dtcomm.codecs import Codec
from dtcomm.codecs import codec as parse
from dtcomm.extensions.calibrate.emulate import EmulatedLayer, emulate, restore
from dtcomm.tp.layer_plan import SENDING, Plan, PlanEntry, write_plan

CANDIDATES = ("int8", "int6", "int5", "int4", "int3", "int2")
#: A batch: tokens [batch, length], each predicting the next one, or a pair of inputs and targets.
Batch = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
UNCOMPRESSED = "none"
#: A layer whose codec has at least this many bits per element counts as kept at high precision.
HIGH_PRECISION_BITS = 9.0


class CompressionError(NamedTuple):
    """The error of one layer in one codec, or of a whole plan.

    ``relative`` is the L2 error of the layer's output by its norm, 0 for a plan; ``divergence`` the mean
    Kullback-Leibler divergence of the logits from the uncompressed model's in nats; ``perplexity`` the relative change.
    """

    relative: float
    divergence: float
    perplexity: float


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """The measurements and the chosen plan.

    Attributes:
        ranks: Number of emulated ranks.
        budget: The largest allowed relative change of the perplexity.
        perplexity: Perplexity of the uncompressed model.
        tokens: Number of predicted tokens.
        bits: Codec → bits per element that it sends.
        errors: Layer → codec → error of that layer alone in that codec.
        layers: Layer → kind and codec: the plan.
        plan_error: Error of the whole model with the plan.
        high_precision: Layers that stay at high precision: with codec ``none`` if no candidate was good enough.
    """

    ranks: int
    budget: float
    perplexity: float
    tokens: int
    bits: dict[str, float]
    errors: dict[str, dict[str, CompressionError]]
    layers: dict[str, PlanEntry]
    plan_error: CompressionError
    high_precision: list[str] = field(default_factory=list)

    @property
    def mean_bits(self) -> float:
        """Mean bits per element over the layers that send activations."""
        bits = [self.bits[str(self.layers[name].codec)] for name in self.errors]
        return sum(bits) / len(bits)

    def write(self, path: str | Path) -> None:
        """Write the plan to a file for ``dtcomm.tp.compress(model, mesh, plan=path)``."""
        write_plan(path, self.layers, **self.to_dict())

    def to_dict(self) -> dict[str, Any]:
        """Return everything but the plan as plain values."""
        names = ("ranks", "budget", "perplexity", "tokens", "mean_bits", "high_precision", "bits")
        by_layer = self.errors.items()
        errors = {name: {spec: error._asdict() for spec, error in layer.items()} for name, layer in by_layer}
        plain = {name: getattr(self, name) for name in names}
        return {**plain, "plan_error": self.plan_error._asdict(), "errors": errors}


@torch.no_grad()
def calibrate(
    model: nn.Module,
    batches: Sequence[Batch],
    ranks: int = 2,
    plan: Plan | str | Path | None = None,
    *,
    codecs: Sequence[str | Codec] = CANDIDATES,
    budget: float = 0.01,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Calibration:
    """Measure every layer in every candidate codec and choose a codec for each layer.

    The model is unchanged afterwards. The logits of all batches are kept in memory twice.

    Args:
        model: A language model whose output is logits [batch, length, vocabulary], or has them as ``.logits``.
        batches: Tokens [batch, length], or pairs of inputs and targets.
        ranks: Number of ranks to emulate. Default: 2.
        plan: The layers, as `dtcomm.tp.compress` takes them. Default: the built-in plan of the model's type.
        codecs: Candidates; ``"none"`` is always one. Default: int8 to int2.
        budget: The most that the perplexity may rise, as a fraction. Default: 0.01.
        progress: Called with the number of evaluations done and their total. Default: nothing.

    Returns:
        The measurements and the plan; `Calibration.write` saves it.

    Raises:
        ValueError: An argument is not valid, or no layer of the plan sends activations.

    Example::

        result = calibrate(model, batches, ranks=4, plan={"*.up": "column", "*.down": "row"})
        result.write("plan.json")
    """
    if not batches:
        raise ValueError("batches: expected at least one, got none")
    if not budget >= 0:
        raise ValueError(f"budget: expected 0 or more, got {budget}")
    candidates = [codec for codec in dict.fromkeys(map(parse, codecs)) if codec.name != UNCOMPRESSED]
    if not candidates:
        raise ValueError("codecs: expected at least one besides none")
    training = model.training
    model.eval()
    layers = emulate(model, ranks, plan, UNCOMPRESSED)
    sending = {name: layer for name, layer in layers.items() if layer.kind in SENDING}
    try:
        if not sending:
            kinds = ", ".join(SENDING)
            raise ValueError(
                f"plan: none of its layers sends activations; layers that do are of kind {kinds}"
            )
        # The uncompressed model, one evaluation per layer and codec, and those of the bisection.
        single_layer_evaluations = len(sending) * len(candidates)
        total = 1 + single_layer_evaluations + single_layer_evaluations.bit_length()
        done = itertools.count(1)
        baseline = _Baseline(model, batches)
        progress(next(done), total)
        errors: dict[str, dict[str, CompressionError]] = {}
        for name, layer in sending.items():
            errors[name] = {}
            for codec in candidates:
                layer.codec = codec
                errors[name][str(codec)] = baseline.error(layer)
                progress(next(done), total)
            layer.codec = parse(UNCOMPRESSED)
        dtype = next(model.parameters()).dtype
        every = (parse(UNCOMPRESSED), *candidates)
        bits = {str(codec): 8 * codec.wire_bytes(1 << 20, dtype) / (1 << 20) for codec in every}
        states = list(_greedy_states(errors, bits))
        low, high, plan_error = 0, len(states) - 1, CompressionError(0.0, 0.0, 0.0)
        while low < high:
            middle = (low + high + 1) // 2
            for name, layer in sending.items():
                layer.codec = parse(states[middle][name])
            error = baseline.error()
            progress(next(done), total)
            if error.perplexity <= budget:
                low, plan_error = middle, error
            else:
                high = middle - 1
        progress(total, total)
    finally:
        restore(model, layers)
        model.train(training)
    entries = {name: PlanEntry(layer.kind, states[low].get(name)) for name, layer in layers.items()}
    return Calibration(
        ranks=ranks, budget=budget, perplexity=math.exp(baseline.loss), tokens=baseline.tokens, bits=bits,
        errors=errors, layers=entries, plan_error=plan_error,
        high_precision=[name for name, spec in states[low].items() if bits[spec] >= HIGH_PRECISION_BITS],
    )  # fmt: skip


class _Baseline:
    """The uncompressed model's log-probabilities on the batches, to which compressed models are compared."""

    def __init__(self, model: nn.Module, batches: Sequence[Batch]) -> None:
        self.model = model
        self.batches = [_inputs_and_targets(batch) for batch in batches]
        self.log_probs = [F.log_softmax(self._logits(inputs), -1) for inputs, _ in self.batches]
        self.tokens = sum(targets.numel() for _, targets in self.batches)
        pairs = zip(self.log_probs, self.batches, strict=True)
        self.loss = sum(_sum_of_losses(log_probs, targets) for log_probs, (_, targets) in pairs) / self.tokens

    def error(self, layer: EmulatedLayer | None = None) -> CompressionError:
        """Measure the model as it is now; the relative error is that of the output of ``layer``."""
        squares = [0.0, 0.0]  # of the error, and of the exact output

        def add_squares(layer: nn.Module, inputs: Any, output: torch.Tensor) -> None:
            assert isinstance(layer, EmulatedLayer)
            exact = layer.module(*inputs)
            squares[0] += float((output - exact).double().square().sum())
            squares[1] += float(exact.double().square().sum())

        handle = None if layer is None else layer.register_forward_hook(add_squares)
        loss = divergence = 0.0
        try:
            for (inputs, targets), reference in zip(self.batches, self.log_probs, strict=True):
                log_probs = F.log_softmax(self._logits(inputs), -1)
                loss += _sum_of_losses(log_probs, targets)
                divergence += float(F.kl_div(log_probs, reference, log_target=True, reduction="sum"))
        finally:
            if handle is not None:
                handle.remove()
        relative = math.sqrt(squares[0] / squares[1]) if squares[1] else 0.0
        change = math.expm1(loss / self.tokens - self.loss)
        return CompressionError(relative, divergence / self.tokens, change)

    def _logits(self, inputs: torch.Tensor) -> torch.Tensor:
        output = self.model(inputs)
        logits: torch.Tensor = output if isinstance(output, torch.Tensor) else output.logits
        return logits.float()


def _sum_of_losses(log_probs: torch.Tensor, targets: torch.Tensor) -> float:
    return float(F.nll_loss(log_probs.flatten(0, -2), targets.flatten(), reduction="sum"))


def _inputs_and_targets(batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    if isinstance(batch, torch.Tensor):
        return batch[:, :-1], batch[:, 1:]
    inputs, targets = batch
    return inputs, targets


def _greedy_states(
    errors: dict[str, dict[str, CompressionError]], bits: dict[str, float]
) -> Iterator[dict[str, str]]:
    """Yield states (layer → codec) from all layers uncompressed to all at the fewest bits.

    Each differs from the one before in one layer: the change that adds the least divergence per bit saved.
    """
    state = dict.fromkeys(errors, UNCOMPRESSED)
    yield dict(state)
    while True:
        best: tuple[float, str, str] | None = None  # divergence per bit, layer, codec
        for name, by_codec in errors.items():
            current = by_codec[state[name]].divergence if state[name] in by_codec else 0.0
            for spec, error in by_codec.items():
                saved = bits[state[name]] - bits[spec]
                if saved > 0:
                    change = (max(error.divergence - current, 0.0) / saved, name, spec)
                    best = change if best is None else min(best, change)
        if best is None:
            return
        state[best[1]] = best[2]
        yield dict(state)
