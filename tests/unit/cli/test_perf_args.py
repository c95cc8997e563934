from __future__ import annotations

from functools import partial

import pytest

from dtcomm.cli.perf.args import PerfOptions, Variant, parse


def test_the_defaults_are_those_of_nccl_tests_but_for_two() -> None:
    options = parse(["all_reduce"])
    assert options.sizes == [32 * 2**20]
    assert (options.iters, options.agg_iters, options.run_cycles, options.check) == (20, 1, 1, 1)
    assert (options.warmup_iters, options.average) == (5, 3)
    assert (options.ops, options.datatypes, options.root) == (("sum",), ("float",), 0)
    assert options.variants == (Variant(backend="native"),)


def test_short_and_long_flags_are_the_same() -> None:
    short = (
        "reduce_scatter -b 1K -e 4M -f 4 -n 7 -w 2 -m 3 -N 2 -c 5 -o max -d half -a 1 -z 1 -C -I -O 0 -T 9"
    )
    long = (
        "reduce_scatter --minbytes 1K --maxbytes 4M --stepfactor 4 --iters 7 --warmup_iters 2 --agg_iters 3 "
        "--run_cycles 2 --check 5 --op max --datatype fp16 --average 1 --blocking 1 --report_cputime --per_iter "
        "--out_of_place 0 --timeout 9"
    )
    assert parse(short.split()) == parse(long.split())
    assert parse(short.split()).sizes == [2**10, 2**12, 2**14, 2**16, 2**18, 2**20, 2**22]


def test_sizes_by_increment_and_all_roots() -> None:
    assert parse("broadcast -b 1M -e 3M -i 1M -r all".split()).sizes == [2**20, 2**21, 3 * 2**20]
    assert parse("broadcast -r all".split()).root is None
    assert parse("broadcast -r -1".split()).root is None


def test_variants_are_backends_times_codecs_times_algorithms() -> None:
    line = "all_reduce --backend native,gloo --codec none --codec int8 --algorithm ring,two_shot"
    variants = [str(variant) for variant in parse(line.split()).variants]
    native = [f"native {codec} {name}" for codec in ("none", "int8") for name in ("ring", "two_shot")]
    assert variants == [*native, "gloo none own"]
    assert parse("all_reduce --codec int8:block=32".split()).variants[0].codec == "int8"
    several = parse("all_reduce --codec none,int8:block=64,round=stochastic,int4 --compare gloo".split())
    codecs = [variant.codec for variant in several.variants]
    assert codecs == ["none", "int8:block=64,round=stochastic", "int4", "none"]
    assert several.compare == ("gloo",) and several.variants[-1].backend == "gloo"


def test_all_types_and_ops_omit_invalid_combinations() -> None:
    options = parse("all_reduce -d all -o all --codec int8".split())
    unsupported = partial(options.variants[0].why_unsupported, "all_reduce")
    does = {(d, o) for d in options.datatypes for o in options.ops if unsupported(d, o) is None}
    assert does == {(d, o) for d in ("half", "float", "bfloat16") for o in ("sum", "avg")}
    assert options.json is None and not options.quiet


def test_a_gather_has_no_operator() -> None:
    assert parse("all_gather -o max --codec int8".split()).ops == ("none",)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("alltoall", "invalid choice: 'alltoall'"),
        ("-b 1K", "the following arguments are required: collective"),
        ("all_reduce -b 1Q", "'1Q' is not a size"),
        ("all_reduce --compare ucc", "--compare 'ucc' is not one of gloo, nccl"),
        ("all_reduce --compare gloo --backend gloo", "--backend gloo does not measure dtcomm"),
        ("all_reduce -b 2K -e 1K", "-b 2048 is larger than -e 1024"),
        ("all_reduce -b 0 -e 1K -f 2", "do not grow"),
        ("all_reduce -n 0", "'0': expected a whole number of at least 1"),
        ("all_reduce -f 1", "'1': expected a whole number of at least 2"),
        ("all_reduce -d float128", "'float128' is not one of int8, "),
        ("all_reduce -o prod", "'prod' is not one of sum, avg, min, max, all"),
        ("all_reduce -d int32 -o avg", "-o avg: int32 has no average"),
        ("all_reduce --codec int9", "unknown codec 'int9' (did you mean 'int8'?); valid names: none"),
        ("all_reduce --codec int8 -d int32", "-d int32: codec int8 takes half, float, bfloat16"),
        ("all_reduce --codec int8 -o max", "-o max: codec int8 takes"),
        ("all_reduce --codec int8 --backend gloo", "--codec 'int8': gloo sends tensors uncompressed"),
        ("all_reduce --algorithm rign", "'rign' is not one of auto, direct, ring"),
        (
            "all_reduce --algorithm hierarchical:rign",
            "--algorithm 'rign' in 'hierarchical:rign' is not one of",
        ),
        ("sendrecv --algorithm ring", "--algorithm sendrecv has no algorithms"),
        ("broadcast -r x", "'x' is neither a rank nor all"),
        ("all_reduce --backend ucc", "'ucc' is not one of dtcomm, native, peer, process_group, gloo, nccl, "),
        ("all_reduce --backend os:getpid", "is not a subclass of"),
        ("all_reduce --backend no_such_module:X", "No module named 'no_such_module'"),
    ],
)
def test_the_error_of_wrong_arguments_is_one_line(
    line: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(line.split())
    assert caught.value.code == 2
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert message in last and last.startswith("dtcomm perf: error: ")


def test_stdout_holds_only_the_document() -> None:
    assert parse("all_reduce --json -".split()).quiet
    assert isinstance(parse(["all_reduce", "-J", "x"]), PerfOptions)
