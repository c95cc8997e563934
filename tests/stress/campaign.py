"""The fault campaign: a rank dies, stops, pauses, starves or makes a wrong call in each phase; the others report it.

python -m tests.stress.campaign [--phase P ...] [--action A ...] [--transport T ...] [--world-size N ...] [--repeat 20]
[--seed 0] [--repetition I ...] [--jobs 4] [--minutes M] [--rounds 1000] [--list] [--json FILE]

A case passes if every survivor ends with the right error, which names the right rank and pid, in time, if its next
call raises at once, and if nothing is left behind: no thread, descriptor, child, shared mapping, process, file or key
of the store. What happens when is drawn from the seed, so a failed case can be repeated by the command that is printed.
Ctrl-C ends the campaign; the table and the file then hold what was done.
The results go to build/stress/campaign.json. The exit status is 1 if a case failed.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import fcntl
import operator
import os
import random
import re
import signal
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO, cast

from bench.common import report
from dtcomm.launch import fork_server, process_pool
from dtcomm.launch.ranks import RankOutcome, RankTimeout, RunningRanks, run_ranks, spawn_ranks
from dtcomm.runtime.bootstrap.rendezvous import PROTOCOL
from tests.stress import DETAILS
from tests.stress.campaign_cases import (
    ACTIONS,
    CHILDREN,
    CLOSE,
    LIMIT_SECONDS,
    MISMATCHES,
    PHASES,
    RENDEZVOUS,
    STARVED,
    TRANSPORTS,
    WORLD_SIZES,
    Case,
    cases,
)
from tests.stress.campaign_ranks import STRIKE, Seen, open_store, rounds, take_part
from tests.support.ucx import why_no_ucx

NEXT_SECONDS = 0.5  # of a call on a communicator that has failed
HANG_SECONDS = 20.0
ALL_ACTIONS = tuple(dict.fromkeys(action for actions in ACTIONS.values() for action in actions))
PREFIX = f"0//dtcomm/{PROTOCOL}/cpu"  # of the default group's keys; EPOCH/EXCHANGE/RANK follows


@dataclass(kw_only=True)
class Verdict:
    """What came of a case: seconds from the fault to the last report, and what is wrong with it."""

    seconds: float
    timed_out: bool
    complaints: list[str]


def attempt(case: Case, path: str) -> Verdict:
    """Run one case, with its store in a file at ``path``. Ranks that survive are used again for other cases."""
    with spawn_ranks(take_part, case.world_size, case, path, backend=None, env=case.environment) as ranks:
        pid = ranks.pids[case.victim]
        try:
            at, complaints = _stage_fault(ranks, case, path), []
        except RankTimeout as error:
            at, complaints = time.monotonic(), [str(error)]
        outcomes = ranks.join(timeout=HANG_SECONDS)
    reports = [o for o in outcomes if o.rank != case.victim or reports_itself(case)]
    seen = [outcome.result for outcome in reports if isinstance(outcome.result, Seen)]
    for outcome in reports:
        complaints += judge(case, outcome, at, pid)
    complaints += keys_left(case, path)
    Path(path).unlink(missing_ok=True)
    return Verdict(
        seconds=max((report.at - max(at, report.began) for report in seen), default=HANG_SECONDS),
        timed_out=any(report.error == "CollectiveTimeout" for report in seen),
        complaints=complaints,
    )


def keys_left(case: Case, path: str) -> list[str]:
    """Return a complaint about keys of survivors that a rendezvous left in the store, if there are any.

    The last rank to leave an exchange deletes its keys; after a loss behind the agreement they stay with the store.
    """
    if case.phase not in RENDEZVOUS or case.at_random_moment:
        return []
    if case.transport == "gloo" and case.action in STARVED:
        return []
    store = open_store(path)
    epochs, exchanges = range(1, 5), range(5)
    names = [f"{PREFIX}/{epoch}/{exchange}" for epoch in epochs for exchange in exchanges]
    survivors = [rank for rank in range(case.world_size) if rank != case.victim]
    left = [key for name in names for rank in survivors if store.check([key := f"{name}/{rank}"])]
    return [f"keys left in the store: {left}"] if left else []


def reports_itself(case: Case) -> bool:
    """Return whether the victim lives on and has to report as the others do."""
    return case.action in (*MISMATCHES, *CHILDREN, "pause", "no descriptors")


def _stage_fault(ranks: RunningRanks, case: Case, path: str) -> float:
    """Wait until the fault happens, and continue or kill a rank that stopped. Returns when it happened."""
    word = ranks.receive(case.victim, HANG_SECONDS)
    if word == "seen":
        raise RankTimeout(f"rank {case.victim} ended before its fault")
    if word == STRIKE:
        at = _strike_outside_store(ranks, case, path)
    else:
        _, at = cast("tuple[str, float]", word)
    if case.action == "pause":
        time.sleep(case.pause)
        ranks.kill(case.victim, signal.SIGCONT)
    elif case.action == "stop and kill":
        time.sleep(case.pause)
        at = time.monotonic()
        ranks.kill(case.victim, signal.SIGKILL)
    elif case.action == "stop":
        for rank in range(case.world_size):
            if rank != case.victim:
                ranks.receive(rank, HANG_SECONDS)
        ranks.kill(case.victim, signal.SIGKILL)
    return at


def _strike_outside_store(ranks: RunningRanks, case: Case, path: str) -> float:
    """Stop or kill the victim while it is not in the store's file; returns when.

    A rank that dies while it writes leaves half an entry, at which all others wait in the store for ever.
    """
    process = Path(f"/proc/{ranks.pids[case.victim]}/stat")
    with open(path, "ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # as the store does
        at = time.monotonic()
        ranks.kill(case.victim, signal.SIGKILL if case.action == "kill" else signal.SIGSTOP)
        with contextlib.suppress(OSError):  # it has gone
            while (
                process.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[0]
                not in "TZX"
            ):
                time.sleep(1e-4)
    return at


def judge(case: Case, outcome: RankOutcome, at: float, pid: int) -> list[str]:
    """Return what is wrong with one rank's report, each as a sentence; the fault happened at ``at`` to ``pid``."""
    reporter = f"rank {outcome.rank}"
    in_gloo = case.transport == "gloo" and case.action in STARVED
    if in_gloo and outcome.rank == case.victim and outcome.exitcode not in (None, 0):
        return []  # Gloo and its threads end a process without descriptors
    if not isinstance(outcome.result, Seen):
        return [f"{reporter}: {outcome.describe_failure()}\n{outcome.traceback}"]
    seen, complaints = outcome.result, []
    victim = outcome.rank == case.victim
    errors = ("",) if victim and case.phase in CLOSE else case.errors
    # A rank that starves raises whatever the kernel refused.
    if seen.error not in errors and not (victim and case.action in STARVED):
        expected = " or ".join(name or "none" for name in errors)
        complaints.append(f"{reporter}: {seen.error or 'no error'} instead of {expected}: {seen.message}")
    if seen.error and (not victim or case.action in MISMATCHES):
        if not names_rank(seen.message, case):
            complaints.append(f"{reporter}: the message does not name rank {case.victim}: {seen.message}")
    if seen.error == "PeerLost" and f"pid {pid}" not in seen.message:
        complaints.append(f"{reporter}: the message does not name pid {pid}: {seen.message}")
    took = seen.at - max(at, seen.began)
    if seen.error and took > case.limit:
        complaints.append(f"{reporter}: {took:.2f} s instead of {case.limit:g}: {seen.message}")
    most = LIMIT_SECONDS if case.phase in RENDEZVOUS else NEXT_SECONDS
    if (
        case.phase == "send_recv"
    ):  # each direction has a communicator of its own, and one of them has not failed yet
        most = case.limit
    if seen.next_error == "no error" or seen.next_seconds > most:
        complaints.append(f"{reporter}: the next call gave {seen.next_error} after {seen.next_seconds:.2f} s")
    # A rank that closes waits two seconds at most for peers to take what it sent last; a stopped one takes nothing.
    if seen.close_seconds > case.limit + (case.pause if victim else 0.0):
        complaints.append(f"{reporter}: it released its communicators after {seen.close_seconds:.2f} s")
    if seen.left:
        complaints.append(f"{reporter}: left behind {seen.left}")
    return complaints


