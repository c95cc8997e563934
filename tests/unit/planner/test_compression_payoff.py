"""Whether a codec pays at a size, by the planner's constants and by measurements."""

from __future__ import annotations

import json
from dataclasses import replace

import torch

from dtcomm.codecs import codec
from dtcomm.planner.cost_model import Measured, Table
from dtcomm.planner.select_algorithm import compression_pays
from dtcomm.schedule.simulate import LinkCost

INT8 = codec("int8")


def test_compression_pays_for_large_messages_between_hosts() -> None:
    for hosts in (1, 2):
        verdict = compression_pays(INT8, 1024, torch.float32, 2, hosts, "")
        assert not verdict.pays
        assert verdict.reason.startswith("int8 ") and "(predicted, dtcomm's own constants)" in verdict.reason
    assert compression_pays(INT8, 1 << 20, torch.float32, 2, 2, "").pays
    assert not compression_pays(
        codec("fp16"), 1 << 20, torch.float16, 2, 2, ""
    ).pays  # it loses nothing and saves nothing
    assert not compression_pays(INT8, 1 << 20, torch.float32, 1, 1, "").pays


def test_launches_on_the_host_count_on_a_device() -> None:
    verdicts = [
        compression_pays(INT8, 1 << 15, torch.float32, 2, 2, "", on_device=on_device)
        for on_device in (False, True)
    ]
    assert [verdict.pays for verdict in verdicts] == [True, False]
    assert compression_pays(INT8, 1 << 24, torch.float32, 2, 2, "", on_device=True).pays


def test_no_gain_is_predicted_where_ranks_share_memory() -> None:
    for spec in ("bf16", "int8"):
        for numel in (1 << 20, 1 << 26):
            assert not compression_pays(codec(spec), numel, torch.float32, 2, 1, "").pays
    slow = Table(inside=LinkCost(latency=2e-5, bandwidth=1.25e9), source="an emulated link")
    assert compression_pays(INT8, 1 << 20, torch.float32, 2, 1, json.dumps(slow.as_dict())).pays


def test_measurements_override_the_model() -> None:
    def points(*us: float) -> tuple[tuple[int, float], ...]:
        return tuple(
            (size, microseconds * 1e-6) for size, microseconds in zip((4096, 65536), us, strict=True)
        )

    plain = Measured(
        collective="all_reduce", algorithm="one_shot", codec="none", ranks=2, hosts=1, points=points(10, 90)
    )
    coded = replace(plain, algorithm="two_shot", codec="int8", points=points(20, 30))
    text = json.dumps(Table(measured=(plain, coded), source="a test").as_dict())
    assert not compression_pays(INT8, 1024, torch.float32, 2, 1, text).pays
    verdict = compression_pays(INT8, 16384, torch.float32, 2, 1, text)
    assert verdict == (True, "int8 30 us, none 90 us for 16384 elements (measured, a test)")
