from __future__ import annotations

import pytest

from dtcomm.compress.dgc import DGC
from dtcomm.compress.guard import finer
from dtcomm.compress.spec import scheme


@pytest.mark.parametrize(
    "spec",
    [
        "dgc",
        "dgc:ratio=0.01,momentum=0.5",
        "dgc:clip=2.5,warmup=400/fp16",
        "powersgd:rank=2,alternate=true/int8",
        "topk:values=fp16",
        "randk:ratio=0.02,values=int4",
    ],
)
def test_specs_print_and_parse(spec: str) -> None:
    assert str(scheme(spec)) == spec
    assert scheme(str(scheme(spec))) == scheme(spec)


def test_what_topk_sends_travels_in_the_codec_behind_the_slash() -> None:
    assert scheme("topk:ratio=0.02/fp16") == scheme("topk:ratio=0.02,values=fp16")
    assert scheme("randk/int8") == scheme("randk:values=int8")


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("int8/fp16", "int8/fp16: int8 leaves nothing for another codec; valid: topk, randk, powersgd, dgc"),
        ("topk/sign", "option 'values' is sign; valid: bf16, fp16, fp32, int8"),
        ("dgc:ration=0.1", "dgc: unknown option 'ration'; valid options: ratio, momentum, clip, warmup"),
        ("dgc:momentum=1", "dgc: option 'momentum' is 1.0; valid: 0 or more, below 1"),
        ("dgc:ratio=0", "option 'ratio' is 0"),
        ("dgc:warmup=soon", "option 'warmup' is 'soon'; valid: 0 or more steps"),
        ("dgc/int9", "option 'values' is int9"),
        ("powersgd:rank=2/", "unknown codec ''"),
    ],
)
def test_wrong_specs_are_refused_by_name(spec: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        scheme(spec)


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
