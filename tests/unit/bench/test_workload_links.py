"""Which methods bench.workload_links measures."""

from __future__ import annotations

from bench import workload_links
from bench.training.recommendation import RECOMMENDATION
from bench.training.units import VARIANTS
from bench.training.vision import VISION


def test_methods_without_feedback_take_the_time_of_those_with_it() -> None:
    names = workload_links.timed(VISION)
    assert {"none", "torch's fp16 hook", "torch's bf16 hook", "int8", "DGC 1 %", "topk 1 %, EF21"} <= set(
        names
    )
    assert not any("no feedback" in name or "frozen" in name for name in names)
    assert "DGC 1 %" not in workload_links.timed(RECOMMENDATION)
    assert {workload_links.timed_as(variant) for variant in VARIANTS.values()} <= {*names, "DGC 1 %"}
    assert workload_links.timed_as(VARIANTS["int2, frozen variance"]) == "int2"
    assert workload_links.timed_as(VARIANTS["torch's bf16 hook"]) == "torch's bf16 hook"