def names_rank(message: str, case: Case) -> bool:
    """Return whether an error names the victim, and no other rank as one that did not come."""
    if case.action in MISMATCHES:
        return f"rank {case.victim}" in message
    blamed = re.match(r"ranks ([\d, ]+) and (\d+)", message)
    return blamed is None and re.search(rf"\brank {case.victim}\b", message) is not None


# --- many at once ---------------------------------------------------------------------------------------------


def run_all(chosen: Sequence[Case], jobs: int, seed: int, folder: str) -> Iterator[tuple[Case, Verdict]]:
    """Run cases, ``jobs`` at once and in random order: those that wait for timeouts do not follow each other."""
    order = list(chosen)
    random.Random(seed).shuffle(order)
    run_ranks(operator.add, 1, backend=None)  # the fork server ends with the thread that starts it
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        running = {pool.submit(attempt, case, f"{folder}/store-{i}"): case for i, case in enumerate(order)}
        try:
            for future in concurrent.futures.as_completed(running):
                yield running[future], future.result()
        finally:
            pool.shutdown(cancel_futures=True)


@contextlib.contextmanager
def errors_to(path: str) -> Iterator[TextIO]:
    """Let ranks print to a file what they print to stderr; gives the stderr of the campaign itself."""
    with open(os.dup(2), "w") as terminal, open(path, "ab") as file:
        os.dup2(file.fileno(), 2)
        try:
            yield terminal
        finally:
            os.dup2(terminal.fileno(), 2)


