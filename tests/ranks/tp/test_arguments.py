"""The arguments of `dtcomm.tp.compress`: the words of the other integrations, and errors where they are given."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dtcomm import tp
from dtcomm.codecs import codec
from dtcomm.compress.policy import Policy
from dtcomm.ddp import Guard
from tests.ranks.tp.test_report import PLAN, Model
from tests.support.rank_tests import on_ranks

ERRORS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"spec": "intt8"}, ValueError, r"spec: unknown codec 'intt8' \(did you mean 'int8'\?\); valid codecs:"),
    ({"codec": "intt8"}, ValueError, "spec: unknown codec 'intt8'"),
    ({"spec": "int8:blok=64"}, ValueError, "int8: unknown option 'blok'"),
    ({"spec": "auto"}, ValueError, "spec: 'auto' is for the gradients of dtcomm.ddp.compress; here"),
    (
        {"spec": "ndim<2 -> none, * -> int8"},
        ValueError,
        "is a policy, .* for dtcomm.ddp.compress; here plan=",
    ),
    ({"spec": "powersgd:rank=4"}, ValueError, "spec: 'powersgd' keeps state from step to step"),
    ({"spec": "ef:int4"}, ValueError, "spec: 'ef' keeps state from step to step"),
    ({"spec": "int8/int4"}, ValueError, "a codec for each level of hosts; tensor-parallel sums have one"),
    ({"spec": "plan.json"}, ValueError, "spec: 'plan.json' is a plan file; pass plan='plan.json'"),
    ({"spec": "llama"}, ValueError, "spec: 'llama' is a plan; pass plan='llama'"),
    ({"spec": PLAN}, TypeError, "spec: expected a codec or its spec, .*, got dict; a plan of layers is"),
    ({"spec": Policy.parse("* -> int8")}, TypeError, "spec: expected a codec or its spec, .* got Policy"),
    ({"spec": 8}, TypeError, "spec: expected a codec or its spec, such as 'int8', got int"),
    ({"plan": "int4"}, ValueError, "plan: 'int4' is a codec; pass spec='int4'"),
    ({"spec": "int4", "codec": "int8"}, ValueError, "codec: another name of spec, which is 'int4' already"),
    ({"backward_codec": "intt4"}, ValueError, "backward_codec: unknown codec 'intt4'"),
    ({"spec": "topk"}, ValueError, "spec: topk.* loses 96% .*allow_inaccurate=True allows it"),
    ({"backward_codec": "int2"}, ValueError, "backward_codec: int2 loses"),
    ({"allow_inaccurate": "yes"}, TypeError, "allow_inaccurate: expected a bool, got str"),
    ({"feedback": True}, ValueError, "feedback: got True; valid here: False or 'auto'"),
    ({"guard": Guard()}, ValueError, "guard: tensor parallelism has none"),
    ({"guard": True}, ValueError, "guard: tensor parallelism has none"),
    ({"exclude": "haed"}, ValueError, r"exclude: 'haed' matches no parameter .*\(did you mean 'head'\?\)"),
    ({"exclude": 3}, TypeError, "exclude: expected patterns of names, got int"),
    ({"algorithm": "rings"}, ValueError, "rings"),
]


@on_ranks(2)
def test_wrong_arguments_fail_where_they_are_given(rank: int, ranks: int) -> None:
    for options, error, message in ERRORS:
        model = Model()
        with pytest.raises(error, match=message):
            tp.compress(model, None, **{"plan": PLAN, **options})
        assert type(model.head) is torch.nn.Linear, options
    with pytest.raises(TypeError, match="unknown option 'feedbak'"):
        tp.compress(Model(), None, "int8", PLAN, feedbak=True)  # type: ignore[call-arg]
    for spec in ("int4:block=64", codec("int4:block=64")):
        for options in ({"spec": spec}, {"codec": spec}):
            state = tp.compress(Model(), None, plan=PLAN, feedback="auto", **options)
            assert state.codec == "int4:block=64"
    assert tp.compress(Model(), None, "int2", PLAN, allow_inaccurate=True).codec == "int2"


@on_ranks(2)
def test_excluded_layers_stay_uncompressed(rank: int, ranks: int) -> None:
    """Excluded layers are cut over the ranks and communicate uncompressed, in both directions."""
    torch.manual_seed(0)
    model = Model()
    state = tp.compress(model, None, "int8", PLAN, backward_codec="int8", exclude=["head", "*.0.down"])
    assert state.excluded == {"blocks.0.down": "*.0.down", "head": "head"}
    specs = {
        name: (str(module.comm.codec), str(module.comm.backward_codec))
        for name, module in model.named_modules()
        if hasattr(module, "comm")
    }
    excluded, compressed = ("blocks.0.down", "head"), ("blocks.0.up", "blocks.1.up", "blocks.1.down")
    assert specs == dict.fromkeys(excluded, ("none", "none")) | dict.fromkeys(compressed, ("int8", "int8"))
