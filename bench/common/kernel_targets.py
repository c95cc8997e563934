"""Targets of ``bench.kernels`` and the verdicts on a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

KB, MB = 1 << 10, 1 << 20
CACHE, DRAM = 256 * KB, 64 * MB

FIRST = ("int8", "int4", "fp8_e4m3")  # the first tier
FASTER_THAN_MEMCPY = {
    ("encode", DRAM): 1.5,
    ("encode", CACHE): 0.5,
    ("decode", DRAM): 2.0,
    ("decode", CACHE): 1.2,
}
OF_INT8 = 0.7  # the other integers and mx, encode and decode
OF_THE_FLOOR = {"reduce of 2": 0.7, "encode with residual": 0.7}  # in DRAM
LOSSLESS_DECODE = 0.5  # times memcpy, of bf16
FASTER_THAN_TORCH = {"int": 20.0, "topk": 40.0}  # in DRAM, by how a codec's name starts


def verdicts(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return PASS or MISS for every target for which `rows` (of ``bench.kernels.report``) have a figure."""
    rows_by_verb: dict[tuple[str, str, int], Mapping[str, Any]] = {}
    for row in rows:
        if row["codec"]:
            rows_by_verb[row["codec"], row["verb"], row["bytes"]] = row
    entries = []

    def judge(row: Mapping[str, Any], quantity: str, figure: float | None, least: float) -> None:
        if figure is not None:
            case = {"codec": row["codec"], "verb": row["verb"], "bytes": row["bytes"]}
            verdict = "PASS" if figure >= least else "MISS"
            entries.append({**case, "what": quantity, "figure": figure, "least": least, "verdict": verdict})

    for (spec, verb, size), row in rows_by_verb.items():
        if spec in FIRST and (verb, size) in FASTER_THAN_MEMCPY:
            judge(row, "x memcpy", row["times_memcpy"], FASTER_THAN_MEMCPY[verb, size])
        elif spec.startswith(("int", "mx")) and ":" not in spec and verb in ("encode", "decode"):
            int8 = rows_by_verb.get(("int8", verb, size))
            if int8 is not None:
                figure = round(row["times_memcpy"] / int8["times_memcpy"], 3)
                judge(row, "of int8's speed", figure, OF_INT8)
        if spec == "lossless" and verb == "decode, bfloat16":
            judge(row, "x memcpy", row["times_memcpy"], LOSSLESS_DECODE)
        plain = ":" not in spec and not spec.startswith(("topk", "randk", "none"))
        if size == DRAM and verb in OF_THE_FLOOR and plain:
            judge(row, "of the floor", row["fraction_of_floor"], OF_THE_FLOOR[verb])
        for start, least in FASTER_THAN_TORCH.items():
            if size == DRAM and spec.startswith(start):
                judge(row, "x torch", row["times_torch"], least)
    return entries
