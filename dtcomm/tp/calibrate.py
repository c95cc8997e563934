"""Which codec each layer can bear: errors measured on a few batches, and a plan within a budget.

Every layer that sends activations is compressed by itself, in every candidate codec, with ranks emulated in one
process (`dtcomm.tp.emulate`). The order in which layers are then given fewer bits takes, each time, the step that adds
the least divergence of the logits for each bit that it saves; the plan is the last in that order whose perplexity,
measured on the whole model, is within the budget.
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
from dtcomm.tp.emulate import Emulated, emulate, restore
from dtcomm.tp.layer_plan import SENDING, Entry, Plan, write

CANDIDATES = ("int8", "int6", "int5", "int4", "int3", "int2")
#: What a batch may be: tokens [batch, length], each predicting the next, or inputs and targets.
Batch = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
PLAIN = "none"
HIGH_BITS = 9.0  # from which on a layer counts as kept at high precision


class Error(NamedTuple):
    """Of one layer in one codec, or of a plan: relative L2 of the layer's output, mean divergence of the logits in nats
    (Kullback-Leibler, from the uncompressed model), perplexity as a change (0.01: one per cent more)."""

    relative: float
    divergence: float
    perplexity: float


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """`errors[layer][codec]`, the plan that was chosen and what it does to the whole model.

    bits: per element on the wire, for each codec. perplexity: of the uncompressed model. high: layers that stay at high
    precision, with `none` if no candidate was good enough.
    """

    ranks: int
    budget: float
    perplexity: float
    tokens: int
    bits: dict[str, float]
    errors: dict[str, dict[str, Error]]
    layers: dict[str, Entry]
    chosen: Error
    high: list[str] = field(default_factory=list)

    @property
    def mean_bits(self) -> float:
        """Of the layers that send, each counted once."""
        sent = [self.bits[str(self.layers[name].codec)] for name in self.errors]
        return sum(sent) / len(sent)

    def write(self, path: str | Path) -> None:
        """The plan, for ``dtcomm.tp.compress(model, mesh, plan=path)``."""
        write(path, self.layers, **self.told())

    def told(self) -> dict[str, Any]:
        """For reports: everything but the plan."""
        return {
            "ranks": self.ranks,
            "budget": self.budget,
            "perplexity": self.perplexity,
            "tokens": self.tokens,
            "mean_bits": self.mean_bits,
            "plan_error": self.chosen._asdict(),
            "high_precision": self.high,
            "bits": self.bits,
            "errors": {
                name: {spec: error._asdict() for spec, error in found.items()}
                for name, found in self.errors.items()
            },
        }


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
    """Measure and choose; the model ends as it was.

    plan: as of `compress`. codecs: the candidates; `none` is one always. budget: the most that perplexity may rise, as
    a fraction. progress: told how many of how many evaluations are done. ValueError names the argument. Memory: the
    logits of all batches, twice.
    """
    if not batches:
        raise ValueError("batches: expected at least one, got none")
    if not budget >= 0:
        raise ValueError(f"budget: expected 0 or more, got {budget}")
    candidates = [each for each in dict.fromkeys(map(parse, codecs)) if each.name != PLAIN]
    if not candidates:
        raise ValueError("codecs: expected at least one besides none")
    training = model.training
    model.eval()
    layers = emulate(model, ranks, plan, PLAIN)
    sending = {name: layer for name, layer in layers.items() if layer.kind in SENDING}
    try:
        if not sending:
            raise ValueError(f"plan: no layer sends activations; such are {', '.join(SENDING)}")
        # The uncompressed model, the measurements, and as many of whole plans as a bisection of their order takes.
        measured_ones = len(sending) * len(candidates)
        total = 1 + measured_ones + measured_ones.bit_length()
        done = itertools.count(1)
        baseline = _Baseline(model, batches)
        progress(next(done), total)
        errors: dict[str, dict[str, Error]] = {}
        for name, layer in sending.items():
            errors[name] = {}
            for each in candidates:
                layer.codec = each
                errors[name][str(each)] = baseline.error(layer)
                progress(next(done), total)
            layer.codec = parse(PLAIN)
        dtype = next(model.parameters()).dtype
        bits = {str(each): _bits(each, dtype) for each in (parse(PLAIN), *candidates)}
        states = list(_order(errors, bits))
        low, high, chosen = 0, len(states) - 1, Error(0.0, 0.0, 0.0)
        while low < high:
            middle = (low + high + 1) // 2
            measured = _of_plan(baseline, sending, states[middle])
            progress(next(done), total)
            if measured.perplexity <= budget:
                low, chosen = middle, measured
            else:
                high = middle - 1
        progress(total, total)
    finally:
        restore(model, layers)
        model.train(training)
    entries = {name: Entry(layer.kind, states[low].get(name)) for name, layer in layers.items()}
    return Calibration(
        ranks=ranks,
        budget=budget,
        perplexity=math.exp(baseline.loss),
        tokens=baseline.tokens,
        bits=bits,
        errors=errors,
        layers=entries,
        chosen=chosen,
        high=[name for name, spec in states[low].items() if bits[spec] >= HIGH_BITS],
    )


class _Baseline:
    """The uncompressed model's logits on the batches, and how far others are from them."""

    def __init__(self, model: nn.Module, batches: Sequence[Batch]) -> None:
        self.model = model
        self.batches = [_pair(batch) for batch in batches]
        self.logs = [F.log_softmax(self._logits(inputs), -1) for inputs, _ in self.batches]
        self.tokens = sum(targets.numel() for _, targets in self.batches)
        self.loss = (
            sum(
                float(F.nll_loss(logs.flatten(0, -2), targets.flatten(), reduction="sum"))
                for logs, (_, targets) in zip(self.logs, self.batches, strict=True)
            )
            / self.tokens
        )

    def error(self, watched: Emulated | None = None) -> Error:
        """Of the model as it is now; the relative error is that of the output of `watched`."""
        lost = [0.0, 0.0]

        def watch(layer: nn.Module, given: Any, result: torch.Tensor) -> None:
            assert isinstance(layer, Emulated)
            exact = layer.module(given[0])
            lost[0] += float((result - exact).double().square().sum())
            lost[1] += float(exact.double().square().sum())

        handle = watched.register_forward_hook(watch) if watched is not None else None
        loss = divergence = 0.0
        try:
            for (inputs, targets), plain in zip(self.batches, self.logs, strict=True):
                logs = F.log_softmax(self._logits(inputs), -1)
                loss += float(F.nll_loss(logs.flatten(0, -2), targets.flatten(), reduction="sum"))
                divergence += float(F.kl_div(logs, plain, log_target=True, reduction="sum"))
        finally:
            if handle is not None:
                handle.remove()
        relative = math.sqrt(lost[0] / lost[1]) if lost[1] else 0.0
        return Error(relative, divergence / self.tokens, math.expm1(loss / self.tokens - self.loss))

    def _logits(self, inputs: torch.Tensor) -> torch.Tensor:
        result = self.model(inputs)
        logits: torch.Tensor = result if isinstance(result, torch.Tensor) else result.logits
        return logits.float()


