"""Systems, estimates and training steps."""

import pytest
import torch

from dtcomm import algorithms
from dtcomm.codecs import codec
from dtcomm.extensions.jobs import sweep
from dtcomm.extensions.jobs.estimate import estimate
from dtcomm.extensions.jobs.hardware import (
    PORTS,
    SYSTEMS,
    find_port,
    find_system,
    system_from_dict,
    system_from_links,
)
from dtcomm.extensions.jobs.training_model import (
    Bucket,
    even_buckets,
    replay,
    replay_sharded,
)
from dtcomm.planner import Measured, Table

MB, GB = 2**20, 2**30


@pytest.mark.parametrize("name", PORTS)
def test_estimates_on_every_kind_of_link(name: str) -> None:
    system = system_from_links(name, name)
    prediction = estimate("all_reduce", "ring", codec("int8"), system.resized(2, 2), MB)
    assert prediction is not None
    assert prediction.seconds > 0
    assert prediction.busbw == pytest.approx(1.5 * prediction.algbw)


@pytest.mark.parametrize("name", ["two_shot", "hierarchical", "ring"])
def test_what_leaves_a_host_is_that_of_the_schedule(name: str) -> None:
    hosts = [range(first, first + 4) for first in (0, 4, 8)]
    schedule = algorithms.build(name, "all_reduce", 12, hosts=(4, 4, 4))
    prediction = estimate("all_reduce", name, codec("int8"), find_system("h100").resized(3, 4), 12 * MB)
    assert prediction is not None
    assert prediction.leaving_bytes == max(schedule.bytes_leaving(hosts, 3 * MB, codec("int8")))
    plain = estimate("all_reduce", "ring", codec("none"), find_system("h100").resized(3, 4), 12 * MB)
    assert plain is not None and plain.leaving_bytes == 12 * MB * 2 * 11 // 12


def test_links_by_rate_and_by_parameters() -> None:
    assert find_port("40gbit").kind == "tcp"
    assert find_port("300Gbit").kind == "rdma"
    assert find_port({"kind": "tcp", "gbytes": 1, "latency_us": 2}).bandwidth == 1e9
    with pytest.raises(ValueError, match="link: 'nvlink9' is not one of nvlink2"):
        find_port("nvlink9")
    with pytest.raises(ValueError, match="link: 'speed' is not one of gbytes, kind"):
        find_port({"speed": 1})
    with pytest.raises(ValueError, match="gbytes: must be over 0"):
        find_port({"kind": "tcp", "gbytes": 0, "latency_us": 2})
    with pytest.raises(ValueError, match="system: 'h300' is not one of a100"):
        find_system("h300")
    assert find_system("H100") is SYSTEMS["h100"]


def test_peaks_are_dense() -> None:
    assert find_system("a100").device.peak_flops("bf16") == 312e12
    assert find_system("h100").device.peak_flops("bf16") == 989.4e12
    with pytest.raises(ValueError, match="compute: 'fp8' is not one of fp32, tf32, bf16, fp16"):
        find_system("h100").device.peak_flops("fp8")
    with pytest.raises(ValueError, match="no peak FLOP/s is known for the device cpu"):
        find_system("local").device.peak_flops("bf16")


def test_systems_from_topology_files() -> None:
    system = system_from_dict(
        {"system": "h100", "hosts": 4, "between": {"kind": "rdma", "gbytes": 20, "latency_us": 5}, "nics": 4}
    )
    assert (system.ranks, system.engine, system.host_bandwidth) == (32, "nccl", 80e9)
    with pytest.raises(ValueError, match="topology: 'host' is not one of name"):
        system_from_dict({"host": 4})
    with pytest.raises(ValueError, match="hosts: expected a whole number, got 'two'"):
        system_from_dict({"hosts": "two"})


def test_launches_on_the_host_bound_small_messages_of_gpus() -> None:
    system = find_system("h100").resized(1, 8)
    small, large = (
        estimate("all_reduce", "two_shot", codec("int8"), system, size) for size in (1 << 12, 1 << 28)
    )
    # Two calls, and three kernels: encode, sum and encode, decode.
    assert small.host_seconds == pytest.approx((2 * 30 + 3 * 15) * 1e-6)
    assert small.seconds >= small.host_seconds and large.seconds >= large.host_seconds > small.host_seconds
    plain = estimate("all_reduce", "nvls", codec("none"), system, 1 << 28)
    assert plain is not None and plain.host_seconds == pytest.approx(30e-6)
    local = estimate("all_reduce", "two_shot", codec("int8"), find_system("local"), 1 << 20)
    assert local is not None and local.host_seconds == 0.0


def test_compression_pays_on_slow_links_only() -> None:
    slow = sweep.run_sweep(
        system_from_links("memory", "1gbit").resized(2, 1), "all_reduce", [64 * MB], ["int8", "int4"]
    )
    none, int8, int4 = slow.rows
    assert none.speedup == 1
    # 64 MB took Gloo 562 ms over such a link.
    assert none.best.seconds == pytest.approx(0.562, rel=0.1)
    assert int8.speedup > 3.5 and int4.speedup > 6
    assert slow.verdicts[0].startswith("on this system int8 pays from ")

    for ranks in (2, 4):
        local = sweep.run_sweep(
            find_system("local").resized(1, ranks), "all_reduce", [1024, 64 * MB, GB], ["int8"]
        )
        assert local.break_even == {"int8": None}
        assert local.verdicts[0].startswith("on the local engine int8 is not faster than none")


