"""Proposed plans: equal to the ready ones, and with a reason for what stays whole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dtcomm.cli.main import main
from dtcomm.extensions.calibrate import Proposal, propose_plan
from dtcomm.tp.layer_plan import PLANS, match_layers, read_plan
from tests.support.tiny_models import FAMILIES, tiny_model

pytest.importorskip("transformers", reason="pip install transformers")


def propose(family: str, ranks: int = 2, **options: Any) -> Proposal:
    with torch.device("meta"):
        return propose_plan(tiny_model(family), ranks, **options)


def reasons(proposal: Proposal) -> dict[str, tuple[str, str]]:
    return {row.pattern.rpartition(".")[2]: (row.kind, row.reason) for row in proposal.rows}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_proposal_for_a_known_family_is_its_ready_plan(family: str) -> None:
    with torch.device("meta"):
        model = tiny_model(family)
    proposal = propose_plan(model, 2)
    kinds = {name: entry.kind for name, (_, entry) in match_layers(model, PLANS[family]).items()}
    assert {name: entry.kind for name, (_, entry) in match_layers(model, proposal.plan).items()} == kinds
    assert proposal.ready == family == proposal.model_type
    assert proposal.rank_parameters < proposal.parameters
    assert f"the same as the built-in plan {family!r}" in str(proposal)


def test_all_ready_plans_are_tested() -> None:
    assert FAMILIES.keys() == PLANS.keys()


def test_models_without_a_ready_plan() -> None:
    granite = propose("granite")
    assert not granite.ready and granite.sums == 4
    assert set(granite.plan.values()) == {"column", "row"} and len(granite.plan) == 7
    olmo2 = reasons(propose("olmo2"))
    assert olmo2["q_proj"] == ("whole", "q_norm normalizes the features of all heads together")
    assert olmo2["down_proj"] == ("row", "feed-forward, gated")
    distilbert = propose("distilbert")
    assert sorted(distilbert.plan.values()) == ["column"] * 4 + ["row"] * 2
    falcon = reasons(propose("falcon"))
    assert falcon["query_key_value"][0] == "whole" and falcon["dense_h_to_4h"][0] == "column"
    gpt_oss = propose("gpt_oss")
    assert gpt_oss.plan == {} and "no layer can be cut" in str(gpt_oss)
    assert reasons(gpt_oss)["q_proj"] == ("whole", "the parameter sinks of attention cannot be cut")


def test_what_does_not_divide_is_said() -> None:
    llama = reasons(propose("llama", 4))
    assert llama["q_proj"] == ("whole", "2 heads of keys and values are not divisible by 4 ranks")
    assert llama["down_proj"][0] == "row"
    assert "are not divisible by 3 ranks" in reasons(propose("bert", 3))["query"][1]
    assert reasons(propose("mixtral", 5))["experts"] == (
        "whole",
        "64 hidden features are not divisible by 5 ranks",
    )
    with pytest.raises(ValueError, match="ranks=0: expected 1 or more"):
        propose("llama", 0)
    with pytest.raises(TypeError, match=r"model: expected a torch\.nn\.Module, got str"):
        propose_plan("llama", 2)  # type: ignore[arg-type]


def test_the_vocabulary_is_cut_where_it_may_be() -> None:
    llama = reasons(propose("olmo2", vocabulary=True))
    assert llama["lm_head"] == ("column_gather", "words")
    assert llama["embed_tokens"] == ("vocabulary", "words")
    assert reasons(propose("gemma", vocabulary=True))["lm_head"][1].endswith("tied")
    assert reasons(propose("olmo2"))["lm_head"] == ("whole", "vocabulary: vocabulary=True cuts it")


class Block(nn.Module):
    """A block without configuration, and with names of its own."""

    def __init__(self, norm: bool) -> None:
        super().__init__()
        self.widen, self.narrow = nn.Linear(16, 40), nn.Linear(40, 16)
        self.norm = nn.LayerNorm(40) if norm else nn.Identity()


def test_blocks_are_found_by_their_shapes() -> None:
    model = nn.Module()
    model.blocks = nn.ModuleList([Block(norm=False), Block(norm=False), Block(norm=True)])
    model.head = nn.Linear(16, 5)
    proposal = propose_plan(model, 2)
    # A pattern would match the third block too.
    assert proposal.plan == {
        f"blocks.{index}.{name}": kind
        for index in (0, 1)
        for name, kind in (("widen", "column"), ("narrow", "row"))
    }
    whole = [row.reason for row in proposal.rows if row.kind == "whole"]
    assert whole == ["feed-forward with norm: what it computes is not known"] * 2 + [
        "not one of a pair of layers that can be cut"
    ]


class CausalSelfAttention(nn.Module):
    """nanoGPT's names and shapes, the number of heads aside."""

    def __init__(self) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(16, 48), nn.Linear(16, 16)


