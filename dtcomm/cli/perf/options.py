"""The arguments of ``dtcomm perf``: nccl-tests' flags, and what is not in nccl-tests."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass
from pathlib import Path

from dtcomm.algorithms import collectives, require
from dtcomm.cli import _sizes
from dtcomm.cli.perf import device_options, flags
from dtcomm.cli.perf.backends import registry
from dtcomm.cli.perf.collectives import ALIASES, COLLECTIVES, DTYPES
from dtcomm.cli.perf.device_options import CHOOSERS, VIRTUAL
from dtcomm.cli.perf.placement import CPU
from dtcomm.codecs import codec
from dtcomm.errors import ScheduleError
from dtcomm.measure import mpi
from dtcomm.measure.exact_inputs import OPS
from dtcomm.schedule import Schedule, verify
from dtcomm.schedule import parse as parse_schedule


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One way to do a collective: rows of a size are compared over these."""

    backend: str
    codec: str = "none"
    algorithm: str = "auto"
    schedule: Schedule | None = None  # the user's own, under the name of its file

    def __str__(self) -> str:
        return f"{self.backend} {self.codec} {self.algorithm}"

    def refusal(self, collective: str, datatype: str, op: str) -> str | None:
        """Why this cannot do ``op`` on ``datatype``, or None."""
        if self.backend == VIRTUAL:
            reason = device_options.why_no_kernel(collective, self, datatype, op)
        else:
            reason = registry.find(self.backend).refusal(collective, datatype, op)
        if reason:
            return reason
        layout = codec(self.codec)
        if DTYPES[datatype] not in layout.dtypes:
            takes = ", ".join(name for name, dtype in DTYPES.items() if dtype in layout.dtypes)
            return f"-d {datatype}: codec {self.codec} takes {takes}"
        if op in ("min", "max") and op not in layout.operations:
            return f"-o {op}: codec {self.codec} takes {', '.join(layout.operations)}, avg"
        if op == "avg" and not DTYPES[datatype].is_floating_point:
            return f"-o avg: {datatype} has no average"
        return None


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to measure, checked: see the parser's help for the fields that bear the names of flags."""

    collective: str
    minbytes: int
    maxbytes: int
    stepbytes: int
    stepfactor: int
    iters: int
    warmup_iters: int
    agg_iters: int
    run_cycles: int
    check: int
    ops: tuple[str, ...]
    datatypes: tuple[str, ...]
    root: int | None
    average: int
    blocking: int
    report_cputime: bool
    per_iter: bool
    out_of_place: bool
    variants: tuple[Variant, ...]
    compare: tuple[str, ...]
    nproc: int
    device: str
    device_why: str
    virtual: int
    cudagraph: int
    pin: bool | None
    timeout: float
    quiet: bool
    json: str | None
    csv: str | None
    plot: str | None

    @property
    def on_device(self) -> bool:
        """Whether tensors are on a GPU, or would be but for the emulator."""
        return self.device != CPU

    @property
    def backends(self) -> list[str]:
        """Their names, each once."""
        return list(dict.fromkeys(variant.backend for variant in self.variants))

    def refusal(self, variant: Variant, datatype: str, op: str) -> str | None:
        """Why a variant cannot do that, or None."""
        return variant.refusal(self.collective, datatype, op)

    @property
    def sizes(self) -> list[int]:
        return _sizes.series(self.minbytes, self.maxbytes, self.stepbytes, self.stepfactor)


def parse(argv: list[str]) -> Options:
    """Options of a command line; exits with status 2 and one line on stderr where it is wrong."""
    parser = flags.parser()
    given = parser.parse_args(argv)
    try:
        return _options(given)
    except (ValueError, TypeError, OSError, ScheduleError) as error:
        parser.error(str(error))


