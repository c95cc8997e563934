"""The papers' algorithms in numpy, for all ranks at once, in float64: the reference of the compressors."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


def topk(x: Array, count: int) -> Array:
    """Return the elements of the largest magnitudes, the first ones of equals; zeros elsewhere."""
    indices = np.argsort(-np.abs(x), kind="stable")[:count]
    out = np.zeros_like(x)
    out[indices] = x[indices]
    return out


def scaled_sign(x: Array) -> Array:
    return np.abs(x).mean() * np.sign(x)


def orthonormal(p: Array) -> Array:
    """Return the columns made orthonormal, in order."""
    p = p.copy()
    for k in range(p.shape[1]):
        for j in range(k):
            p[:, k] -= (p[:, j] @ p[:, k]) * p[:, j]
        p[:, k] /= np.linalg.norm(p[:, k])
    return p


class DeepGradientCompression:
    """Lin et al. 2018, algorithms 2 to 4: clipping, momentum correction, accumulation, factor masking."""

    def __init__(self, ranks: int, numel: int, momentum: float, clip: float) -> None:
        self.u, self.v = np.zeros((2, ranks, numel))
        self.momentum, self.clip = momentum, clip

    def step(self, gradients: list[Array], count: int) -> Array:
        sent = []
        for k, g in enumerate(gradients):
            bound = self.clip / np.sqrt(len(gradients))
            g = g * min(1.0, bound / np.linalg.norm(g)) if self.clip else g
            self.u[k] = self.momentum * self.u[k] + g
            self.v[k] = self.v[k] + self.u[k]
            sent.append(topk(self.v[k], count))
            mask = sent[k] != 0
            self.v[k][mask] = self.u[k][mask] = 0
        return np.mean(sent, axis=0)


class SignSGD:
    """Karimireddy et al. 2019, algorithm 2: EF-signSGD, of one block."""

    def __init__(self, ranks: int, numel: int) -> None:
        self.e = np.zeros((ranks, numel))

    def step(self, gradients: list[Array]) -> Array:
        p = [g + e for g, e in zip(gradients, self.e)]
        deltas = [scaled_sign(vector) for vector in p]
        self.e = np.array([vector - delta for vector, delta in zip(p, deltas)])
        return np.mean(deltas, axis=0)


class Differences:
    """EF21 (rate 1) and DIANA: Richtarik et al. 2021, algorithm 2; Mishchenko et al. 2019, algorithm 1."""

    def __init__(self, ranks: int, numel: int, rate: float) -> None:
        self.h, self.shared, self.rate = np.zeros((ranks, numel)), np.zeros(numel), rate

    def step(self, gradients: list[Array], count: int) -> Array:
        sent = np.array([topk(g - h, count) for g, h in zip(gradients, self.h)])
        result = self.shared + sent.mean(axis=0)
        self.h = self.h + self.rate * sent
        self.shared = self.shared + self.rate * sent.mean(axis=0)
        return result


class TorchPowerSGD:
    """torch's PowerSGD hook: both factors every step, the right one kept."""

    def __init__(self, q: Array, ranks: int, rows: int) -> None:
        self.q, self.errors = q, np.zeros((ranks, rows, len(q)))

    def step(self, gradients: list[Array]) -> Array:
        matrices = [g + e for g, e in zip(gradients, self.errors)]
        p = orthonormal(np.mean([m @ orthonormal(self.q) for m in matrices], axis=0))
        self.q = np.mean([m.T @ p for m in matrices], axis=0)
        result = p @ self.q.T
        self.errors = np.array([m - result for m in matrices])
        return result


class EpfmlPowerSGD:
    """epfml/powersgd with one iteration a step, which is ACP-SGD: one factor at a time, on the basis of the other one
    from the step before."""

    def __init__(self, q: Array, ranks: int, rows: int) -> None:
        self.factor, self.errors, self.transposed = q, np.zeros((ranks, rows, len(q))), False

    def step(self, gradients: list[Array]) -> Array:
        matrices = [g + e for g, e in zip(gradients, self.errors)]
        basis = orthonormal(self.factor)
        self.factor = np.mean([(m.T if self.transposed else m) @ basis for m in matrices], axis=0)
        result = self.factor @ basis.T
        result = result.T if self.transposed else result
        self.transposed = not self.transposed
        self.errors = np.array([m - result for m in matrices])
        return result
