"""``dtcomm exact check``: inputs of sums and the bits of their exact results, for any implementation of exact sums.

A file is an .npz of numpy: for each case ``<type>.<kind>.<terms>`` the arrays ``.inputs`` [terms, elements], ``.sum``
and ``.avg`` [elements], of the bit patterns of fp32 (uint32), fp16 and bf16 (uint16). A result is the exact sum,
divided by the number of terms for ``avg``, and rounded once, ties to even. The results are computed with Python's
integers, not with the code that is checked. Inputs are drawn without floating-point arithmetic, so every
machine makes the same file. Its digest, which does not depend on how numpy writes it, is `DIGEST`.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from dtcomm.cli import write_json
from dtcomm.codecs.cast import ROUNDED
from dtcomm.collectives import all_reduce
from dtcomm.extensions.extras.invariant_sum import sum_terms
from dtcomm.launch.ranks import run_ranks

DIGEST = "8aef3e38692db58ab844695a5146eaae0f15942d2da778e9ab04f66fe5bab992"
ELEMENTS = 512
TERMS = (2, 3, 8, 64)
ALGORITHMS = ("ring", "tree", "direct")
OPS = ("sum", "avg")

Bits = NDArray[Any]
Cases = dict[str, Bits]  # by the names of the arrays


class Format(NamedTuple):
    """A type of floating-point numbers."""

    dtype: torch.dtype
    exponent_bits: int
    fraction_bits: int

    @property
    def bits(self) -> Any:
        """The type of bit patterns."""
        return np.uint32 if self.dtype == torch.float32 else np.uint16

    @property
    def infinity(self) -> int:
        return ((1 << self.exponent_bits) - 1) << self.fraction_bits

    @property
    def one(self) -> int:
        """The exponent of 1."""
        return (1 << self.exponent_bits - 1) - 1

    def value(self, pattern: int) -> int | float:
        """The number in units of the smallest subnormal one: an integer, or Inf or NaN."""
        sign = -1 if pattern >> self.exponent_bits + self.fraction_bits else 1
        exponent = pattern >> self.fraction_bits & (1 << self.exponent_bits) - 1
        fraction = pattern & (1 << self.fraction_bits) - 1
        if exponent == (1 << self.exponent_bits) - 1:
            return float("nan") if fraction else sign * float("inf")
        return sign * (fraction if not exponent else (fraction | 1 << self.fraction_bits) << exponent - 1)

    def nearest(self, total: int, divisor: int) -> int:
        """The pattern of the number nearest to the quotient, ties to even; an exact zero is +0."""
        shift = max(0, (abs(total) // divisor).bit_length() - 1 - self.fraction_bits)
        unit = divisor << shift
        units, rest = divmod(abs(total), unit)
        units += 2 * rest > unit or (2 * rest == unit and units % 2)
        # The next exponent if it rounded up to a power of two: patterns follow each other as the numbers do.
        pattern = min((shift << self.fraction_bits) + units, self.infinity)
        return pattern | (total < 0) << self.exponent_bits + self.fraction_bits


FORMATS = {
    "fp32": Format(torch.float32, 8, 23),
    "bf16": Format(torch.bfloat16, 8, 7),
    "fp16": Format(torch.float16, 5, 10),
}


class _Draw:
    """Random bit patterns [terms, elements] of a format, from the raw output of a generator."""

    def __init__(self, name: str, terms: int) -> None:
        seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
        self._generator, self._shape = np.random.PCG64(seed), (terms, ELEMENTS)

    def below(self, bound: int) -> NDArray[np.int64]:
        raw = self._generator.random_raw(self._shape)
        return (np.asarray(raw) >> np.uint64(16)).astype(np.int64) % bound

    def numbers(self, form: Format, low: int, high: int) -> NDArray[np.int64]:
        """Numbers of either sign with exponents from ``low`` to ``high``."""
        sign = self.below(2) << form.exponent_bits + form.fraction_bits
        exponent = (low + self.below(high - low + 1)) << form.fraction_bits
        return sign | exponent | self.below(1 << form.fraction_bits)


def _plain(draw: _Draw, form: Format) -> NDArray[np.int64]:
    return draw.numbers(form, form.one - 6, form.one + 1)


def _wide(draw: _Draw, form: Format) -> NDArray[np.int64]:
    return draw.numbers(form, 0, 2 * form.one)


def _subnormal(draw: _Draw, form: Format) -> NDArray[np.int64]:
    return draw.numbers(form, 0, 1)


def _outliers(draw: _Draw, form: Format) -> NDArray[np.int64]:
    x = _plain(draw, form)
    x[draw.below(200) == 0] += 6 << form.fraction_bits
    return x


def _cancelling(draw: _Draw, form: Format) -> NDArray[np.int64]:
    """Every second term is the negative of the one before it, or differs from that in the last bit."""
    x, last = _wide(draw, form), draw.below(2)
    pairs = len(x) // 2
    x[1 : 2 * pairs : 2] = x[: 2 * pairs : 2] ^ 1 << form.exponent_bits + form.fraction_bits ^ last[:pairs]
    return x


def _ties(draw: _Draw, form: Format) -> NDArray[np.int64]:
    """The second term is half a unit in the last place of the first; the others are zeros or the smallest number."""
    x, sign = (
        draw.numbers(form, form.fraction_bits + 2, 2 * form.one - 1),
        form.exponent_bits + form.fraction_bits,
    )
    exponents = x[0] >> form.fraction_bits & (1 << form.exponent_bits) - 1
    x[1] = (exponents - form.fraction_bits - 1) << form.fraction_bits | x[1] >> sign << sign
    x[2:] = (draw.below(3) == 0)[2:] | draw.below(2)[2:] << sign
    return x


def _not_finite(draw: _Draw, form: Format) -> NDArray[np.int64]:
    x, kind = _plain(draw, form), draw.below(40)
    for number, pattern in enumerate(
        (form.infinity, form.infinity | 1 << form.fraction_bits + form.exponent_bits)
    ):
        x[kind == number] = pattern
    x[kind == 2] = form.infinity | 1 << form.fraction_bits - 1
    return x


KINDS: dict[str, Callable[[_Draw, Format], NDArray[np.int64]]] = {
    "plain": _plain, "wide": _wide, "subnormal": _subnormal, "outliers": _outliers, "cancelling": _cancelling,
    "ties": _ties, "not-finite": _not_finite,
}  # fmt: skip


def make() -> Cases:
    """Return the arrays of all cases."""
    cases: Cases = {}
    for type_name, form in FORMATS.items():
        for kind, draw in KINDS.items():
            for terms in TERMS:
                name = f"{type_name}.{kind}.{terms}"
                inputs = draw(_Draw(name, terms), form).astype(form.bits)
                columns = [[form.value(pattern) for pattern in column] for column in inputs.T.tolist()]
                cases[f"{name}.inputs"] = inputs
                for op, divisor in zip(OPS, (1, terms), strict=True):
                    results = [_result(form, column, divisor) for column in columns]
                    cases[f"{name}.{op}"] = np.array(results, form.bits)
    return cases


def _result(form: Format, values: list[int | float], divisor: int) -> int:
    special = sum(value for value in values if isinstance(value, float))
    if isinstance(special, float):
        if special != special:
            return form.infinity | 1 << form.fraction_bits - 1
        return form.infinity | (special < 0) << form.exponent_bits + form.fraction_bits
    return form.nearest(sum(value for value in values if isinstance(value, int)), divisor)


def digest(cases: Cases) -> str:
    """Return a hash of the arrays and their names."""
    total = hashlib.sha256()
    for name in sorted(cases):
        total.update(f"{name} {cases[name].dtype} {cases[name].shape}\n".encode())
        total.update(np.ascontiguousarray(cases[name]).tobytes())
    return total.hexdigest()


def read(path: Path) -> Cases:
    """Read a file; ValueError if it holds anything but complete cases."""
    try:
        with np.load(path, allow_pickle=False) as arrays:
            cases = dict(arrays)
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(f"FILE: cannot read {path}: {error}") from None
    for name in {key.rpartition(".")[0] for key in cases}:
        form, inputs = FORMATS.get(name.partition(".")[0]), cases.get(f"{name}.inputs")
        arrays = [inputs, *(cases.get(f"{name}.{op}") for op in OPS)]
        if form is None or inputs is None or inputs.ndim != 2 or not inputs.size:
            raise ValueError(
                f"FILE: {path}: {name}.inputs is not an array [terms, elements] of fp32, fp16 or bf16"
            )
        shapes = (inputs.shape, *[inputs.shape[1:]] * 2)
        for array, shape in zip(arrays, shapes, strict=True):
            if array is None or array.dtype != form.bits or array.shape != shape:
                raise ValueError(
                    f"FILE: {path}: {name} is not complete, or has arrays of other shapes or types"
                )
    if not cases:
        raise ValueError(f"FILE: {path} has no cases")
    return cases


def check(cases: Cases) -> dict[str, int]:
    """Sum the cases with dtcomm's own code; return for each case and way the number of wrong elements.

    Each case is summed by one process, and by as many ranks as it has terms, up to 8, with several algorithms.
    """
    names = sorted({key.rpartition(".")[0] for key in cases})
    wrong = _sum(0, 1, cases, names)
    by_ranks: dict[int, list[str]] = {}
    for name in names:
        terms = len(cases[f"{name}.inputs"])
        by_ranks.setdefault(max(n for n in range(1, 9) if terms % n == 0), []).append(name)
    for ranks, of_ranks in by_ranks.items():
        for found in run_ranks(_sum, ranks, cases, of_ranks, timeout=300) if ranks > 1 else ():
            wrong |= {key: max(count, wrong.get(key, 0)) for key, count in found.items()}
    return wrong


def _sum(rank: int, ranks: int, cases: Cases, names: list[str]) -> dict[str, int]:
    """Sum the cases on a rank. One rank needs no process group."""
    wrong: dict[str, int] = {}
    for name in names:
        form = FORMATS[name.partition(".")[0]]
        terms = [torch.from_numpy(row.copy()).view(form.dtype) for row in cases[f"{name}.inputs"]]
        own = len(terms) // ranks
        for op in OPS:
            divisor = len(terms) if op == "avg" else 1
            part = terms[rank * own : (rank + 1) * own]
            sums = {"": sum_terms(part, len(terms), divisor=divisor, alone=ranks == 1)}
            for algorithm in ALGORITHMS if len(terms) == ranks > 1 else ():
                sums[f", {algorithm}"] = total = terms[rank].clone()
                all_reduce(total, op, codec=ROUNDED, algorithm=algorithm)
            expected = torch.from_numpy(cases[f"{name}.{op}"].copy()).view(form.dtype)
            kind = torch.int32 if form.dtype == torch.float32 else torch.int16
            for way, made in sums.items():
                same = (made.view(kind) == expected.view(kind)) | (made.isnan() & expected.isnan())
                wrong[f"{name} {op} on {ranks} rank{'s' if ranks > 1 else ''}{way}"] = int((~same).sum())
    return wrong


def main(argv: list[str]) -> int:
    """Run ``dtcomm exact``; return 1 if a sum is wrong or a file cannot be used."""
    parser = argparse.ArgumentParser(
        prog="dtcomm exact", description="Correctly rounded sums: files of inputs and expected bits."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser(
        "check", help="sum the cases of files, and compare every bit of the results"
    )
    command.add_argument(
        "files", nargs="*", metavar="FILE", type=Path, help="files to check (default: new cases)"
    )
    command.add_argument("--make", metavar="FILE", type=Path, help="write the cases to this .npz file")
    command.add_argument("--json", nargs="?", const="-", help="write figures as JSON to a file, - for stdout")
    options = parser.parse_args(argv)
    try:
        sources = {str(path): read(path) for path in options.files}
        if options.make or not sources:
            sources = {str(options.make or "cases"): make(), **sources}
        if options.make:
            with options.make.open("wb") as file:
                np.savez(file, allow_pickle=False, **sources[str(options.make)])
        figures: dict[str, Any] = {}
        for source, cases in sources.items():
            found = check(cases)
            failed = {key: count for key, count in found.items() if count}
            figures[source] = {
                "sha256": digest(cases),
                "elements": sum(array[0].size for key, array in cases.items() if key.endswith(".inputs")),
                "sums": len(found),
                "wrong": failed,
            }
    except (OSError, ValueError) as error:
        print(f"dtcomm exact check: {error}", file=sys.stderr)
        return 1
    if write_json(figures, options.json):
        for source, values in figures.items():
            known = "the cases of this version" if values["sha256"] == DIGEST else "other cases"
            print(f"{source}: {known}, sha256 {values['sha256']}")
            print(
                f"  {values['sums']} sums of {values['elements']} elements, {len(values['wrong'])} sums wrong"
            )
            for key, count in values["wrong"].items():
                print(f"  {key}: {count} wrong elements")
    return 1 if any(values["wrong"] for values in figures.values()) else 0
