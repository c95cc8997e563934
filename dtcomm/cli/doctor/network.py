"""``dtcomm doctor`` under torchrun: bandwidth and latency between the ranks of a job, before it starts.

Pairs of ranks exchange messages through `dtcomm.send` and `dtcomm.recv`, over what a job would use. Inside a host every
pair is measured. Between two hosts the n-th rank of one is paired with the n-th rank of the other. A host takes part in
one pair at a time, so that pairs do not share its network card. The ranks agree through the group's store, which works
also where their connections do not.

A link is slow if it has less than half the bandwidth of the best link of its kind (inside hosts, or between them), or
more than twice its latency. If all links of a rank or a host are slow, and others are not, that one is named.
"""

from __future__ import annotations

import json
import os
import platform
import socket
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from dtcomm import env
from dtcomm.cli import show_progress
from dtcomm.cli.doctor.checks import FAIL, NOTE, OK, Check
from dtcomm.runtime import emulated_link
from dtcomm.runtime.bootstrap.rendezvous import host_id
from dtcomm.runtime.process_groups import group_store, require_group

SLOW = 2.0  # times the bandwidth or latency of the best link of the same kind
LATENCY_MARGIN_US = 30.0  # differences below it are those of schedulers
TIMEOUT = timedelta(seconds=60)  # of connecting, and of every message
ROUND_TIMEOUT = timedelta(seconds=600)
_PINGS = 30
_TRANSFERS = 3
_TRANSFER_S = 0.02
_LEAST_BYTES, _MOST_BYTES = 1 << 20, 64 << 20
_MATRIX_RANKS = 16  # more ranks have no table


@dataclass(frozen=True, kw_only=True)
class LinkResult:
    """The measurements of a pair of ranks, the lower one first; ``error`` says why there are none.

    Attributes:
        level: "inside" a host or "between" hosts.
        gbit: The bandwidth in Gbit/s from the first to the second rank and back; empty if the pair failed.
        latency_us: Half of the time of a message of 4 bytes and its answer, in microseconds.
    """

    ranks: tuple[int, int]
    level: str
    gbit: tuple[float, ...] = ()
    latency_us: float = 0.0
    error: str = ""

    @property
    def least_gbit(self) -> float:
        """The bandwidth of the slower direction."""
        return min(self.gbit, default=0.0)


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """What is slow or failed, as lines of text; ``failures`` also has links that are worse than what was expected."""

    failures: list[str] = field(default_factory=list)
    slow: list[str] = field(default_factory=list)


def main(expect: str, as_json: bool) -> list[Check] | None:
    """Measure as one rank of a job that torchrun started; rank 0 returns the checks, the others None."""
    torch.set_num_threads(1)
    # The backend's own connections over Gloo are made when they are first used.
    import dtcomm.backend  # noqa: F401

    dist.init_process_group("dtcomm", timeout=TIMEOUT)
    try:
        return measure(expect, quiet=as_json)
    finally:
        dist.destroy_process_group()


def measure(expect: str = "", *, quiet: bool = False) -> list[Check] | None:
    """Measure as one rank of the default group; rank 0 returns the checks, the others None.

    ``expect`` says what links have to reach, as `emulated_link.parse` takes it; empty: nothing.
    """
    from dtcomm import collectives

    rank, size = dist.get_rank(), dist.get_world_size()
    limits = emulated_link.parse(expect, "--expect")
    store = c10d.PrefixStore("dtcomm_doctor", group_store(require_group(None)))
    store.set(f"rank {rank}", json.dumps(_description()))
    descriptions = [json.loads(store.get(f"rank {other}")) for other in range(size)]
    hosts = [text["host"] for text in descriptions]
    rounds = schedule(hosts)
    shows = rank == 0 and not quiet
    for number, pairs in enumerate(rounds):
        if shows:
            _show_round(number, pairs, len(rounds))
        for pair in pairs:
            if rank in pair:
                result = _measured(pair, hosts)
                if rank == pair[0]:
                    store.set(f"pair {pair}", json.dumps(asdict(result)))
        _meet(store, f"round {number}", size)
        # A rank would otherwise keep memory and connections for every peer. Not before both ranks of a pair are done,
        # because the last message may still be under way when `send` has returned.
        collectives.release()
    results = []
    if rank == 0:
        show_progress()
        for pair in (pair for pairs in rounds for pair in pairs):
            stored = json.loads(store.get(f"pair {pair}"))
            results.append(LinkResult(**{**stored, "ranks": pair, "gbit": tuple(stored["gbit"])}))
    _meet(store, "end", size)  # the process of rank 0 may serve the store
    if rank != 0:
        return None
    return [_software(descriptions), links_check(results, _host_names(descriptions), limits)]


