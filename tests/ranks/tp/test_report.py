"""The report of a model that `dtcomm.tp.compress` converted: its traffic, what was not compressed, and who prints."""

from __future__ import annotations

import contextlib
import io
import json
import logging
from typing import Any

import pytest
import torch
from torch import nn

from dtcomm import tp
from dtcomm.codecs import codec
from dtcomm.launch.ranks import run_ranks
from tests.support.rank_tests import on_ranks

WIDTH, HIDDEN = 64, 256
PLAN = {"*.up": "column", "*.down": "row", "head": "column_gather"}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.down(torch.relu(self.up(x)))
        return out


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(WIDTH, 128)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.blocks(x))
        return out


def compressed(*args: Any, dtype: torch.dtype = torch.float32, **options: Any) -> tuple[Model, tp.TPState]:
    torch.manual_seed(0)
    model = Model().to(dtype)
    return model, tp.compress(model, None, *args, plan=PLAN, **options)


def printed(state: tp.TPState, **options: bool) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as output:
        state.print_report(**options)
    return output.getvalue()


def train_and_report(rank: int, ranks: int) -> dict[str, Any]:
    tokens = 512
    model, state = compressed("int8", backward_codec="int4", exclude="blocks.1", latency=False)
    assert state.report().messages == 0
    for _ in range(2):
        model(torch.ones(tokens, WIDTH, requires_grad=True)).square().mean().backward()
    report = state.report()
    rows = {(row.what, row.codec): row for row in report.rows}
    kinds = {"activations": ("int8", "none"), "gradients": ("int4", "none")}
    assert set(rows) == {(what, codec) for what, codecs in kinds.items() for codec in codecs}
    # Forward: the sum of one block and the gathered head; backward: the sums of the inputs of "up".
    activations = rows["activations", "int8"]
    assert activations.names == ("blocks.0.down", "head") and activations.calls == 4
    # On two ranks both a sum and a gather send half of the payload, once or twice: one-shot and one shard.
    elements = tokens * WIDTH + tokens * 128 // 2
    assert activations.wire_bytes == 2 * codec("int8").wire_bytes(elements)
    assert activations.plain_bytes == 2 * 4 * elements
    assert rows["activations", "none"].names == ("blocks.1.down",)
    assert rows["activations", "none"].wire_bytes == rows["activations", "none"].plain_bytes
    assert rows["gradients", "int4"].saved_bytes > 0.8 * rows["gradients", "int4"].plain_bytes
    assert report.messages == sum(row.calls for row in report.rows)
    assert report.uncompressed == "" and report.notes == (
        "exclude: blocks.1.up ('blocks.1')",
        "exclude: blocks.1.down ('blocks.1')",
    )
    text = str(report)
    assert "total" in text and "not measured: verify=20" in text
    assert printed(state) == (f"{report.summary()}\n" if rank == 0 else "")
    assert printed(state, verbose=True, all_ranks=True) == f"{text}\n"
    return json.loads(report.to_json())


def test_report_has_the_traffic_of_the_whole_model() -> None:
    for values in run_ranks(train_and_report, 2):
        assert values["integration"] == "TP" and len(values["by_message"]) == 6
        assert sum(row["wire_bytes"] for row in values["rows"]) == values["wire_bytes"]


def log_uncompressed(rank: int, ranks: int, dtype: torch.dtype, tokens: int, grad: bool) -> Any:
    logged: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("dtcomm").addHandler(handler)
    model, state = compressed("int8", dtype=dtype)
    with torch.set_grad_enabled(grad):
        for _ in range(3):
            y = model(torch.ones(tokens, WIDTH, dtype=dtype))
            if grad:
                y.sum().backward()
    logging.getLogger("dtcomm").removeHandler(handler)
    layer = model.blocks[0].down
    return logged, str(state.report()).splitlines()[0], str(layer.comm.traffic), repr(layer.comm)


@pytest.mark.parametrize(
    ("dtype", "tokens", "grad", "begins", "says"),
    [
        (
            torch.float32,
            1,
            False,
            "not compressed: ",
            "activations of 2 of 3 layers with 50% of the elements",
        ),
        (torch.float32, 1, True, "not compressed: ", "(small: predicted to be faster uncompressed)"),
        (torch.float64, 512, False, "nothing is compressed although asked for: ", "3 layers"),
        (
            torch.float64,
            512,
            True,
            "nothing is compressed although asked for: ",
            "(int8 does not take float64)",
        ),
    ],
)
def test_sums_that_were_sent_uncompressed_are_logged_once(
    dtype: torch.dtype, tokens: int, grad: bool, begins: str, says: str
) -> None:
    (logged, first_line, traffic, comm), (elsewhere, *_) = run_ranks(log_uncompressed, 2, dtype, tokens, grad)
    assert first_line.startswith(begins) and says in first_line
    assert logged == [f"dtcomm.tp: {first_line}"] and elsewhere == []
    assert traffic.startswith(f"3 sums of {3 * tokens * WIDTH:,} elements, ")
    assert "all uncompressed (" in traffic and "ProcessGroup" not in comm and "\n" not in comm


def test_nothing_is_logged_where_all_is_as_asked() -> None:
    for logged, first_line, traffic, _ in run_ranks(log_uncompressed, 2, torch.float32, 4096, False):
        assert logged == [] and first_line.startswith("dtcomm TP: 5 layers")
        assert "uncompressed" not in traffic


@on_ranks(1)
def test_one_rank_is_told_that_nothing_is_compressed(rank: int, ranks: int) -> None:
    one_rank = "nothing is compressed: the process group has one rank"
    (logged, first_line, *_) = log_uncompressed(rank, ranks, torch.float32, 1, True)
    assert first_line == one_rank and logged == [f"dtcomm.tp: {one_rank}"]


@on_ranks(2)
def test_compiled_code_is_counted_by_group(rank: int, ranks: int) -> None:
    model, state = compressed("int8", latency=False)
    with torch.no_grad():
        torch.compile(model, backend="eager", fullgraph=True)(torch.ones(256, WIDTH))
    rows = state.report().rows
    assert sum(row.calls for row in rows if row.names == ("(compiled code)",)) == 3
    _, later = compressed("int8", latency=False)
    assert later.report().rows == ()
