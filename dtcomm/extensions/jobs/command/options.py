"""What the arguments of ``dtcomm plan`` stand for, after `flags` has parsed them; ValueError if they do not fit."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from dtcomm import codecs
from dtcomm.cli import series, split_codecs
from dtcomm.compress.spec import needs_feedback
from dtcomm.extensions.jobs import hardware
from dtcomm.extensions.jobs.across_sites import WideArea
from dtcomm.extensions.jobs.command.flags import TrainingModel
from dtcomm.extensions.jobs.hardware import System
from dtcomm.extensions.jobs.layout import Job
from dtcomm.extensions.jobs.search import FIXABLE
from dtcomm.system import allowed_cores

BATCH_TOKENS = 4 * 2**20  # of a step, if --batch is not given: that of Llama 2, and of Llama 3 at its start
SCHEMES = ("powersgd", "dgc", "ef21", "diana", "auto")  # of dtcomm.ddp, which are no codecs of messages


@dataclass(frozen=True, kw_only=True)
class StepOptions:
    """A step of DDP or FSDP to plan.

    ``parameters`` is the codec of the parameters that FSDP gathers.
    """

    strategy: str
    system: System
    codecs: list[str]
    parameters: str
    algorithms: list[str]
    model: TrainingModel


@dataclass(frozen=True, kw_only=True)
class JobOptions:
    """A whole job to plan. ``job`` is that of one site if ``wide_area`` is not None."""

    job: Job
    codecs: list[str]
    fixed: dict[str, Any]
    wide_area: WideArea | None


def codec_specs(arguments: argparse.Namespace, default: Sequence[str] = ("int8",)) -> list[str]:
    """Return the codecs of ``--codec``, or the default."""
    specs = split_codecs(arguments.codec or default)
    for spec in specs:
        if spec.partition(":")[0] in SCHEMES:
            raise ValueError(
                f"--codec {spec}: not modelled, because its messages follow the shapes of the parameters or the steps "
                "before; plan with a codec of as many bits, or measure it with dtcomm.ddp.compress(model, ...)"
            )
    return [str(codecs.codec(spec)) for spec in specs]


def algorithm_names(arguments: argparse.Namespace) -> list[str]:
    """Return the names of ``--algorithm``."""
    return [name for text in arguments.algorithm or ["auto"] for name in text.split(",")]


def message_sizes(arguments: argparse.Namespace) -> list[int]:
    """Return the bytes that ``-b``, ``-e``, ``-i`` and ``-f`` describe."""
    smallest, largest, step = arguments.minbytes, arguments.maxbytes, arguments.stepbytes
    if largest < smallest:
        raise ValueError(f"-e {largest}: less than -b {smallest}")
    return series(smallest, largest, step or 0, 1 if step else arguments.stepfactor)


def step_options(arguments: argparse.Namespace) -> StepOptions:
    """Return the step of ``dtcomm plan step``."""
    strategy, model = arguments.strategy or "ddp", arguments.model
    if strategy == "fsdp" and arguments.algorithm:
        raise ValueError("--algorithm: not valid with fsdp, whose steps are planned with auto")
    if strategy == "ddp" and arguments.parameters:
        text = "only FSDP gathers parameters; valid: dtcomm plan step fsdp --parameters. --codec is that of gradients"
        raise ValueError(f"--parameters: {text}")
    system = system_of(arguments)
    model.compute_seconds(system.device)  # raises if the device's peak is not known
    return StepOptions(
        strategy=strategy, system=system, codecs=codec_specs(arguments), algorithms=algorithm_names(arguments),
        parameters=str(codecs.codec(arguments.parameters or "none")), model=model,
    )  # fmt: skip


def _read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; ValueError names the file if it cannot be read."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path}: expected a JSON object, got {type(content).__name__}")
    return content


def system_of(arguments: argparse.Namespace) -> System:
    """Return the system that the flags describe."""
    sources = [name for name in ("system", "inside", "topology") if getattr(arguments, name) is not None]
    if len(sources) > 1:
        raise ValueError(f"--{sources[0]} and --{sources[1]}: give one of them")
    if arguments.topology is not None:
        system = hardware.system_from_dict(_read_json(arguments.topology))
    elif arguments.inside is not None or (arguments.between is not None and arguments.system is None):
        inside, between = arguments.inside or "memory", arguments.between or arguments.inside
        system = hardware.system_from_links(inside, between, arguments.device, arguments.nics or 1)
    else:
        system = hardware.find_system(arguments.system or "local")
        if arguments.between is not None:
            system = replace(system, between=hardware.find_port(arguments.between), nics=arguments.nics or 1)
    if arguments.device is not None:
        system = replace(system, device=hardware.find_device(arguments.device), implied_device=False)
    if arguments.nics is not None:
        system = replace(system, nics=arguments.nics)
    system = _with_leaves(arguments, system)
    hosts, per_host = _hosts_and_ranks_per_host(arguments, system)
    if arguments.between is not None and hosts == 1:
        raise ValueError(
            f"--between {arguments.between}: all {per_host} ranks are on one host; valid with --hosts 2 or more, or a "
            "--per-host below --ranks"
        )
    if arguments.cores is not None and system.device.generation:
        device = system.device.name
        raise ValueError(f"--cores {arguments.cores}: only valid for CPU ranks; the device is {device}")
    system = replace(system, hosts=hosts, per_host=per_host, cores=arguments.cores or system.cores)
    if system.name != "local" or system.device.generation:
        return system
    return replace(system, cores=arguments.cores or len(allowed_cores()))


def _with_leaves(arguments: argparse.Namespace, system: System) -> System:
    """Return the system with the switches that the flags describe."""
    over, leaf = arguments.oversubscription, arguments.leaf_hosts or system.leaf_hosts
    if over is not None and not leaf:
        raise ValueError(f"--oversubscription {over:g}: only valid with --leaf-hosts")
    try:
        return replace(
            system, leaf_hosts=leaf, oversubscription=system.oversubscription if over is None else over
        )
    except ValueError as error:
        raise ValueError(f"--{error}") from None


def _hosts_and_ranks_per_host(arguments: argparse.Namespace, system: System) -> tuple[int, int]:
    hosts, per_host, ranks = arguments.hosts, arguments.per_host, arguments.ranks
    if ranks is None:
        return hosts or system.hosts, per_host or system.per_host
    if hosts and per_host and hosts * per_host != ranks:
        raise ValueError(f"--ranks {ranks}: {hosts} hosts of {per_host} are {hosts * per_host}")
    if per_host is None:
        per_host = ranks // hosts if hosts else min(ranks, system.per_host)
    if per_host < 1 or ranks % per_host or (hosts and hosts * per_host != ranks):
        raise ValueError(f"--ranks {ranks}: does not divide into hosts of {max(per_host, 1)}")
    return ranks // per_host, per_host


def job_options(arguments: argparse.Namespace) -> JobOptions:
    """Return the job of ``dtcomm plan job``, or of ``dtcomm plan sites``."""
    shape, sites = arguments.model, arguments.sites
    system, specs = system_of(arguments), codec_specs(arguments)
    device = system.device
    if not device.tflops:
        raise ValueError(
            f"--model {shape.name}: no peak FLOP/s is known for the device {device.name}: a whole job needs "
            "--system or --device of a GPU. `dtcomm plan step --model 7B,step_ms=900` predicts a step of CPU ranks"
        )
    dtype = arguments.dtype or (torch.bfloat16 if "bf16" in dict(device.tflops) else torch.float16)
    seq = arguments.seq or shape.context
    if shape.positions and seq > shape.positions:
        raise ValueError(f"--seq {seq}: {shape.name} has positions for {shape.positions} tokens")
    batch = arguments.batch or system.ranks * sites
    while not arguments.batch and 2 * batch * seq <= BATCH_TOKENS:
        batch *= 2  # a power of two times the ranks divides among most layouts
    if batch % sites:
        raise ValueError(f"--batch {batch}: does not divide among {sites} sites")
    values = {field: getattr(arguments, field) for field in FIXABLE}
    wide_area = None
    if arguments.wan is not None:
        port = hardware.find_port(arguments.wan)
        wide_area = WideArea(sites=sites, port=port, rtt_ms=arguments.rtt, every=arguments.every)
    feedback = tuple(spec for spec in specs if needs_feedback(codecs.codec(spec)))
    try:
        job = Job(
            model=shape, system=system, feedback=feedback, batch=batch // sites, seq=seq, dtype=dtype,
            flash=not arguments.scores, trainable=arguments.trainable,
        )  # fmt: skip
    except ValueError as error:
        flag = "" if str(error).startswith("trainable") else "dtype: "
        raise ValueError(f"--{flag}{error}") from None
    fixed = {field: value for field, value in values.items() if value is not None}
    return JobOptions(job=job, codecs=specs, fixed=fixed, wide_area=wide_area)
