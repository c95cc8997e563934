"""Specs of schemes: parsing, printing, refusals, and the guard's ladder."""

from __future__ import annotations

import re
from contextlib import nullcontext

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from dtcomm.codecs import codec
from dtcomm.compress.feedback import DGC
from dtcomm.compress.guard import cosine_limit, finer, residual_limit, send_interval
from dtcomm.compress.policy import choose_for
from dtcomm.compress.spec import LevelCodecs, parse_scheme, require_kernels
from dtcomm.kernels import dispatch


@pytest.mark.parametrize(
    "spec",
    [
        *["dgc", "dgc:ratio=0.01,momentum=0.5", "dgc:clip=2.5,warmup=400,values=fp16"],
        *["powersgd:rank=2,alternate=true,factors=int8", "topk:values=fp16", "randk:ratio=0.02,values=int4"],
        *["int8/int4:block=64,round=stochastic", "none/topk:ratio=0.02"],
        "topk:ratio=0.1/topk:ratio=0.02,values=fp16",
    ],
)
def test_specs_print_and_parse(spec: str) -> None:
    assert str(parse_scheme(spec)) == spec
    assert parse_scheme(str(parse_scheme(spec))) == parse_scheme(spec)


def test_options_of_powersgd_may_follow_the_codec_of_its_factors() -> None:
    parsed = parse_scheme("powersgd:factors=int8:block=64,round=stochastic,rank=2")
    assert str(parsed) == "powersgd:rank=2,factors=int8:block=64,round=stochastic"


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("none/powersgd:rank=2", "powersgd:rank=2 is a compressor, which has no levels"),
        ("int8/exact", "exact uses one representation on all levels of a hierarchy; give it alone"),
        ("int8/int9", "unknown codec 'int9'"),
        ("int8/", "unknown codec ''"),
        ("topk:ratio=0.01/fp16", "the codec of what topk sends is an option: topk:ratio=0.01,values=fp16"),
        ("randk/int8", "the codec of what randk sends is an option: randk:values=int8"),
        ("powersgd:rank=4/int8", "the codec of what powersgd sends is an option: powersgd:rank=4,factors="),
        ("dgc/fp16", "the codec of what dgc sends is an option: dgc:values=fp16"),
        ("topk:values=sign", "option 'values' is sign; valid: bf16, fp16, fp32, int8"),
        ("dgc:ration=0.1", "dgc: unknown option 'ration' (did you mean 'ratio'?); valid options: ratio, "),
        ("dgc:momentum=1", "dgc: option 'momentum' is 1.0; valid: 0 or more, below 1"),
        ("dgc:ratio=0", "option 'ratio' is 0"),
        ("dgc:warmup=soon", "option 'warmup' is 'soon'; valid: 0 or more steps"),
        ("dgc:values=int9", "option 'values' is int9"),
        ("powersgd:rank=2,factors=", "powersgd: option 'factors='; valid: rank=1 to 64"),
        ("powersgd:rank=0", "rank is 0; valid: 1 to 64"),
        ("powersgd:rang=2", "option 'rang=2'; valid: rank"),
        ("powersgd:rank=2,factors=int9", "unknown codec 'int9'"),
        ("power", "unknown codec or compressor 'power'"),
        ("powersgd:factors=int8:block=64,rung=2", "int8: unknown option 'rung'"),
    ],
)
def test_wrong_specs_are_refused(spec: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        parse_scheme(spec)


def test_dgc_s_ratio_falls_by_quarters() -> None:
    dgc = DGC(ratio=0.001, warmup=40)
    ratios = [dgc.at(step).ratio for step in range(50)]
    assert (ratios[0], ratios[10], ratios[39]) == (0.25, 0.0625, 0.25 / 4**3)
    assert ratios[40:] == [0.001] * 10
    assert sorted(ratios, reverse=True) == ratios
    assert DGC(ratio=0.5).at(0).ratio == 0.5
    assert DGC(ratio=0.5, warmup=10).at(3).ratio == 0.5


def test_a_finer_dgc_has_a_larger_ratio() -> None:
    assert finer(DGC(ratio=0.001)) == DGC(ratio=0.004)
    assert str(finer(DGC(ratio=0.25))) == "int8"


def test_a_codec_for_each_level_is_a_scheme() -> None:
    scheme = parse_scheme("none/int4")
    assert isinstance(scheme, LevelCodecs)
    assert (scheme.inside, scheme.between) == (codec("none"), codec("int4"))
    assert not scheme.lossless(torch.float32) and parse_scheme("none/none").lossless(torch.float32)
    assert torch.float64 not in scheme.dtypes and torch.bfloat16 in scheme.dtypes
    assert choose_for(scheme, torch.empty(64, 64)).codec == scheme
    choice = choose_for(scheme, torch.empty(64, 64, dtype=torch.float64))
    assert choice.reason == "none/int4 does not take float64"
    assert (
        choose_for(parse_scheme("none/none"), torch.empty(64)).reason
        == "none/none would not make float32 smaller"
    )


def test_the_guard_s_limits_of_two_levels_are_those_of_the_coarser_one() -> None:
    assert [
        str(finer(parse_scheme(spec))) for spec in ("int8/int4", "none/fp16", "fp16/topk:ratio=0.01")
    ] == ["fp16/int8", "none", "none/topk:ratio=0.04"]
    assert residual_limit(parse_scheme("int8/topk:ratio=0.01")) == residual_limit(
        parse_scheme("topk:ratio=0.01")
    )
    assert cosine_limit(parse_scheme("int8/int4")) == cosine_limit(parse_scheme("int8/sign")) == 0.5
    assert cosine_limit(parse_scheme("sign")) == 0.7
    assert (
        send_interval(parse_scheme("int8/topk:ratio=0.01")) == 100
        and send_interval(parse_scheme("int8/int4")) == 1
    )


def test_a_model_on_a_device_needs_cuda_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The errors say what to build, or name the codecs that have a kernel; sums of `exact` need none."""
    schemes = [parse_scheme(spec) for spec in ("int8/int4", "powersgd", "dgc", "exact")]
    with FakeTensorMode():
        weight = torch.empty(8, device="cuda")
    for built in (True, False):
        monkeypatch.setattr(dispatch, "installed", lambda built=built: built)
        require_kernels([parse_scheme("int8")], [torch.empty(8)], "spec")
        with pytest.raises(
            ValueError, match=r"^parameters: the model .* 'lossless' has no kernel; valid: none"
        ):
            require_kernels([parse_scheme("lossless")], [weight], "parameters")
        for scheme in schemes:
            with (
                nullcontext()
                if built
                else pytest.raises(RuntimeError, match=r"^spec: .*_cuda.*DTCOMM_CUDA=1")
            ):
                require_kernels([scheme], [weight], "spec")