class Progress:
    """A line on the terminal: how many cases are done, how many failed, and how long the rest takes."""

    def __init__(self, total: int, terminal: TextIO) -> None:
        self._terminal = terminal
        self._total, self._done, self._failed = total, 0, 0
        self._start = self._printed = time.monotonic()

    def add(self, failed: bool) -> None:
        """Count a case; print the line twice a second, or every half minute where there is no terminal."""
        self._done += 1
        self._failed += failed
        now, terminal = time.monotonic(), self._terminal.isatty()
        if now - self._printed < (0.5 if terminal else 30.0) and self._done < self._total:
            return
        self._printed = now
        left = (now - self._start) / self._done * (self._total - self._done)
        bar = "#" * (30 * self._done // self._total)
        text = f"[{bar:30}] {self._done}/{self._total} cases, {self._failed} failed, {left:.0f} s left"
        print(
            f"\r{text}" if terminal else text, end="" if terminal else "\n", file=self._terminal, flush=True
        )
        if terminal and self._done == self._total:
            print(file=self._terminal)


# --- results --------------------------------------------------------------------------------------------------


def summarize(results: Sequence[tuple[Case, Verdict]], seed: int) -> list[dict[str, Any]]:
    """Return a row for each phase, action, transport and world size."""
    by_row: dict[tuple[str, str, str, int], list[tuple[Case, Verdict]]] = defaultdict(list)
    for case, verdict in results:
        by_row[case.row].append((case, verdict))
    rows = []
    for (phase, action, transport, world_size), members in by_row.items():
        failed = [(case, verdict) for case, verdict in members if verdict.complaints]
        sooner = [verdict.seconds for _, verdict in members if not verdict.timed_out]
        later = [verdict.seconds for _, verdict in members if verdict.timed_out]
        rows.append(
            {
                "phase": phase,
                "action": action,
                "transport": transport,
                "world_size": world_size,
                "passed": len(members) - len(failed),
                "failed": len(failed),
                "worst_seconds": round(max(sooner), 2) if sooner else None,
                "worst_seconds_at_timeout": round(max(later), 2) if later else None,
                "failures": [
                    {"command": case.command(seed), "complaints": verdict.complaints}
                    for case, verdict in failed
                ],
            }
        )
    return sorted(rows, key=lambda row: (list(PHASES).index(row["phase"]), ALL_ACTIONS.index(row["action"])))


def print_table(rows: Sequence[dict[str, Any]]) -> None:
    """Print passed cases and worst seconds by phase and action (lines), transport and world size (columns)."""
    columns = sorted(
        {(row["transport"], row["world_size"]) for row in rows},
        key=lambda column: (list(TRANSPORTS).index(column[0]), column[1]),
    )
    cells = {(row["phase"], row["action"], row["transport"], row["world_size"]): row for row in rows}
    lines = list(dict.fromkeys((row["phase"], row["action"]) for row in rows))
    print("passed/cases, worst seconds to the report (to a report at the timeout)")
    print(f"{'phase':13}{'action':18}" + "".join(f"{f'{name} {size}':>19}" for name, size in columns))
    for phase, action in lines:
        texts = []
        for transport, size in columns:
            row = cells.get((phase, action, transport, size))
            if row is None:
                texts.append("")
                continue
            text = f"{row['passed']}/{row['passed'] + row['failed']}"
            if row["worst_seconds"] is not None:
                text += f" {row['worst_seconds']:.2f}"
            if row["worst_seconds_at_timeout"] is not None:
                text += f" ({row['worst_seconds_at_timeout']:.2f})"
            texts.append(text)
        print(f"{phase:13}{action:18}" + "".join(f"{text:>19}" for text in texts))


def shared_files() -> set[str]:
    """Return the names in /dev/shm."""
    return set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()


def forked_children(log: str) -> list[int]:
    """Return the children that ranks of this campaign forked and that are alive; all print to its log."""
    parents = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/{name}/fd/2") == log:
                stat = Path(f"/proc/{name}/stat").read_text(encoding="utf-8", errors="replace")
                parents[int(name)] = int(stat.rpartition(")")[2].split()[1])
    own = os.getpid()  # the parent of the fork server, which is the parent of the ranks
    return [pid for pid, parent in parents.items() if own not in (pid, parent, parents.get(parent))]


def available_transports() -> list[str]:
    """Return the transports that this machine has: all but UCX, which may be missing."""
    return [name for name in TRANSPORTS if name != "ucx" or not why_no_ucx()]


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--phase", nargs="+", choices=list(PHASES), default=list(PHASES))
    parser.add_argument("--action", nargs="+", choices=ALL_ACTIONS, default=list(ALL_ACTIONS))
    parser.add_argument("--transport", nargs="+", choices=list(TRANSPORTS), default=available_transports())
    parser.add_argument("--world-size", type=int, nargs="+", default=list(WORLD_SIZES))
    parser.add_argument("--repeat", type=int, default=20, help="cases of each kind")
    parser.add_argument("--repetition", type=int, nargs="+", help="only these of them")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=4, help="cases at once")
    parser.add_argument("--rounds", type=int, default=0, help="then create and destroy so many communicators")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="start no case after so long")
    parser.add_argument("--list", action="store_true", help="print phases, actions and the number of cases")
    parser.add_argument("--json", help="where to write instead of build/stress/campaign.json")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Run the campaign, print its table, write the file; return what was written."""
    options = parse(arguments)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell lets background programs ignore it
    repetitions = range(options.repeat) if options.repetition is None else options.repetition
    chosen = list(
        cases(
            options.phase,
            options.action,
            options.transport,
            options.world_size,
            repetitions,
            options.seed,
        )
    )
    if options.list:
        for phase in options.phase:
            print(f"{phase:13} {PHASES[phase]}: {', '.join(ACTIONS[phase])}")
        print(f"{len(chosen)} cases")
        return {"verdict": "PASS", "rows": []}
    start, files = time.monotonic(), shared_files()
    results = []
    left: dict[str, Any] = {}
    process_pool.POOL_SIZE = max(WORLD_SIZES) * options.jobs
    if "tests.stress.campaign_ranks" not in fork_server.MODULES:  # imported once for all ranks
        fork_server.MODULES.append("tests.stress.campaign_ranks")
    with tempfile.TemporaryDirectory(prefix="dtcomm-campaign-") as folder:
        log = f"{folder}/log"
        with (
            errors_to(log) as terminal,
            contextlib.suppress(KeyboardInterrupt),
        ):  # what is done by then is printed
            progress = Progress(len(chosen), terminal)
            for case, verdict in run_all(chosen, options.jobs, options.seed, folder):
                results.append((case, verdict))
                progress.add(bool(verdict.complaints))
                if verdict.complaints:
                    print(
                        f"\n{case.command(options.seed)}", *verdict.complaints[:3], sep="\n    ", flush=True
                    )
                if time.monotonic() - start > 60 * options.minutes:
                    break
        children = forked_children(log)
        if children:
            left["processes"] = children
    if options.rounds:
        for rank, names in enumerate(run_ranks(rounds, 2, options.rounds, timeout=300)):
            left |= {f"rank {rank}, {kind}": what for kind, what in names.items()}
    if more := {name for name in shared_files() - files if "dtcomm" in name}:
        left["/dev/shm"] = sorted(more)
    rows = summarize(results, options.seed)
    print_table(rows)
    failed = sum(row["failed"] for row in rows)
    result = {
        "seed": options.seed,
        "jobs": options.jobs,
        "cases": len(results),
        "failed": failed,
        "minutes": round((time.monotonic() - start) / 60, 1),
        "rounds": options.rounds,
        "left_behind": left,
        "rows": rows,
        "verdict": "MISS" if failed or left else "PASS",
    }
    path = report.write(options.json or DETAILS / "campaign.json", result)
    print(
        f"{len(results)} cases, {failed} failed, {result['minutes']} minutes, left behind: {left or 'nothing'}"
    )
    print(path, result["verdict"])
    return result


if __name__ == "__main__":
    sys.exit(main()["verdict"] != "PASS")
