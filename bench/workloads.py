"""Train three workloads with every method: held-out loss and quality against steps and bytes.

python -m bench.workloads [--budget MINUTES] [--list] [--workloads text …] [--methods int8 …] [--optimizers adamw …]
    [--workers 2 …] [--seeds 3] [--all] [--json FILE] [--steps N]

The workloads are a GPT on Python source, a click model with large embeddings, and a ResNet on Fashion-MNIST (Debian:
apt-get install dataset-fashion-mnist). A unit of work is a workload with a method, an optimizer, a number of workers
and a seed (bench/training/units.py); the planned ones (bench/training/plan.py) take many hours. Each is kept in
bench/results/workloads.json as soon as it is done, with its commit, processor and load, and is replaced only if the
code that it computes with has changed. So call it again and again: ``--budget`` runs as many missing units as fit,
those first that make the table useful early, ``--list`` says which are missing, and ``--all`` means every combination
instead of the plan. Several calls may run at once, on different ``--workloads``.

What follows from the kept units is on docs/results/workloads.md (python -m bench.pages). ``python -m
bench.workload_links`` measures the steps on links of 1 and 10 Gbit/s, from which that page has the time to a loss.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from bench.common import conditions, output
from bench.common.budget import Budget
from bench.common.progress import Progress
from bench.training import plan as plans
from bench.training import units
from bench.training.plan import SEEDS
from bench.training.tasks import Unavailable
from bench.training.units import VARIANTS, WORKERS, WORKLOADS, Unit
from bench.training.workload import OPTIMIZERS

Entry = dict[str, Any]
KEPT = output.RESULTS / "workloads.json"
#: Units that were trained under conditions under which nothing is kept.
ASIDE = output.RUNS.parent / "not_kept" / "workloads.json"


class Store:
    """The units and trials of a result file; several processes may add to one.

    Args:
        path: The file. It need not exist.
        code: The checksum of the code, `bench.training.units.code`.
    """

    def __init__(self, path: Path, code: str) -> None:
        self.path, self.code = path, code
        self.units: dict[str, Entry] = {}
        self.trials: dict[str, Entry] = {}
        self._read()

    def has(self, unit: Unit, steps: int) -> bool:
        """Return whether the file has the unit (or trial), by this code and with so many steps."""
        entry = self._kind(unit).get(unit.key)
        return entry is not None and entry["code"] == self.code and entry["workload_steps"] == steps

    def add(self, unit: Unit, entry: Entry) -> None:
        """Write a unit or trial to the file, beside what other processes have added meanwhile."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self._locked():
            self._read()
            self._kind(unit)[unit.key] = entry
            document = {
                "program": "workloads",
                "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
                "units": self.units,
                "trials": self.trials,
                "measurements": measurements(self.units),
            }
            output.write_whole(self.path, output.format_json(document))

    def chosen_rate(self, unit: Unit, steps: int) -> float:
        """Return the learning rate of a unit: that of its trial with the lowest loss.

        Raises:
            ValueError: No trial was made.
        """
        made = {trial.key: self.trials[trial.key] for trial in unit.trials() if self.has(trial, steps)}
        rates = units.tried_rates(unit, made)
        return min(rates, key=rates.__getitem__)

    def seconds(self, unit: Unit) -> float:
        """Return how long a unit or trial of this workload takes by those that were kept; 0 if there is none."""
        took = [
            entry["seconds"]
            for key, entry in self._kind(unit).items()
            if key.startswith(f"{unit.workload} | ") and entry["code"] == self.code
        ]
        return statistics.median(took) if took else 0.0

    def _kind(self, unit: Unit) -> dict[str, Entry]:
        return self.units if unit.rate is None else self.trials

    def _read(self) -> None:
        if self.path.exists():
            document = json.loads(self.path.read_text(encoding="utf-8"))
            self.units, self.trials = document["units"], document["trials"]

    @contextmanager
    def _locked(self) -> Iterator[None]:
        lock_path = output.RUNS.parent / f"{self.path.name}.lock"
        lock_path.parent.mkdir(parents=True, exist_ok=True)
        with open(lock_path, "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def measurements(kept: dict[str, Entry]) -> list[dict[str, Any]]:
    """Return for each commit and processor how many units it made, when, and the load meanwhile."""
    groups: dict[tuple[str, str], list[Entry]] = {}
    for entry in kept.values():
        groups.setdefault((entry["commit"], entry["processor"]), []).append(entry)
    return [
        {
            "commit": commit,
            "processor": processor,
            "date": max(entry["date"] for entry in entries),
            "units": len(entries),
            "load": [min(entry["load"] for entry in entries), max(entry["load"] for entry in entries)],
            **({"unfit": sorted(reasons)} if (reasons := _reasons(entries)) else {}),
        }
        for (commit, processor), entries in groups.items()
    ]


def _reasons(entries: list[Entry]) -> set[str]:
    return {reason for entry in entries for reason in entry.get("unfit", ())}


def jobs(plan: list[Unit], store: Store, steps: int | None = None) -> Iterator[Unit]:
    """Yield the trials and units that are missing, in the order in which they are made.

    Which trial is next follows from those that were made: ask for it when the one before is in the store.
    """
    for unit in plan:
        unit_steps = steps or WORKLOADS[unit.workload].steps
        if store.has(unit, unit_steps):
            continue

        def loss_of(trial: Unit, steps: int = unit_steps) -> float | None:
            return units.loss(store.trials[trial.key]) if store.has(trial, steps) else None

        while (trial := units.next_trial(unit, loss_of)) is not None:
            yield trial
        yield unit


def train(
    unit: Unit, store: Store, steps: int, progress: Callable[[int, int], None] = lambda step, steps: None
) -> Entry:
    """Train a unit or trial, and return its entry: the result with commit, processor, load, and the code's checksum."""
    workload = WORKLOADS[unit.workload].shortened(steps)
    begin = time.monotonic()
    rate = store.chosen_rate(unit, steps) if unit.rate is None else unit.rate
    result = units.run(unit, rate, workload, progress)
    reasons = conditions.complaints(units.changed_files(), None)
    return {
        **result,
        "workload_steps": steps,
        "seconds": round(time.monotonic() - begin, 1),
        "code": store.code,
        "commit": conditions.code_commit(),
        "processor": conditions.processor(),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "load": round(os.getloadavg()[0], 2),
        **({"unfit": reasons} if reasons else {}),
    }


def work(plan: list[Unit], store: Store, budget: Budget, steps: int | None = None) -> bool:
    """Train the missing units of a plan as long as the budget lasts; return whether nothing is missing now.

    Raises:
        Unavailable: The data of a workload are not on this machine.
    """
    with Progress() as progress:
        for job in jobs(plan, store, steps):
            job_steps = steps or WORKLOADS[job.workload].steps
            if not budget.allows(job.key, store.seconds(job)):
                return False
            progress.begin(job.key)
            entry = train(job, store, job_steps, progress.step)
            store.add(job, entry)
            progress.end("diverged" if entry["loss"] is None else f"held-out loss {entry['loss']:.4f}")
    return True


def print_missing(plan: list[Unit], store: Store, steps: int | None) -> None:
    """Print how many units of each workload are missing, then the missing ones in the order of their turn."""
    missing = [unit for unit in plan if not store.has(unit, steps or WORKLOADS[unit.workload].steps)]
    of_workload = Counter(unit.workload for unit in plan)
    missing_of = Counter(unit.workload for unit in missing)
    rows = [
        [name, str(count), str(count - missing_of[name]), str(missing_of[name])]
        for name, count in of_workload.items()
    ]
    for unit in missing:
        print(unit.key + (", kept from other code" if unit.key in store.units else ""))
    output.table(f"units in {store.path}", ["workload", "planned", "kept", "missing"], rows)


def destination(path: Path | None) -> Path:
    """Return the file that gets the units: the given one, or bench/results if results may be kept there now."""
    if path is not None:
        return path
    reasons = conditions.complaints(units.changed_files(), None)
    if reasons and os.environ.get(output.UNFIT) != "1":
        print(
            f"bench.workloads: units go to {ASIDE}, because {'; '.join(reasons)}; {output.UNFIT}=1 keeps them marked"
        )
        return ASIDE
    return KEPT


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Train, keep and print what the arguments say; return the units of the file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--budget", type=float, default=float("inf"), metavar="MINUTES", help="stop after so many"
    )
    parser.add_argument("--list", action="store_true", help="print the missing units, and train nothing")
    parser.add_argument("--workloads", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--methods", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--optimizers", nargs="+", choices=OPTIMIZERS, default=list(OPTIMIZERS))
    parser.add_argument("--workers", nargs="+", type=int, choices=WORKERS, default=list(WORKERS))
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--all", action="store_true", help="every combination, not only the planned ones")
    parser.add_argument("--json", type=Path, help="where to write instead of bench/results/workloads.json")
    parser.add_argument(
        "--steps", type=int, help="of every workload, for a trial of this program; needs --json"
    )
    options = parser.parse_args(arguments)
    if options.steps is not None and options.json is None:
        parser.error("--steps: needs --json, because bench/results keeps units with all steps")
    if options.steps is not None and options.steps < units.EVALUATIONS:
        parser.error(f"--steps: expected at least {units.EVALUATIONS}, got {options.steps}")
    plan = plans.everything(
        options.workloads, options.methods, options.optimizers, options.workers, options.seeds
    )
    if not options.all:
        plan = plans.planned(plan)
    if options.list:
        store = Store(options.json or KEPT, units.code())
        print_missing(plan, store, options.steps)
        return store.units
    store = Store(destination(options.json), units.code())
    torch.set_num_threads(1)
    budget = Budget(60 * options.budget, option="--budget MINUTES")
    try:
        complete = work(plan, store, budget, options.steps)
    except Unavailable as error:
        parser.error(str(error))
    print("all planned units are kept" if complete else "stopped in time; call again to go on")
    if store.path == KEPT:
        print("python -m bench.pages writes the page")
    return store.units


if __name__ == "__main__":
    main()
