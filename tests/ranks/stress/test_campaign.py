"""A slice of the fault campaign: every phase, action and transport at least once, most on three ranks.

`python -m tests.stress.campaign` runs all combinations twenty times.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.stress.campaign import run_all
from tests.stress.campaign_cases import CHILDREN, MISMATCHES, OPERATIONS, Case, make_case
from tests.support.ucx import requires_ucx


def failures(chosen: list[Case], folder: Path) -> list[str]:
    """Run cases, several at once; return their complaints behind the commands that repeat them."""
    # Few at once: two other files of tests run beside this one, and reports must come within two seconds.
    verdicts = run_all(chosen, 3, 0, str(folder))
    return [
        "\n".join((case.command(0), *verdict.complaints)) for case, verdict in verdicts if verdict.complaints
    ]


def test_dead_ranks_are_named_at_once(tmp_path: Path) -> None:
    chosen = [make_case(phase, "kill", "memory", 3, i) for i, phase in enumerate(OPERATIONS)]
    chosen += [make_case(phase, "kill", "sockets", 3, i) for i, phase in enumerate(OPERATIONS)]
    chosen += [make_case(phase, "kill", "gloo", 3, 0) for phase in ("before", "all_reduce")]
    assert failures(chosen, tmp_path) == []


@requires_ucx
def test_dead_ranks_are_named_at_once_over_ucx(tmp_path: Path) -> None:
    chosen = [make_case(phase, "kill", "ucx", 3, i) for i, phase in enumerate(OPERATIONS)]
    chosen += [
        make_case("connect", "kill", "ucx", 3, 0, large=False),
        make_case("all_reduce", "stop", "ucx", 3, 0),
    ]
    assert failures(chosen, tmp_path) == []


@requires_ucx
def test_ranks_that_fork_pause_or_close_cause_no_false_error_over_ucx(tmp_path: Path) -> None:
    chosen = [make_case("fork", action, "ucx", 2, 0) for action in ("kill", "child is killed")]
    chosen += [make_case("broadcast", "pause", "ucx", 3, 2), make_case("in_close", "pause", "ucx", 3, 0)]
    chosen += [make_case("call", "other op", "ucx", 3, 0), make_case("before_close", "kill", "ucx", 3, 1)]
    assert failures(chosen, tmp_path) == []


def test_stopped_ranks_are_named_at_the_timeout(tmp_path: Path) -> None:
    chosen = [make_case("all_reduce", "stop", transport, 3, 0) for transport in ("memory", "sockets", "gloo")]
    chosen += [make_case("call", "absent", transport, 3, 0) for transport in ("memory", "gloo")]
    assert failures(chosen, tmp_path) == []


@pytest.mark.parametrize("transport", ["memory", "sockets", "gloo"])
def test_rank_that_dies_during_the_rendezvous_is_named(tmp_path: Path, transport: str) -> None:
    # "read": the others have its process from the message that it sent before it died.
    chosen = [
        make_case("publish", "kill", transport, 3, 0, known=True),
        make_case("read", "kill", transport, 3, 0, known=False),
        make_case("connect", "stop and kill", transport, 3, 0, large=False),
        make_case("agree", "kill", transport, 3, 0),
    ]
    assert failures(chosen, tmp_path) == []


@pytest.mark.parametrize("transport", ["memory", "gloo"])
def test_rank_that_stops_during_the_rendezvous_is_the_only_one_named(tmp_path: Path, transport: str) -> None:
    chosen = [
        make_case(phase, "stop", transport, 4, i, known=False, large=False)
        for i, phase in enumerate(("publish", "read", "connect", "agree"))
    ]
    assert failures(chosen, tmp_path) == []


def test_rank_without_memory_or_descriptors_ends_the_rendezvous_of_all(tmp_path: Path) -> None:
    chosen = [make_case("publish", "no memory", transport, 3, 0) for transport in ("memory", "sockets")]
    chosen.append(make_case("publish", "no descriptors", "memory", 3, 0, spare=0))
    assert failures(chosen, tmp_path) == []


def test_forked_children_do_not_matter(tmp_path: Path) -> None:
    chosen = [
        make_case("fork", action, "sockets", 2, 0)
        for action in ("kill", *CHILDREN)
        if action != "child exits"
    ]
    chosen.append(make_case("fork", "kill", "memory", 2, 1))
    assert failures(chosen, tmp_path) == []


def test_ranks_that_pause_or_close_cause_no_false_error(tmp_path: Path) -> None:
    chosen = [make_case("broadcast", "pause", transport, 3, 2) for transport in ("memory", "sockets", "gloo")]
    chosen += [make_case("in_close", "pause", "memory", 3, i) for i in range(2)]
    chosen += [make_case("before_close", "kill", "sockets", 3, i) for i in range(2)]
    assert failures(chosen, tmp_path) == []


def test_ranks_that_call_something_else_are_named(tmp_path: Path) -> None:
    chosen = [make_case("call", action, "memory", 3, i) for i, action in enumerate(MISMATCHES)]
    chosen += [make_case("call", "other op", transport, 3, 0) for transport in ("sockets", "gloo")]
    assert failures(chosen, tmp_path) == []
