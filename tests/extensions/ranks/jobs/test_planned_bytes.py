"""The bytes that the planner predicts for experts are those that `dtcomm.moe` sends."""

from __future__ import annotations

import itertools
import os

import pytest
import torch

from dtcomm import moe
from dtcomm.extensions.jobs import ExpertRoutes, ExpertTraffic
from dtcomm.extensions.jobs.network import RETURN_CODEC
from dtcomm.launch.ranks import run_ranks
from dtcomm.moe.route import BACKWARD_CODEC, COMBINE_CODEC

EXPERTS, CHOICES, FEATURES, REPEATS = 8, 2, 160, 3


def test_the_planner_has_the_default_codecs() -> None:
    assert RETURN_CODEC == COMBINE_CODEC == BACKWARD_CODEC


def balanced_choices() -> torch.Tensor:
    """Return every set of experts equally often, so that averages over tokens are those of the planner."""
    every = list(itertools.combinations(range(EXPERTS), CHOICES))
    return torch.tensor(every * REPEATS)


def routes_of(ranks: int, hosts: int, hierarchical: bool) -> ExpertRoutes:
    sizes = {"tokens": len(balanced_choices()), "experts": EXPERTS, "top_k": CHOICES}
    return ExpertRoutes(**sizes, hosts=hosts, per_host=ranks // hosts, hierarchical=hierarchical)


def measure(rank: int, ranks: int, hosts: int, hierarchical: bool, codec: str) -> dict[str, dict[str, int]]:
    """Return the bytes that a rank sends in one forward and backward pass, by message and by what they carry."""
    os.environ["DTCOMM_HOST_ID"] = f"host {rank * hosts // ranks}"
    choices = balanced_choices()
    state = moe.MoEState()
    x = torch.randn(len(choices), FEATURES, requires_grad=True)
    weights = torch.rand(choices.shape, requires_grad=True)
    rows, route = moe.dispatch(x, choices, EXPERTS, codec=codec, hierarchical=hierarchical)
    moe.combine(rows * 2, route, weights).sum().backward()
    routes = routes_of(ranks, hosts, hierarchical)
    for sent, outside in ((route.rows_between_hosts, True), (route.rows_inside_host, False)):
        planned = sum(count * rows for leaves, count, rows in routes.messages() if leaves is outside)
        assert sent == pytest.approx(planned)
    measured: dict[str, dict[str, int]] = {}
    for message in state.report().by_message:
        measured.setdefault(message.name, {})[message.what] = message.wire_bytes
    return measured


@pytest.mark.parametrize("codec", ["none", "fp8_e4m3", "int8"])
@pytest.mark.parametrize(("hosts", "hierarchical"), [(1, False), (2, False), (2, True)])
def test_bytes_of_experts_are_those_predicted(hosts: int, hierarchical: bool, codec: str) -> None:
    ranks = 4
    routes = routes_of(ranks, hosts, hierarchical)
    traffic = ExpertTraffic(routes=routes, features=FEATURES, codec=codec, dtype=torch.float32)
    planned = traffic.forward() | traffic.backward()
    for measured in run_ranks(measure, ranks, hosts, hierarchical, codec):
        if hierarchical:
            assert measured == {
                "between hosts": {what: round(sent[0]) for what, sent in planned.items()},
                "inside hosts": {what: round(sent[1]) for what, sent in planned.items()},
            }
        else:
            assert measured == {"all ranks": {what: round(sum(sent)) for what, sent in planned.items()}}
