"""The stress programs: what each has to reach, in which parts it runs, how long they take, and what its result counts.

`python -m tests.stress` (tests/stress/__main__.py) runs them. A part is one call of a program with arguments of its
own, another seed or another number of ranks, so that a long run may be made in pieces: counts of parts are added up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bench.reliability import TESTED, TESTED_WITH_ELASTIC, Counts
from tests.stress.campaign_cases import ACTIONS, TRANSPORTS, WORLD_SIZES

Result = dict[str, Any]  # what a program writes
RANKS = (2, 3, 4, 5, 8)
OPERATIONS = 20_000  # of a part, on one number of ranks
PAYLOADS = 1_000_000  # of a part: two seeds at once, half of them each
SEEDS = 10_000  # of a part
SHARES = 4  # of torch's tests on one number of ranks
# Where UCX is installed, the campaign runs more cases.
CASES = sum(map(len, ACTIONS.values())) * len(WORLD_SIZES) * (len(TRANSPORTS) - 1)
REPETITIONS = 20


@dataclass(frozen=True, kw_only=True)
class Part:
    """One call of a program.

    Attributes:
        arguments: Of the program's command line.
        seconds: How long it takes on two cores with nothing else to do, as measured once.
    """

    arguments: tuple[str, ...]
    seconds: int


@dataclass(frozen=True, kw_only=True)
class Program:
    """One stress program.

    Attributes:
        name: Of its result file and on the command line.
        modules: Of ``tests.stress``: the one that a part runs, then those that it uses.
        what: What it shows, for the page.
        goal: The counts that a full run has to reach.
        parts: The calls that reach the goal together.
        short: The arguments of a call that shows in a minute that the program works.
        counts: Returns from what the program wrote the counts, and the failures, each as a sentence.
        code: The paths of the code that it tests, and of what else it uses.
    """

    name: str
    modules: tuple[str, ...]
    what: str
    goal: Counts
    parts: tuple[Part, ...]
    short: tuple[str, ...]
    counts: Callable[[Result], tuple[Counts, list[str]]]
    code: tuple[str, ...] = TESTED

    @property
    def tested(self) -> tuple[str, ...]:
        """Return what the counts depend on: parts stay valid until one of these paths changes."""
        return (*self.code, *(f"tests/stress/{module}.py" for module in self.modules))


def _count_fuzz(result: Result) -> tuple[Counts, list[str]]:
    names = ("payloads", "rejected", "combinations", "lossless payloads")
    return {name: result[name] for name in names}, result["failures"]


def _count_operations(result: Result) -> tuple[Counts, list[str]]:
    rows = result["rows"]
    sums = {name: sum(row[name] for row in rows) for name in ("operations", "compared", "exact")}
    named = {
        "operations": sums["operations"],
        "compared among ranks": sums["compared"],
        "compared with the exact sum": sums["exact"],
    }
    return named, [text for row in rows for text in row["wrong"]]


def _count_soak(result: Result) -> tuple[Counts, list[str]]:
    counts = {
        "minutes": result["minutes"],
        "operations of a rank": result["operations"],
        "incarnations": result["incarnations"],
        "errors that survivors raised": sum(result["errors"].values()),
    }
    return counts, result["complaints"]


def _count_elastic(result: Result) -> tuple[Counts, list[str]]:
    counts = {"minutes": result["minutes"], "processes": result["processes"], "averages": result["averages"]}
    counts |= result["events"]
    # Of the rank that stays, once it has settled.
    for field, used in (result["resources"] or {}).get("end", {}).items():
        counts[f"{field} more at the end"] = used - result["resources"]["start"][field]
    return counts, result["complaints"]


def _count_campaign(result: Result) -> tuple[Counts, list[str]]:
    failures = [
        f"{failure['command']}: {'; '.join(failure['complaints'])}"
        for row in result["rows"]
        for failure in row["failures"]
    ]
    failures += [f"left behind: {kind}: {what}" for kind, what in result["left_behind"].items()]
    return {"cases": result["cases"], "passed": result["cases"] - result["failed"]}, failures


def _count_torch_suite(result: Result) -> tuple[Counts, list[str]]:
    counts: Counter[str] = Counter()
    for row in result["rows"]:
        ranks, peer = f"{row['ranks']} ranks", row.get("gloo", {}).get("verdict", "not run")
        counts["tests"] += 1
        counts[f"{ranks}: tests"] += 1
        counts[f"{ranks}: Gloo passes"] += peer == "passed"
        counts[f"{ranks}: dtcomm passes"] += row["verdict"] == "passed"
        counts[f"{ranks}: Gloo alone passes"] += peer == "passed" and row["verdict"] == "failed"
        counts[f"{ranks}: dtcomm alone passes"] += row["verdict"] == "passed" and peer == "failed"
        counts[f"{ranks}: both skip"] += row["verdict"] == "skipped"
        counts[f"{ranks}: both fail"] += peer == "failed" and row["verdict"] == "failed"
    return dict(counts), result["faults"]


def _count_rendezvous(result: Result) -> tuple[Counts, list[str]]:
    counts = {"seeds": result["seeds"], "calls": sum(result["calls"].values()), "steps": result["steps"]}
    return counts, [f"seed {entry['seed']}: {'; '.join(entry['what'])}" for entry in result["wrong"]]


def _count_limits(result: Result) -> tuple[Counts, list[str]]:
    wrong = [f"{row['case']}: {text}" for row in result["rows"] for text in row["wrong"]]
    return {"cases": len(result["rows"])}, wrong


def _texts(*arguments: object) -> tuple[str, ...]:
    return tuple(map(str, arguments))


PROGRAMS: dict[str, Program] = {
    program.name: program
    for program in (
        Program(
            name="fuzz",
            modules=("fuzz",),
            what="random and damaged payloads of every codec, decoded, summed and encoded again by all kernels under "
            "AddressSanitizer and UBSan: no access outside a buffer, the same bytes from every kernel",
            goal={"payloads": 10_000_000},
            parts=tuple(
                Part(arguments=_texts("--payloads", PAYLOADS, "--seed", 1 + 2 * i), seconds=100)
                for i in range(10_000_000 // PAYLOADS)
            ),
            short=_texts("--payloads", 20_000, "--seed", 1),
            counts=_count_fuzz,
            code=(
                *(
                    "csrc/codec",
                    "csrc/core",
                    "csrc/cpu",
                    "csrc/tests/fuzz_payloads.*",
                    "csrc/tests/guard_pages.h",
                ),
                *("cmake", "CMakeLists.txt"),
            ),
        ),
        Program(
            name="operations",
            modules=("bit_identity", "random_ops", "random_run", "random_torch"),
            what="random operations: every collective, algorithm, codec, operator, dtype and subgroup over memory, "
            "sockets, Gloo's messages, emulated links and the backend: the same bits on all ranks, the exact sum "
            "where it is known, no mass lost by feedback",
            goal={"operations": 600_000},
            parts=tuple(
                Part(
                    arguments=_texts("--ranks", ranks, "--operations", OPERATIONS, "--seed", seed),
                    seconds=seconds,
                )
                for seed in range(600_000 // OPERATIONS // len(RANKS))
                for ranks, seconds in zip(RANKS, (75, 80, 100, 110, 150), strict=True)
            ),
            short=_texts("--ranks", 2, 3, "--operations", 1000, "--seed", 99),
            counts=_count_operations,
        ),
        Program(
            name="soak",
            modules=("soak", "soak_rank", "random_ops", "random_run", "random_torch"),
            what="random operations of three ranks under torchrun, with subgroups made and destroyed and ranks killed "
            "and restarted: right results, no growth of memory, descriptors or threads",
            goal={"minutes": 30},
            parts=(Part(arguments=_texts("--minutes", 30), seconds=1815),),
            short=_texts("--minutes", 0.5, "--life", 5, 10),
            counts=_count_soak,
        ),
        Program(
            name="campaign",
            modules=("campaign", "campaign_cases", "campaign_ranks"),
            what="a rank is killed, stops, pauses, starves, forks or makes a wrong call in each phase of rendezvous, "
            "operation and close: the others name it in time, and nothing is left behind",
            goal={"cases": CASES * REPETITIONS},
            parts=tuple(
                Part(arguments=_texts("--repetition", repetition), seconds=250)
                for repetition in range(REPETITIONS)
            ),
            short=_texts("--repeat", 1, "--phase", "all_reduce", "call", "--world-size", 2),
            counts=_count_campaign,
        ),
        Program(
            name="torch_suite",
            modules=("torch_suite", "torch_suite_module", "torch_suite_rank"),
            what='torch\'s own tests of torch.distributed on backend "dtcomm" and on Gloo: what Gloo passes, passes',
            goal={"tests": 855},
            parts=tuple(
                Part(
                    arguments=_texts("--world-size", ranks, "--peer-on", "all", "--share", share, SHARES),
                    seconds=380,
                )
                for ranks in WORLD_SIZES
                for share in range(1, SHARES + 1)
            ),
            short=_texts("--world-size", 2, "--peer-on", "all", "-k", "all_reduce_sum", "barrier"),
            counts=_count_torch_suite,
        ),
        Program(
            name="elastic",
            modules=(
                "elastic",
                "elastic_rank",
                "soak",
                "soak_rank",
                "random_ops",
                "random_run",
                "random_torch",
            ),
            what="ranks of `dtcomm.elastic` are killed, leave and join at random moments, also while they join: "
            "training goes on, weights are equal, the loss falls, nothing grows",
            goal={"minutes": 30},
            parts=(Part(arguments=_texts("--minutes", 30), seconds=1840),),
            short=_texts("--minutes", 0.5, "--pause", 1, 2),
            counts=_count_elastic,
            code=TESTED_WITH_ELASTIC,
        ),
        Program(
            name="rendezvous",
            modules=("rendezvous",),
            what="seeded interleavings of the rendezvous: all ranks of a group meet in one attempt, or all raise",
            goal={"seeds": 100_000},
            parts=tuple(
                Part(arguments=_texts("--first", SEEDS * i, "--seeds", SEEDS), seconds=120)
                for i in range(100_000 // SEEDS)
            ),
            short=_texts("--seeds", 200),
            counts=_count_rendezvous,
            # Scenarios call the rendezvous alone, with a store and threads of their own.
            code=(
                *("dtcomm/runtime/bootstrap", "dtcomm/errors.py"),
                *("tests/support/rendezvous_scenarios.py", "tests/support/interleaved_ranks.py"),
            ),
        ),
        Program(
            name="limits",
            modules=("limits",),
            what="tensors of more than 2^31 elements, 32 ranks on one machine, 1,000 groups at once, unaligned tensors",
            goal={"cases": 6},
            parts=(Part(arguments=(), seconds=300),),
            short=_texts("--cases", "alignment", "ranks", "--ranks", 6),
            counts=_count_limits,
        ),
    )
}
