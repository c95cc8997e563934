from __future__ import annotations

import pytest

from dtcomm.compress.dgc import DGC
from dtcomm.compress.guard import finer
from dtcomm.compress.spec import parse_scheme


@pytest.mark.parametrize(
    "spec",
    [
        "dgc",
        "dgc:ratio=0.01,momentum=0.5",
        "dgc:clip=2.5,warmup=400,values=fp16",
        "powersgd:rank=2,alternate=true,factors=int8",
        "topk:values=fp16",
        "randk:ratio=0.02,values=int4",
    ],
)
def test_specs_print_and_parse(spec: str) -> None:
    assert str(parse_scheme(spec)) == spec
    assert parse_scheme(str(parse_scheme(spec))) == parse_scheme(spec)


def test_options_of_powersgd_may_follow_the_codec_of_its_factors() -> None:
    parsed = parse_scheme("powersgd:factors=int8:block=64,round=stochastic,rank=2")
    assert str(parsed) == "powersgd:rank=2,factors=int8:block=64,round=stochastic"


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        (
            "none/int8",
            "A/B means codec A inside hosts and codec B between hosts, which is not supported here",
        ),
        ("topk:ratio=0.01/fp16", "the codec of what topk sends is an option: topk:ratio=0.01,values=fp16"),
        ("randk/int8", "the codec of what randk sends is an option: randk:values=int8"),
        (
            "powersgd:rank=4/int8",
            "the codec of what powersgd sends is an option: powersgd:rank=4,factors=int8",
        ),
        ("dgc/fp16", "the codec of what dgc sends is an option: dgc:values=fp16"),
        ("topk:values=sign", "option 'values' is sign; valid: bf16, fp16, fp32, int8"),
        (
            "dgc:ration=0.1",
            "dgc: unknown option 'ration'; valid options: ratio, momentum, clip, warmup, values",
        ),
        ("dgc:momentum=1", "dgc: option 'momentum' is 1.0; valid: 0 or more, below 1"),
        ("dgc:ratio=0", "option 'ratio' is 0"),
        ("dgc:warmup=soon", "option 'warmup' is 'soon'; valid: 0 or more steps"),
        ("dgc:values=int9", "option 'values' is int9"),
        ("powersgd:rank=2,factors=", "powersgd: option 'factors='; valid: rank=1 to 64"),
        ("powersgd:factors=int8:block=64,rung=2", "int8: unknown option 'rung'"),
    ],
)
def test_wrong_specs_are_refused_by_name(spec: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        parse_scheme(spec)


def test_dgc_s_ratio_falls_by_quarters() -> None:
    dgc = DGC(ratio=0.001, warmup=40)
    ratios = [dgc.at(step).ratio for step in range(50)]
    assert ratios[0] == 0.25
    assert ratios[10] == 0.0625
    assert ratios[39] == 0.25 / 4**3
    assert ratios[40:] == [0.001] * 10
    assert sorted(ratios, reverse=True) == ratios
    assert DGC(ratio=0.5).at(0).ratio == 0.5
    assert DGC(ratio=0.5, warmup=10).at(3).ratio == 0.5


def test_finer_dgc_sends_more() -> None:
    assert finer(DGC(ratio=0.001)) == DGC(ratio=0.004)
    assert str(finer(DGC(ratio=0.25))) == "int8"
