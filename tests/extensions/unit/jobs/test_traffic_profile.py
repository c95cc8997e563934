"""Profiles derived by symmetry equal those of enumerated schedules."""

import pytest
import torch

from dtcomm import algorithms
from dtcomm.codecs import codec
from dtcomm.extensions.jobs import traffic_profile as profiles
from dtcomm.extensions.jobs.traffic_profile import StepLoad, profile, profile_of_paths, profile_of_schedule
from dtcomm.schedule.simulate import ComputeCost, LinkCost, simulate

SHAPES = [
    *[(1, 1), (2, 2), (2, 1), (3, 3), (4, 2), (5, 5), (6, 3), (8, 4), (9, 3)],
    *[(12, 4), (12, 1), (16, 4), (17, 1)],
]
LEVELS = ("", ":ring/tree", ":halving/double_tree", ":one_shot/two_shot")
CASES = [
    (collective, name)
    for collective in algorithms.collectives()
    for algorithm in algorithms.available(collective)
    for name in (
        [f"{algorithm}{levels}" for levels in LEVELS] if algorithm == "hierarchical" else [algorithm]
    )
    if not (collective != "all_reduce" and name.endswith(("double_tree", "two_shot", "tree")) and "/" in name)
]


@pytest.mark.parametrize(("collective", "name"), CASES)
def test_profiles_by_symmetry_equal_enumerated_ones(collective: str, name: str) -> None:
    for ranks, per_host in SHAPES:
        schedule = algorithms.build(name, collective, ranks, hosts=(per_host,) * (ranks // per_host))
        enumerated = profile_of_schedule(schedule, per_host)
        assert enumerated.encodings == schedule.requantizations()
        if (name, collective) == ("one_shot", "all_reduce"):
            assert profiles._one_shot(ranks, per_host) == enumerated
        paths = profiles.chunk_paths(name, collective, ranks, per_host)
        if paths is not None:
            assert profile_of_paths(paths, per_host) == enumerated


@pytest.mark.parametrize(("collective", "name"), CASES)
def test_loads_have_the_cost_of_the_simulator(collective: str, name: str) -> None:
    none, work = codec("none"), ComputeCost(encode=3e-10, decode=1e-10)
    links = (
        LinkCost(latency=1e-6, bandwidth=1e9, overhead=1e-7),
        LinkCost(latency=2e-5, bandwidth=1e8, overhead=3e-6),
    )
    for ranks, per_host in ((4, 2), (6, 3), (5, 5)):
        schedule = algorithms.build(name, collective, ranks, hosts=(per_host,) * (ranks // per_host))
        numel = 1024 * schedule.chunks * ranks
        result = profile(name, collective, ranks, per_host)
        chunk = schedule.chunk_numel(0, numel, none.granularity)

        def seconds(load: StepLoad, chunk: int = chunk) -> float:
            wires = [
                link.seconds(count * 4 * chunk, count)
                for link, count in zip(links, (load.inside, load.between))
                if count
            ]
            return max(wires, default=0.0) + chunk * (load.encode * work.encode + load.decode * work.decode)

        line = simulate(
            schedule,
            numel,
            none,
            links,
            work,
            torch.float32,
            lambda t, size=per_host: int(t.src // size != t.dst // size),  # type: ignore[misc]
        )
        assert sum(count * seconds(load) for load, count in result.loads) == pytest.approx(line.seconds)


def test_many_ranks_have_profiles_whose_schedules_are_too_large_to_build() -> None:
    two_shot = profile("two_shot", "all_reduce", 2_000, 8)
    assert two_shot is not None and two_shot.steps == 2
    assert two_shot.total().between == 2 * (2_000 - 8)
    result = profile("hierarchical", "all_reduce", 2_000, 8)
    # Two shots inside, and halving and doubling among 250 hosts.
    assert result is not None and result.steps == 2 + 2 * 8
    assert result.total().between / result.chunks == pytest.approx(2 * 249 / 2_000)


def test_schedules_too_large_to_build_have_no_profile() -> None:
    assert profile("halving", "broadcast", 1000, 8) is None
    with pytest.raises(ValueError, match="per_host: 8 does not divide 12"):
        profile("ring", "all_reduce", 12, 8)
