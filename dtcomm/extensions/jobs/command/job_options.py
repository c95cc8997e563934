"""Flags of ``dtcomm plan`` for whole jobs: batch and sequences, fixed parts of the layout, the fabric, and sites."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch

from dtcomm.cli import count_argument
from dtcomm.codecs import codec as parse
from dtcomm.compress.spec import needs_feedback
from dtcomm.extensions.jobs import PRESETS, RECOMPUTE, SCHEDULES, Job, ModelShape, WideArea, hardware
from dtcomm.extensions.jobs.hardware import System, not_one_of
from dtcomm.extensions.jobs.training_model import STAGES

DTYPES = {
    **dict.fromkeys(("bf16", "bfloat16"), torch.bfloat16),
    **dict.fromkeys(("fp16", "half", "float16"), torch.float16),
    **dict.fromkeys(("fp32", "float", "float32"), torch.float32),
}
BATCH_TOKENS = 4 * 2**20  # of a step, if --batch is not given: that of Llama 2, and of Llama 3 at its start
RAILS, FAT_TREE = "rails", "fat-tree"
#: Hosts below one leaf switch, if --leaf-hosts is not given: with rails each of a leaf's 32 ports is another host's.
LEAF_HOSTS = {RAILS: 32, FAT_TREE: 4}
WAN_CODECS = ["int8", "int4"]


@dataclass(frozen=True, kw_only=True)
class JobOptions:
    """A whole job to plan, checked. ``job`` is that of one site if ``wide_area`` is not None."""

    job: Job
    fixed: dict[str, Any]
    top: int
    wide_area: WideArea | None


def add(parser: argparse.ArgumentParser) -> None:
    """Add the flags to a parser."""
    group = parser.add_argument_group("whole jobs (--model NAME, or --model params=N alone)")
    flag = group.add_argument
    flag("--seq", metavar="N", type=count_argument(1), help="tokens of a sequence (default: the model's)")
    flag("--batch", metavar="N", type=count_argument(1),
         help="sequences of a step, over all ranks (default: 4 Mi tokens, at least one for each rank)")  # fmt: skip
    flag(
        "--dtype",
        metavar="TYPE",
        help="of parameters and activations: bf16 (default; fp16 on V100), fp16, fp32",
    )
    for name, text in (
        ("dp", "data-parallel replicas"),
        ("tp", "ranks of tensor parallelism"),
        ("pp", "pipeline stages"),
        ("cp", "ranks of context parallelism"),
        ("ep", "ranks of expert parallelism"),
    ):
        flag(f"--{name}", metavar="N", type=count_argument(1), help=f"fix the {text}")
    flag("--stage", metavar="NAME", help=f"fix what data parallelism shards: {', '.join(STAGES)}")
    flag("--schedule", metavar="NAME", help=f"fix the pipeline's schedule: {', '.join(SCHEDULES)}")
    flag("--micro-batch", metavar="N", type=count_argument(1), help="fix the sequences of a micro-batch")
    flag("--recompute", metavar="NAME", help=f"fix what backward computes again: {', '.join(RECOMPUTE)}")
    flag("--scores", action="store_true", help="attention stores its scores, without a fused kernel")
    flag("--top", metavar="N", type=count_argument(1), help="candidates to show (default 5)")
    flag(
        "--fabric",
        metavar="NAME",
        help="rails or fat-tree: 32 or 4 hosts below a leaf switch (with any plan)",
    )
    flag("--leaf-hosts", metavar="N", type=count_argument(1), help="hosts below a leaf switch")
    flag("--oversubscription", metavar="X", type=float, help="by how much links above the leaves are too few")
    flag("--sites", metavar="N", type=count_argument(2), help="sites of --hosts each, joined by --wan")
    flag("--wan", metavar="LINK", help="a site's link to the others, as for --between")
    flag("--rtt", metavar="MS", type=float, help="round trip between sites in milliseconds (default 75)")
    flag("--every", metavar="H", type=count_argument(1), help="inner steps of DiLoCo (default 100)")


JOB_FLAGS = (
    "seq", "batch", "dtype", "dp", "tp", "pp", "cp", "ep", "stage", "schedule", "micro_batch", "recompute", "scores",
    "top", "sites", "wan", "rtt", "every",
)  # fmt: skip
FIXED = ("dp", "tp", "pp", "cp", "ep", "stage", "schedule", "micro_batch", "recompute")
#: Flags of the other plans that would be ignored.
OTHERS = (
    "collective", "minbytes", "maxbytes", "stepbytes", "stepfactor", "datatype", "algorithm", "parameters", "memory",
    "record", "table",
)  # fmt: skip


def refuse_combinations(
    fail: Callable[[object], NoReturn], arguments: argparse.Namespace, shape: ModelShape | None
) -> None:
    """Refuse what would otherwise be ignored."""
    if shape is None:
        for name in JOB_FLAGS:
            if getattr(arguments, name):
                fail(
                    f"--{name.replace('_', '-')}: only valid for a whole job: --model with {', '.join(PRESETS)}, or "
                    "with params= alone"
                )
        return
    for name in OTHERS:
        if getattr(arguments, name):
            given = arguments.collective if name == "collective" else f"--{name}"
            if name == "datatype":
                fail(f"-d: not valid for a whole job; valid: --dtype {arguments.datatype}")
            hint = (
                "; for a step of data parallelism give tokens= or step_ms= in --model"
                if name == "collective"
                else ""
            )
            fail(f"{given}: not valid for a whole job (--model {shape.name}){hint}")
    if (arguments.sites is None) != (arguments.wan is None):
        fail("--sites and --wan: give both, for example --sites 2 --wan 1gbit")
    for name in ("rtt", "every"):
        if arguments.wan is None and getattr(arguments, name) is not None:
            fail(f"--{name}: only valid with --sites and --wan")


def with_fabric(arguments: argparse.Namespace, system: System) -> System:
    """Return the system with the switches that the flags describe."""
    fabric, leaf, over = arguments.fabric, arguments.leaf_hosts, arguments.oversubscription
    if fabric is not None and fabric.lower() not in LEAF_HOSTS:
        raise ValueError(f"--fabric: {not_one_of(fabric, LEAF_HOSTS)}")
    if fabric is None and leaf is None and over is None:
        return system
    leaf = leaf or LEAF_HOSTS[(fabric or FAT_TREE).lower()]
    try:
        return replace(
            system, leaf_hosts=leaf, oversubscription=system.oversubscription if over is None else over
        )
    except ValueError as error:
        raise ValueError(f"--{error}") from None


def options_of(
    arguments: argparse.Namespace, shape: ModelShape, system: System, specs: Sequence[str]
) -> JobOptions:
    """Return the job that the flags describe; ``specs`` are the codecs to try.

    Raises:
        ValueError: A flag is wrong. The message names it.
    """
    device = system.device
    if not device.tflops:
        raise ValueError(
            f"--model {shape.name}: no peak FLOP/s is known for the device {device.name}: a whole job needs "
            "--system or --device of a GPU. For a step of data parallelism give tokens=, those of a rank in a step "
            "(for example tokens=8192), or step_ms="
        )
    name = (
        arguments.dtype or ("bf16" if any(kind == "bf16" for kind, _ in device.tflops) else "fp16")
    ).lower()
    if name not in DTYPES:
        raise ValueError(f"--dtype: {not_one_of(name, DTYPES)}")
    seq = arguments.seq or shape.context
    if shape.positions and seq > shape.positions:
        raise ValueError(f"--seq {seq}: {shape.name} has positions for {shape.positions} tokens")
    sites = arguments.sites or 1
    batch = arguments.batch or _default_batch(seq, system.ranks * sites)
    if batch % sites:
        raise ValueError(f"--batch {batch}: does not divide among {sites} sites")
    fixed = {}
    for field, valid in (("stage", STAGES), ("schedule", SCHEDULES), ("recompute", RECOMPUTE)):
        value = getattr(arguments, field)
        if value is not None and value.lower() not in valid:
            raise ValueError(f"--{field}: {not_one_of(value, valid)}")
    for field in FIXED:
        value = getattr(arguments, field)
        if value is not None:
            fixed[field] = value.lower() if isinstance(value, str) else value
    wide_area = None
    if arguments.wan is not None:
        rtt = 75.0 if arguments.rtt is None else arguments.rtt
        port = find_port("wan", arguments.wan)
        wide_area = WideArea(sites=sites, port=port, rtt_ms=rtt, every=arguments.every or 100)
    try:
        job = Job(
            model=shape,
            system=system,
            batch=batch // sites,
            seq=seq,
            dtype=DTYPES[name],
            flash=not arguments.scores,
            feedback=tuple(spec for spec in specs if needs_feedback(parse(spec))),
        )
    except ValueError as error:
        raise ValueError(f"--dtype {name}: {error}") from None
    return JobOptions(job=job, fixed=fixed, top=arguments.top or 5, wide_area=wide_area)


def _default_batch(seq: int, ranks: int) -> int:
    # A power of two times the ranks divides among most layouts.
    batch = ranks
    while 2 * batch * seq <= BATCH_TOKENS:
        batch *= 2
    return batch


def find_port(flag: str, link: str) -> hardware.Port:
    """Return the port that a flag names.

    Raises:
        ValueError: There is no such link; the message names the flag and lists the links.
    """
    try:
        return hardware.find_port(link)
    except ValueError as error:
        raise ValueError(f"--{flag}: {str(error).removeprefix('link: ')}") from None