def test_heads_are_said_where_the_model_does_not_say_them() -> None:
    model = nn.ModuleList([CausalSelfAttention()])
    assert reasons(propose_plan(model, 2))["c_proj"][1].startswith(
        "the number of heads is not known: heads=N"
    )
    assert propose_plan(model, 2, heads=4).plan == {"*.c_attn": "column_packed3", "*.c_proj": "row"}
    whole = reasons(propose_plan(model, 2, heads=(4, 1)))["c_proj"]
    assert whole == ("whole", "1 heads of keys and values are not divisible by 2 ranks")
    assert reasons(propose_plan(model, 2, heads=6))["c_proj"] == ("whole", "16 features are not 6 heads")
    with pytest.raises(ValueError, match="heads=0"):
        propose_plan(model, 2, heads=0)


def test_attention_and_mlp_in_one_module() -> None:
    block = nn.Module()
    for name in ("wq", "wk", "wv", "wo"):
        block.add_module(name, nn.Linear(16, 16))
    block.fc1, block.fc2, block.norm = nn.Linear(16, 64), nn.Linear(64, 16), nn.LayerNorm(16)
    columns = dict.fromkeys(("*.wq", "*.wk", "*.wv", "*.fc1"), "column")
    assert propose_plan(nn.ModuleList([block]), 2, heads=4).plan == columns | {"*.wo": "row", "*.fc2": "row"}
    block.q_norm = nn.LayerNorm(16)
    whole = reasons(propose_plan(nn.ModuleList([block]), 2, heads=4))
    assert whole["wq"] == ("whole", "q_norm normalizes the features of all heads together")


def make_block() -> nn.Module:
    return nn.ModuleList([Block(norm=False)])


def test_the_command_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    assert (
        main(
            ["tp", "inspect", f"{__name__}:make_block", "--ranks", "4", "--heads", "8,4", "--out", str(path)]
        )
        == 0
    )
    output = capsys.readouterr()
    assert "*.widen" in output.out and f"plan='{path}'" in output.err
    plan = read_plan(path)
    assert {pattern: entry.kind for pattern, entry in plan.items()} == {
        "*.widen": "column",
        "*.narrow": "row",
    }
    # A model of any size is inspected without its memory.
    assert main(["tp", "inspect", "llama", "--ranks", "8", "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["parameters"] > 6e9 and content["ready"] == "llama" and content["sums"] == 64
    for argument, message in (
        ("no_such_model", "'no_such_model' is no folder with a config.json, no model type"),
        ("no.such.module:f", "MODEL: no.such.module:f: "),
        (f"{__name__}:Path", "returned PosixPath; expected a torch.nn.Module"),
        ("gpt_oss", "there is no plan to write: no layer of GptOssForCausalLM can be cut"),
    ):
        assert main(["tp", "inspect", argument, "--out", str(tmp_path / "none.json")]) == 2
        output = capsys.readouterr()
        assert message in output.err and bool(output.out) == (
            argument == "gpt_oss"
        )  # its table has the reasons
    assert not (tmp_path / "none.json").exists()