def schedule(hosts: Sequence[str]) -> list[list[tuple[int, int]]]:
    """Return rounds of pairs of ranks to measure, from the ranks' hosts; in a round a host takes part in one pair."""
    members: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        members.setdefault(host, []).append(rank)
    names = list(members)
    pairs: list[tuple[int, int]] = []
    for at, first in enumerate(names):
        ranks = members[first]
        pairs += [(a, b) for k, a in enumerate(ranks) for b in ranks[k + 1 :]]
        for second in names[at + 1 :]:
            others = members[second]
            count = max(len(ranks), len(others))
            pairs += [(ranks[k % len(ranks)], others[k % len(others)]) for k in range(count)]
    rounds: list[tuple[list[tuple[int, int]], set[str]]] = []
    for a, b in sorted((min(pair), max(pair)) for pair in pairs):
        needed = {hosts[a], hosts[b]}
        for chosen, busy in rounds:
            if not busy & needed:
                chosen.append((a, b))
                busy |= needed
                break
        else:
            rounds.append(([(a, b)], needed))
    return [chosen for chosen, _ in rounds]


def _measured(pair: tuple[int, int], hosts: Sequence[str]) -> LinkResult:
    """Measure the link of this rank to the other one of a pair."""
    from dtcomm.errors import DtcommError

    level = "inside" if hosts[pair[0]] == hosts[pair[1]] else "between"
    leads = dist.get_rank() == pair[0]
    try:
        latency_s, gbit = _exchange(pair[1] if leads else pair[0], leads)
    except (DtcommError, OSError, RuntimeError) as error:
        text = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        return LinkResult(ranks=pair, level=level, error=text)
    return LinkResult(ranks=pair, level=level, gbit=gbit, latency_us=latency_s * 1e6)


