"""The arguments of `dtcomm.tp.compress`: the words of the other integrations, and errors where they are given."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dtcomm import tp
from dtcomm.codecs import codec
from dtcomm.compress.policy import Policy
from tests.ranks.tp.test_report import PLAN, Model
from tests.support.rank_tests import on_ranks

ERRORS: list[tuple[dict[str, Any], type[Exception], str]] = [
    (
        {"codec": "intt8"},
        ValueError,
        r"codec: unknown codec 'intt8' \(did you mean 'int8'\?\); valid codecs:",
    ),
    ({"codec": "int8:blok=64"}, ValueError, "int8: unknown option 'blok'"),
    ({"codec": "auto"}, ValueError, "codec: 'auto' is for the gradients of dtcomm.ddp.compress; here"),
    (
        {"codec": "ndim<2 -> none, * -> int8"},
        ValueError,
        "is a policy, .* for dtcomm.ddp.compress; here plan=",
    ),
    ({"codec": "powersgd:rank=4"}, ValueError, "codec: 'powersgd' keeps state from step to step"),
    ({"codec": "ef:int4"}, ValueError, "codec: 'ef' keeps state from step to step"),
    ({"codec": "int8/int4"}, ValueError, "a codec for each level of hosts; tensor-parallel sums have one"),
    ({"codec": "plan.json"}, ValueError, "codec: 'plan.json' is a plan file; pass plan='plan.json'"),
    ({"codec": "llama"}, ValueError, "codec: 'llama' is a plan; pass plan='llama'"),
    ({"codec": PLAN}, TypeError, "codec: expected a codec or its spec, .*, got dict; a plan of layers is"),
    ({"codec": Policy.parse("* -> int8")}, TypeError, "codec: expected a codec or its spec, .* got Policy"),
    ({"codec": 8}, TypeError, "codec: expected a codec or its spec, such as 'int8', got int"),
    ({"plan": "int4"}, ValueError, "plan: 'int4' is a codec; pass codec='int4'"),
    ({"backward_codec": "intt4"}, ValueError, "backward_codec: unknown codec 'intt4'"),
    ({"codec": "topk"}, ValueError, "codec: topk.* loses 96% .*allow_inaccurate=True allows it"),
    ({"backward_codec": "int2"}, ValueError, "backward_codec: int2 loses"),
    ({"allow_inaccurate": "yes"}, TypeError, "allow_inaccurate: expected a bool, got str"),
    ({"feedback": True}, TypeError, "unknown option 'feedback'; valid: model, group, codec, plan"),
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
        assert tp.compress(Model(), None, spec, PLAN).codec == "int4:block=64"
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
