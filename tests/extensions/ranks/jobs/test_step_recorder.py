"""Step records of a training run, and their replay by `dtcomm plan step`."""

import json
from pathlib import Path

import pytest

from dtcomm import ddp
from dtcomm.extensions.jobs.command import main
from dtcomm.extensions.jobs.training_model import parse_record
from dtcomm.launch.ranks import run_ranks
from tests.unit.ddp.models import SMALL_BUCKETS, train, wrapped


def train_and_record(rank: int, world_size: int, path: str) -> bool:
    model = wrapped(**SMALL_BUCKETS)
    state = ddp.compress(model, "int8")
    with pytest.raises(ValueError, match="there is no folder"):
        state.record("/no/where.json")
    state.record(path, steps=5)
    train(model, rank, range(5))
    early = Path(path).exists()
    train(model, rank, range(2))
    return early


def test_a_run_is_recorded_and_replayed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "steps.json"
    assert run_ranks(train_and_record, 2, str(path)) == [False, False]
    content = json.loads(path.read_text())
    assert (content["ranks"], content["steps"]) == (2, 5)
    assert len(content["buckets"]) > 1 and content["buckets"][0]["ready_ms"] == 0
    assert content["step_ms"] > 0 and content["rest_ms"] >= 0
    line = f"step --inside memory --between 1gbit --hosts 2 --per-host 1 --record {path} --json"
    assert main(line.split()) == 0
    record = json.loads(capsys.readouterr().out)["record"]
    assert [row["codec"] for row in record["rows"]] == ["none", "int8"]
    assert record["rows"][1]["step_ms"] < record["rows"][0]["step_ms"]
    error = parse_record(content).error
    assert error is not None and record["replay_error"] == round(error, 5)