def _exchange(peer: int, leads: bool) -> tuple[float, tuple[float, float]]:
    """The latency in seconds, and the bandwidth in Gbit/s in both directions, by the clock of the rank that leads.

    The best of several values counts: others are those of a busy processor.
    """
    from dtcomm import collectives

    short = torch.zeros(1)

    def swap(sends: torch.Tensor, receives: torch.Tensor, sends_first: bool) -> float:
        begun = time.perf_counter()
        if sends_first:
            collectives.send(sends, peer)
            collectives.recv(receives, peer)
        else:
            collectives.recv(receives, peer)
            collectives.send(sends, peer)
        return time.perf_counter() - begun

    round_trip = min(swap(short, short, leads) for _ in range(_PINGS))
    rates = []
    for forward in (True, False):
        sends = leads == forward
        count, rate = _LEAST_BYTES // 4, 0.0
        for trial in range(1 + _TRANSFERS):
            data = torch.ones(count)
            # The message, and its answer of 4 bytes; or a question of 4 bytes, and the message.
            elapsed = swap(data if sends else short, short if sends else data, leads)
            rate = max(rate, count * 32e-9 / max(elapsed - round_trip, 1e-6)) if trial else 0.0
            if trial == 0:  # the first message chooses the size of the others
                ideal = count * _TRANSFER_S / max(elapsed - round_trip, 1e-6)
                size = torch.tensor([min(max(int(ideal), _LEAST_BYTES // 4), _MOST_BYTES // 4)])
                swap(size, short, True) if leads else swap(short, size, False)
                count = int(size)
        rates.append(rate)
    return round_trip / 2, (rates[0], rates[1])


def _meet(store: c10d.Store, name: str, size: int) -> None:
    """Wait, asleep, until all ranks have come."""
    if store.add(name, 1) == size:
        store.set(f"{name} done", "1")
    store.wait([f"{name} done"], ROUND_TIMEOUT)


def _description() -> dict[str, Any]:
    """What the ranks tell each other about themselves."""
    import dtcomm

    return {
        "host": host_id(),
        "name": env.get("DTCOMM_HOST_ID") or socket.gethostname(),
        "software": f"dtcomm {dtcomm.__version__}, torch {torch.__version__}",
        "system": f"Python {platform.python_version()}, {platform.system()} {platform.machine()}",
        "variables": {
            name: env.printable(name, value) for name, value in os.environ.items() if name in env.VARIABLES
        },
    }


def _host_names(descriptions: Sequence[dict[str, Any]]) -> list[str]:
    """The name of each rank's host; hosts of equal names get numbers."""
    ids: dict[str, list[str]] = {}
    for text in descriptions:
        known = ids.setdefault(text["name"], [])
        if text["host"] not in known:
            known.append(text["host"])
    names = []
    for text in descriptions:
        number = ids[text["name"]].index(text["host"])
        names.append(f"{text['name']} #{number + 1}" if len(ids[text["name"]]) > 1 else text["name"])
    return names


def _software(descriptions: Sequence[dict[str, Any]]) -> Check:
    """Check that all ranks run the same versions; ``variables`` are compared when ranks connect."""
    versions: dict[str, list[int]] = {}
    for rank, text in enumerate(descriptions):
        versions.setdefault(f"{text['software']}, {text['system']}", []).append(rank)
    names = list(dict.fromkeys(_host_names(descriptions)))
    first, *others = versions
    where = f"host {names[0]}" if len(names) == 1 else f"{len(names)} hosts"
    summary = f"{len(descriptions)} ranks on {where}; {first}"
    for other in others:
        summary += f"; but ranks {', '.join(map(str, versions[other]))}: {other}"
    return Check(
        name="ranks",
        status=NOTE if others else OK,
        summary=summary,
        details={"hosts": names, "ranks": list(descriptions)},
    )


def links_check(results: Sequence[LinkResult], hosts: Sequence[str], limits: emulated_link.Links) -> Check:
    """The check ``links``: all measurements, and a diagnosis."""
    diagnosis = diagnose(results, hosts, limits)
    parts = []
    for level in ("inside", "between"):
        measured = [result for result in results if result.level == level and not result.error]
        if measured:
            gbit = [result.least_gbit for result in measured]
            latency = [result.latency_us for result in measured]
            where = "inside hosts" if level == "inside" else "between hosts"
            parts.append(
                f"{len(measured)} links {where}: {min(gbit):.3g} to {max(gbit):.3g} Gbit/s, "
                f"{min(latency):.3g} to {max(latency):.3g} µs"
            )
    found = [*diagnosis.failures, *diagnosis.slow]
    return Check(
        name="links",
        status=FAIL if diagnosis.failures else NOTE if diagnosis.slow else OK,
        summary="; ".join([*found, *parts]) or "one rank has no links",
        details={
            "failures": diagnosis.failures,
            "slow": diagnosis.slow,
            "links": [asdict(result) for result in results],
        },
    )


def diagnose(
    results: Iterable[LinkResult], hosts: Sequence[str], limits: emulated_link.Links | None = None
) -> Diagnosis:
    """Name the links that failed or miss ``limits``, and the hosts, ranks and links that are slower than others."""
    results, limits = list(results), limits or emulated_link.Links()
    failures, slow = [], []
    for level in ("inside", "between"):
        links = [result for result in results if result.level == level]
        broken = [result for result in links if result.error]
        failures += _described(broken, links, hosts, "")
        working = [result for result in links if not result.error]
        limit = limits.inside if level == "inside" else limits.between
        if limit is not None and not links and (limits.inside is not limits.between or not results):
            failures.append(f"there is no link {level} hosts, of which one was expected")
        if not working:
            continue
        if limit is not None:
            least, most = limit.bits_per_second / 1e9, limit.latency_s * 1e6 or float("inf")
            missed = [link for link in working if link.least_gbit < least or link.latency_us > most]
            expected = f"expected {least:g} Gbit/s" + (f" and {most:g} µs" if limit.latency_s else "")
            failures += _described(missed, working, hosts, expected)
            working = [link for link in working if link not in missed]
        if len(working) > 1:
            best_gbit = max(link.least_gbit for link in working)
            best_us = min(link.latency_us for link in working)
            most = max(SLOW * best_us, best_us + LATENCY_MARGIN_US)
            late = [link for link in working if link.least_gbit < best_gbit / SLOW or link.latency_us > most]
            best = f"the best link has {best_gbit:.3g} Gbit/s, {best_us:.3g} µs"
            slow += _described(late, working, hosts, best)
    return Diagnosis(failures=failures, slow=slow)


def _described(
    bad: Sequence[LinkResult], links: Sequence[LinkResult], hosts: Sequence[str], compared: str
) -> list[str]:
    """Lines about links: for a host or a rank whose links are all bad, where other links are not; else for each.

    ``compared`` is what the figures of a link are compared with.
    """
    lines, left = [], list(bad)
    verdict = "failed" if any(link.error for link in bad) else "are slow"

    def why(link: LinkResult) -> str:
        if link.error:
            return f"failed: {link.error}"
        return f"{link.least_gbit:.3g} Gbit/s, {link.latency_us:.3g} µs, {compared}"

    def blame(description: str, ranks: set[int], other_hosts: bool) -> None:
        nonlocal left
        own = [
            link for link in links if ranks & {*link.ranks} and not (other_hosts and link.level == "inside")
        ]
        if len(own) > 1 and len(own) < len(links) and all(link in left for link in own):
            worst = min(own, key=lambda link: (not link.error, link.least_gbit))
            lines.append(f"{description}: all {len(own)} links {verdict}; the worst: {why(worst)}")
            left = [link for link in left if link not in own]

    for host in dict.fromkeys(hosts):
        members = [rank for rank, name in enumerate(hosts) if name == host]
        if len(members) > 1:
            blame(f"host {host} (ranks {', '.join(map(str, members))})", {*members}, True)
    for rank, host in enumerate(hosts):
        blame(f"rank {rank} (host {host})", {rank}, False)
    return lines + [f"ranks {link.ranks[0]} and {link.ranks[1]}: {why(link)}" for link in left]


def table(check: Check) -> list[str]:
    """The lines of a table of the links' bandwidths, from row to column; none for many ranks."""
    links = [LinkResult(**link) for link in check.details.get("links", [])]
    size = 1 + max((max(link.ranks) for link in links), default=-1)
    if not 2 <= size <= _MATRIX_RANKS:
        return []
    cells: dict[tuple[int, int], str] = {}
    for link in links:
        a, b = link.ranks
        cells[a, b] = "failed" if link.error else f"{link.gbit[0]:.3g}"
        cells[b, a] = "failed" if link.error else f"{link.gbit[1]:.3g}"
    rows = [["Gbit/s", *(f"to {rank}" for rank in range(size))]]
    rows += [[f"from {a}", *(cells.get((a, b), "") for b in range(size))] for a in range(size)]
    return ["  " + "".join(f"{cell:>8}" for cell in row) for row in rows]


def _show_round(number: int, pairs: Sequence[tuple[int, int]], rounds: int) -> None:
    """Show the number of the round: on a terminal in one line, else at every tenth of the rounds."""
    text = f"measuring links: round {number + 1} of {rounds}"
    listing = ", ".join(f"{a} and {b}" for a, b in pairs[:4]) + (", ..." if len(pairs) > 4 else "")
    show_progress(f"{text}: ranks {listing}")
    if not sys.stderr.isatty() and number % max(1, rounds // 10) == 0:
        print(text, file=sys.stderr, flush=True)
