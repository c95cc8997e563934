"""Simulated times against times computed by hand."""

import pytest

from dtcomm import algorithms
from dtcomm.schedule import Schedule, Transfer, simulate
from dtcomm.schedule.simulate import ComputeCost, LinkCost


class UncompressedCodec:
    granularity = 1

    def wire_bytes(self, numel: int, dtype: object = None) -> int:
        return 4 * numel


LINK = LinkCost(latency=1e-6, bandwidth=1e9)


def test_ring_takes_two_rounds_of_shards() -> None:
    line = simulate(algorithms.build("ring", "all_reduce", 4), 4000, UncompressedCodec(), LINK)
    assert len(line.steps) == 6
    assert line.seconds == pytest.approx(6 * (1e-6 + 4000e-9))
    assert [step.nbytes for step in line.steps] == [4000] * 6


def test_one_port_is_shared_by_all_messages_of_a_step() -> None:
    line = simulate(algorithms.build("one_shot", "all_reduce", 4), 1000, UncompressedCodec(), LINK)
    assert line.seconds == pytest.approx(1e-6 + 3 * 4000e-9)
    fan_in = simulate(algorithms.build("one_shot", "broadcast", 4), 1000, UncompressedCodec(), LINK)
    assert fan_in.seconds == line.seconds


def test_arithmetic_is_counted_where_it_happens() -> None:
    work = ComputeCost(encode=2e-9, decode=1e-9)
    (step,) = simulate(
        algorithms.build("one_shot", "all_reduce", 4), 1000, UncompressedCodec(), LINK, work
    ).steps
    assert step.encode == pytest.approx(2e-6)
    assert step.decode == pytest.approx(4e-6)  # its own bytes are decoded too
    scatter, gather = simulate(
        algorithms.build("two_shot", "all_reduce", 4), 1000, UncompressedCodec(), LINK, work
    ).steps
    # Three chunks of 250 are encoded to be sent, then the sum of the fourth.
    assert scatter.encode == pytest.approx(4 * 250 * 2e-9)
    assert scatter.decode == pytest.approx(4 * 250 * 1e-9)
    assert gather.encode == 0
    assert gather.decode == pytest.approx(3 * 250 * 1e-9)


def test_compression_is_faster_only_on_a_slow_link() -> None:
    class QuarterSizeCodec(UncompressedCodec):
        def wire_bytes(self, numel: int, dtype: object = None) -> int:
            return numel

    ring, work = algorithms.build("ring", "all_reduce", 8), ComputeCost(encode=1e-10, decode=1e-10)
    for bandwidth, pays in ((1e9, True), (1e12, False)):
        link = LinkCost(latency=1e-6, bandwidth=bandwidth)
        plain = simulate(ring, 10**6, UncompressedCodec(), link).seconds
        assert (simulate(ring, 10**6, QuarterSizeCodec(), link, work).seconds < plain) is pays


def test_levels_have_links_of_their_own() -> None:
    schedule = Schedule(
        collective="broadcast",
        ranks=3,
        chunks=1,
        transfers=(Transfer(0, 0, 1, 0, "copy"), Transfer(1, 0, 2, 0, "copy", 1)),
    )
    slow = LinkCost(latency=1e-5, bandwidth=1e8)
    near, far = simulate(schedule, 250, UncompressedCodec(), [LINK, slow]).steps
    assert near.wire == pytest.approx(2e-6)
    assert far.wire == pytest.approx(2e-5)
    with pytest.raises(ValueError, match=r"level 1, got 1 link\(s\)"):
        simulate(schedule, 250, UncompressedCodec(), LINK)


def test_one_rank_takes_no_time() -> None:
    assert simulate(algorithms.build("ring", "all_reduce", 1), 100, UncompressedCodec(), LINK).seconds == 0


def test_invalid_links_are_refused() -> None:
    with pytest.raises(ValueError, match="bandwidth > 0"):
        LinkCost(latency=0, bandwidth=0)