def _options(given: argparse.Namespace) -> Options:
    schedule = None if given.schedule is None else _schedule(given)
    if given.collective is None:
        if schedule is None:
            raise ValueError(f"collective: want one of {', '.join(COLLECTIVES)}, or --schedule")
        given.collective = schedule.collective
    collective = COLLECTIVES[given.collective]
    if given.minbytes > given.maxbytes:
        raise ValueError(f"-b {given.minbytes} is larger than -e {given.maxbytes}")
    _sizes.series(
        given.minbytes, given.maxbytes, given.stepbytes, given.stepfactor
    )  # raises where they are odd
    compare = tuple(dict.fromkeys(name for part in given.compare or [] for name in part.split(",")))
    if strangers := set(compare) - set(registry.PEERS):
        raise ValueError(f"--compare {sorted(strangers)[0]!r} is not one of {', '.join(registry.PEERS)}")
    device, device_why = device_options.choose(given, compare, schedule)
    if given.nproc is None:
        given.nproc = device_options.ranks(device) if schedule is None else schedule.ranks
    variants = tuple(_variants(given, schedule, compare, device))
    if any(variant.backend == "mpi" for variant in variants):
        _require_mpi(given)
    ops = OPS if given.op == "all" else tuple(given.op.split(","))
    if unknown := set(ops) - set(OPS):
        raise ValueError(f"-o {sorted(unknown)[0]!r} is not one of {', '.join(OPS)}, all")
    names = tuple(DTYPES) if given.datatype == "all" else tuple(given.datatype.split(","))
    datatypes = tuple(ALIASES.get(name, name) for name in names)
    if strange := set(datatypes) - set(DTYPES):
        raise ValueError(f"-d {sorted(strange)[0]!r} is not one of {', '.join(DTYPES)}, all")
    ops = ops if collective.reduces else ("none",)
    for variant in variants:
        refusals = [variant.refusal(given.collective, datatype, op) for datatype in datatypes for op in ops]
        if None not in refusals:
            raise ValueError(refusals[0])
    fields = {name: value for name, value in vars(given).items() if name in Options.__dataclass_fields__}
    fields |= {
        "ops": ops,
        "datatypes": datatypes,
        "root": _root_of(given, schedule),
        "out_of_place": bool(given.out_of_place),
        "quiet": "-" in (given.json, given.csv),
        "variants": variants,
        "compare": compare,
        "device": device,
        "device_why": device_why,
    }
    return Options(**fields)


def _schedule(given: argparse.Namespace) -> Schedule:
    """The user's schedule, proved; ScheduleError names the rank, step and chunk at fault."""
    try:
        schedule = parse_schedule(Path(given.schedule).read_text())
        verify(schedule)
    except ScheduleError as error:
        raise ScheduleError(f"--schedule {given.schedule}: {error}") from error
    except OSError as error:
        raise OSError(f"--schedule {given.schedule}: {error.strerror}") from error
    if given.collective not in (None, schedule.collective):
        raise ValueError(f"--schedule {given.schedule}: is for {schedule.collective}, not {given.collective}")
    return schedule


def _root_of(given: argparse.Namespace, schedule: Schedule | None) -> int | None:
    if schedule is not None:
        return schedule.root
    return None if given.root == "all" else int(given.root)


def _require_mpi(given: argparse.Namespace) -> None:
    if absent := mpi.why_unavailable():
        raise ValueError(f"mpi: {absent}")
    if given.agg_iters != 1 or given.report_cputime or given.blocking:
        raise ValueError("mpi: Open MPI is measured without -m, -z and -C")


def _codecs(given: list[str]) -> list[str]:
    """Specs, several of which may stand in one text: a comma also separates a codec's options, ``name=value``."""
    found: list[str] = []
    for text in given:
        for number, part in enumerate(text.split(",")):
            if number and re.match(r"\w+=", part):
                found[-1] += f",{part}"
            else:
                found.append(part)
    return [str(codec(spec)) for spec in found]


def _variants(
    given: argparse.Namespace, schedule: Schedule | None, compare: tuple[str, ...], device: str
) -> list[Variant]:
    backends = device_options.backends(given, device)
    if given.compare and all(registry.find(name).plain for name in backends):
        raise ValueError(
            f"--compare {given.compare[0]}: nothing of ours is measured by --backend {','.join(backends)}"
        )
    backends += [name for name in compare if name not in backends]
    codecs = _codecs(given.codec or ["none"])
    named = given.algorithm or (["auto"] if schedule is None else [])
    algorithms = [name for part in named for name in part.split(",")]
    for name in algorithms:
        try:
            if given.collective in collectives():
                require(name, given.collective, besides=CHOOSERS)
            elif name != "auto":
                raise ValueError(f"{given.collective} has no algorithms")
        except ValueError as error:
            raise ValueError(f"--algorithm {str(error).removeprefix('algorithm: ')}") from None
    variants: list[Variant] = []
    for name in backends:
        if name != VIRTUAL and registry.find(name).plain:
            variants.append(Variant(backend=name, algorithm="own"))
        else:
            for spec in codecs:
                variants += [Variant(backend=name, codec=spec, algorithm=a) for a in algorithms]
                if schedule is not None:
                    own = Path(given.schedule).stem
                    variants.append(Variant(backend=name, codec=spec, algorithm=own, schedule=schedule))
    if all(variant.algorithm == "own" for variant in variants) and codecs != ["none"]:
        raise ValueError(f"--codec {codecs[0]!r}: {', '.join(backends)} sends tensors as they are")
    return list(dict.fromkeys(variants))