def _pair(batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    if isinstance(batch, torch.Tensor):
        return batch[:, :-1], batch[:, 1:]
    inputs, targets = batch
    return inputs, targets


def _of_plan(baseline: _Baseline, sending: dict[str, Emulated], state: dict[str, str]) -> Error:
    for name, layer in sending.items():
        layer.codec = parse(state[name])
    return baseline.error()


def _order(errors: dict[str, dict[str, Error]], bits: dict[str, float]) -> Iterator[dict[str, str]]:
    """States from all layers uncompressed to all at the fewest bits, one layer's codec changed at a time."""
    state = dict.fromkeys(errors, PLAIN)
    yield dict(state)
    while True:
        best: tuple[float, str, str] | None = None
        for name, found in errors.items():
            now = found[state[name]].divergence if state[name] in found else 0.0
            for spec, error in found.items():
                saved = bits[state[name]] - bits[spec]
                if saved > 0:
                    step = (max(error.divergence - now, 0.0) / saved, name, spec)
                    best = step if best is None else min(best, step)
        if best is None:
            return
        state[best[1]] = best[2]
        yield dict(state)


def _bits(codec: Codec, dtype: torch.dtype) -> float:
    numel = 1 << 20
    return 8 * codec.wire_bytes(numel, dtype) / numel