def test_compression_pays_from_the_break_even_size() -> None:
    system = find_system("h100").resized(2, 8)
    break_even = sweep.run_sweep(system, "all_reduce", [], ["int8"]).break_even["int8"]
    assert break_even is not None
    before, after = sweep.run_sweep(system, "all_reduce", [int(break_even * 0.9), break_even], ["int8"]).rows[
        1::2
    ]
    assert before.speedup < sweep.MIN_SPEEDUP <= after.speedup


def test_a_sweep_is_limited_to_the_named_algorithms() -> None:
    system = find_system("h100").resized(2, 8)
    rows = sweep.run_sweep(system, "all_reduce", [MB], ["int8"], ["ring", "tree"]).rows
    assert {(row.best.codec, row.best.algorithm) for row in rows} == {
        (spec, name) for spec in ("none", "int8") for name in ("ring", "tree")
    }
    nvls_only = sweep.run_sweep(system, "all_reduce", [MB], ["int8"], ["nvls_tree"])
    assert [row.best.codec for row in nvls_only.rows] == ["none"]
    assert "none of the algorithms can carry it" in nvls_only.verdicts[0]
    with pytest.raises(ValueError, match="'rings' is not one of auto, all, nvls_tree, ring"):
        sweep.run_sweep(system, "all_reduce", [MB], [], ["rings"])


def test_a_sweep_of_8192_ranks() -> None:
    result = sweep.run_sweep(find_system("h100").resized(1024, 8), "all_reduce", [GB], ["int4"])
    assert [row.best.codec for row in result.rows] == ["none", "int4"]
    assert all(row.best.ranks == 8192 for row in result.rows)


def test_measured_times_take_precedence_only_on_cpus() -> None:
    point = Measured(
        collective="all_reduce", algorithm="ring", codec="none", ranks=2, hosts=1, points=((MB, 1.0),)
    )
    table, none = Table(measured=(point,)), codec("none")
    local = estimate("all_reduce", "ring", none, SYSTEMS["local"], MB, torch.float32, table)
    gpus = estimate("all_reduce", "ring", none, find_system("h100").resized(1, 2), MB, torch.float32, table)
    assert local is not None and gpus is not None
    assert (local.seconds, local.detail) == (1.0, "measured")
    assert gpus.seconds < 1


def test_early_buckets_overlap_with_the_backward_pass() -> None:
    buckets = [Bucket(nbytes=1, ready=1.0), Bucket(nbytes=1, ready=2.0)]
    fast = replay(buckets, lambda _: 0.25)
    assert (fast.seconds, fast.compute) == (2.25, 2.0)
    assert fast.hidden == pytest.approx(0.5)
    assert fast.efficiency == pytest.approx(2.0 / 2.25)
    slow = replay(buckets, lambda _: 2.0)
    assert slow.seconds == 1 + 2 + 2
    assert replay([], lambda _: 1.0).hidden == 1
    # Communication takes a core for a tenth of a second each: the second bucket is ready later, and so is the end.
    delayed = replay(buckets, lambda _: 0.25, lambda _: 0.1)
    assert delayed.seconds == pytest.approx(2.1 + 0.25) and delayed.compute == 2.0


def test_fsdp_overlaps_gathers_and_reductions_with_computing() -> None:
    # Only the first gathers of forward and backward and the last reduction are exposed.
    hidden = replay_sharded(4, forward=3.0, backward=6.0, gather=1.0, reduce=2.0)
    assert hidden.compute == 36 and hidden.communication == 4 * (2 * 1 + 2)
    assert hidden.seconds == 36 + 1 + 1 + 2
    # Without computing, all collectives follow each other.
    exposed = replay_sharded(4, forward=0.0, backward=0.0, gather=1.0, reduce=2.0)
    assert exposed.seconds == exposed.communication == 16
    assert replay_sharded(3, 1.0, 2.0, 0.0, 0.0).seconds == 9
    # Two gathers in forward, two in backward and two reductions are issued while something else is computed.
    delayed = replay_sharded(3, 1.0, 2.0, 0.0, 0.0, gather_delay=0.1, reduce_delay=0.2)
    assert delayed.seconds == pytest.approx(9 + 4 * 0.1 + 2 * 0.2) and delayed.compute == 9


def test_buckets_of_a_model() -> None:
    buckets = even_buckets(1e8, 4, 0.9, 25 * 2**20)
    assert sum(bucket.nbytes for bucket in buckets) == 4e8
    assert buckets[-1].ready == pytest.approx(0.9)
    assert min(bucket.ready for bucket in buckets) > 0.3


def test_a_plan_considers_a_registered_algorithm_only_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(algorithms, "REGISTERED", {})
    algorithms.register("mine", "all_reduce", lambda ranks: algorithms.build("tree", "all_reduce", ranks))
    system = find_system("local").resized(1, 4)
    rows = sweep.run_sweep(system, "all_reduce", [1024, 2**20], ["int8"], algorithms=("all",)).rows
    assert all("mine" not in (each.algorithm for each in (row.best, *row.others)) for row in rows)
    named = sweep.run_sweep(system, "all_reduce", [1024], ["int8"], algorithms=("mine",)).rows
    assert {row.best.algorithm for row in named} == {"mine"}
    algorithms.build.cache_clear()
    algorithms.build_single_level.cache_clear()
