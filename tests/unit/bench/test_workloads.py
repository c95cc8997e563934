"""The workloads of bench.workloads: data, units with every kind of method, what is kept, and what the page says."""

from __future__ import annotations

import dataclasses
import gzip
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from bench import workloads
from bench.common.budget import Budget
from bench.training import plan as plans
from bench.training import recommendation, text, units, vision, workloads_page
from bench.training.recommendation import RECOMMENDATION
from bench.training.tasks import Unavailable
from bench.training.text import TEXT
from bench.training.units import VARIANTS, Unit
from bench.training.vision import VISION
from bench.training.workload import Workload
from dtcomm.cli.demo import train as demo

SMALL_GPT = demo.ModelShape(vocabulary=256, context=64, layers=1, width=32, heads=2)
#: Beside uncompressed; those of other methods are slow tests.
METHODS = {
    "text": ("int8",),
    "recommendation": ("topk 1 %, EF21",),
    "vision": ("torch's bf16 hook", "PowerSGD rank 4"),
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Compute on one thread, as the program does: with other processes on the cores, two take many times as long."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def write_idx(path: Path, values: torch.Tensor) -> None:
    header = b"\0\0\x08" + bytes([values.ndim]) + b"".join(size.to_bytes(4, "big") for size in values.shape)
    path.write_bytes(gzip.compress(header + values.numpy().tobytes()))


@pytest.fixture
def images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Write 256 training and 100 test images, in which a bright row says the label."""
    generator = torch.Generator().manual_seed(0)
    for prefix, count in (("train", 256), ("t10k", 100)):
        labels = torch.randint(10, (count,), generator=generator, dtype=torch.uint8)
        pixels = torch.randint(100, (count, 28, 28), generator=generator, dtype=torch.uint8)
        pixels[torch.arange(count), 2 * labels.long() + 3] = 255
        write_idx(tmp_path / f"{prefix}-images-idx3-ubyte.gz", pixels)
        write_idx(tmp_path / f"{prefix}-labels-idx1-ubyte.gz", labels)
    monkeypatch.setenv(vision.FOLDER_VARIABLE, str(tmp_path))
    vision.images.cache_clear()
    yield tmp_path
    vision.images.cache_clear()


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Path]]:
    """Write two packages of modules, of which some are held out."""
    roots = {name: tmp_path / name for name in ("one", "two")}
    for root in roots.values():
        (root / "site-packages").mkdir(parents=True)
        (root / "site-packages" / "other.py").write_text("not of the package")
        for number in range(40):
            (root / f"module{number}.py").write_text(f"value = {number}\n" * 40)
    monkeypatch.setattr(text, "packages", lambda: roots)
    text.corpus.cache_clear()
    text.data.cache_clear()
    yield roots
    text.corpus.cache_clear()
    text.data.cache_clear()


@pytest.fixture
def small(
    images: Path, corpus: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> Iterator[dict[str, Workload]]:
    """Return the workloads with small data, small models and few steps."""
    monkeypatch.setattr(text, "WINDOWS", 8)
    monkeypatch.setattr(recommendation, "HELD_OUT", 2048)
    recommendation.held_out_samples.cache_clear()
    yield {
        "text": dataclasses.replace(TEXT, model=lambda: text.gpt(SMALL_GPT), steps=20),
        "vision": dataclasses.replace(VISION, model=lambda: vision.resnet(8), steps=20),
        "recommendation": RECOMMENDATION.shortened(20),
    }
    recommendation.held_out_samples.cache_clear()


def unit(workload: str, variant: str, **options: Any) -> Unit:
    fields = {"optimizer": units.WORKLOADS[workload].optimizer, "workers": 2, "seed": 0, **options}
    return Unit(workload=workload, variant=variant, **fields)


@pytest.mark.parametrize("name", list(units.WORKLOADS))
def test_workers_divide_the_samples_of_a_step(name: str, small: dict[str, Workload]) -> None:
    workload = small[name]
    inputs, targets = workload.batch(3, 1)
    for workers in units.WORKERS:
        parts = [workload.part(3, 1, worker, workers) for worker in range(workers)]
        assert torch.equal(torch.cat([part[0] for part in parts]), inputs)
        assert torch.equal(torch.cat([part[1] for part in parts]), targets)
    assert not torch.equal(workload.batch(4, 1)[0], inputs) and not torch.equal(
        workload.batch(3, 0)[0], inputs
    )
    with pytest.raises(ValueError, match="do not divide"):
        workload.part(0, 0, 0, 7)


@pytest.mark.parametrize("name", list(units.WORKLOADS))
def test_every_workload_learns_with_several_methods(name: str, small: dict[str, Workload]) -> None:
    workload = small[name]
    results = {
        method: units.run(unit(name, method), workload.rates[workload.optimizer], workload)
        for method in ("none", *METHODS[name])
    }
    for method, result in results.items():
        losses = [loss for _, loss, _ in result["curve"]]
        assert [step for step, *_ in result["curve"]] == list(range(1, 21))
        assert result["loss"] == losses[-1] < losses[0], method
        assert (result["sent"] == 1) == (method == "none") and 0.005 < result["sent"] <= 1
    plain = results["none"]
    assert plain["bytes_per_step"] == pytest.approx(4 * plain["parameters"], rel=1e-3)
    if name == "text":
        assert results["int8"]["loss"] == pytest.approx(plain["loss"], rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("method", list(VARIANTS))
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_every_method_trains_the_click_model(method: str, optimizer: str) -> None:
    if not VARIANTS[method].applies_to(optimizer):
        pytest.skip("the method does not go with the optimizer")
    workload = RECOMMENDATION.shortened(60)
    rate = workload.rates[optimizer] / (30 if method.startswith("randk") else 1)
    result = units.run(unit("recommendation", method, optimizer=optimizer), rate, workload)
    # DGC's warm-up and the randk of so few steps only show that they run.
    assert result["loss"] < 0.66 if not method.startswith(("randk", "DGC")) else math.isfinite(result["loss"])


def test_more_workers_leave_the_uncompressed_run_as_it_is(small: dict[str, Workload]) -> None:
    two, four = (
        units.run(unit("recommendation", "none", workers=workers), 0.01, small["recommendation"].shortened(5))
        for workers in (2, 4)
    )
    assert two["loss"] == pytest.approx(four["loss"], abs=2e-3)
    assert four["bytes_per_step"] == pytest.approx(two["bytes_per_step"] * 2 * 3 / 4, abs=1)


def test_a_run_that_diverges_has_no_loss(small: dict[str, Workload]) -> None:
    result = units.run(unit("recommendation", "int8", optimizer="sgd"), 1e6, small["recommendation"])
    assert result["loss"] is None


def test_missing_images_name_the_package_that_has_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(vision.FOLDER_VARIABLE, str(tmp_path))
    vision.images.cache_clear()
    with pytest.raises(Unavailable, match="apt-get install dataset-fashion-mnist"):
        vision.images()


def test_idx_files_are_checked(images: Path) -> None:
    path = images / vision.FILES[0]
    assert vision.read_idx(path).shape == (256, 28, 28)
    path.write_bytes(gzip.compress(gzip.decompress(path.read_bytes())[:-1]))
    with pytest.raises(ValueError, match="values, expected"):
        vision.read_idx(path)
    path.write_bytes(gzip.compress(b"\0\0\x0d\x01"))
    with pytest.raises(ValueError, match="not an IDX file of bytes"):
        vision.read_idx(path)


def test_a_tenth_of_the_modules_is_held_out_and_none_is_in_both_parts(corpus: dict[str, Path]) -> None:
    loaded = text.load_corpus(corpus)
    assert loaded.files == 80
    training, held_out = (bytes(part.tolist()) for part in (loaded.training, loaded.held_out))
    assert b"not of the package" not in training + held_out
    assert training.count(b"value") + held_out.count(b"value") == 80 * 40
    assert 0 < held_out.count(b"value") < 20 * 40
    assert text.description(loaded) == text.description(text.load_corpus(corpus))
    (corpus["one"] / "module0.py").write_text("changed\n" * 40)
    assert text.description(loaded) != text.description(text.load_corpus(corpus))


def test_clicks_follow_the_planted_odds_and_gradients_are_mostly_zero() -> None:
    ids, clicks = recommendation.draw(50_000, 5)
    logits = recommendation.logits_of(ids)
    for low, high in ((-9.0, -2.0), (-0.5, 0.5), (1.0, 9.0)):
        chosen = (logits > low) & (logits < high)
        expected = torch.sigmoid(logits[chosen]).mean()
        assert float(clicks[chosen].mean()) == pytest.approx(float(expected), abs=0.03)
    assert ids.min() >= 0 and ids.max() < sum(recommendation.FIELDS)
    model = recommendation.ClickModel()
    gradient = torch.autograd.grad(
        RECOMMENDATION.loss(model, RECOMMENDATION.batch(0, 0)), model.embedding.weight
    )[0]
    assert 0.01 < float((gradient != 0).float().mean()) < 0.1
    sparse = recommendation.ClickModel(sparse=True)
    sparse.load_state_dict(model.state_dict())
    (other,) = torch.autograd.grad(
        RECOMMENDATION.loss(sparse, RECOMMENDATION.batch(0, 0)), sparse.embedding.weight
    )
    torch.testing.assert_close(other.to_dense(), gradient)


def test_area_under_the_curve() -> None:
    logits = torch.tensor([0.1, 0.4, 0.35, 0.8])
    assert recommendation.area_under_curve(logits, torch.tensor([0.0, 0.0, 1.0, 1.0])) == 0.75
    assert recommendation.area_under_curve(logits, torch.tensor([0.0, 1.0, 0.0, 1.0])) == 1.0


def test_the_plan_begins_with_the_usual_and_has_each_unit_once() -> None:
    everything, plan = plans.everything(), plans.planned()
    assert len({entry.key for entry in everything}) == len(everything) > 2000
    assert plan == [entry for entry in everything if entry in set(plan)] and 260 < len(plan) < 300
    first = plan[:21]
    assert [entry.workload for entry in first] == ["text"] * 7 + ["recommendation"] * 7 + ["vision"] * 7
    assert {(entry.workers, entry.seed) for entry in first} == {(2, 0)}
    assert {"none", "torch's bf16 hook", "int8"} <= {entry.variant for entry in first}
    assert {entry.optimizer for entry in plan if entry.variant == "DGC 1 %"} == {"sgd"}
    assert {entry.optimizer for entry in plan if "frozen" in entry.variant} == {"adamw"}


def test_the_plan_has_every_method_and_of_the_less_usual_one_seed() -> None:
    plan = plans.planned()
    for name, workload in units.WORKLOADS.items():
        seeds: dict[tuple[str, str, int], set[int]] = {}
        for entry in plan:
            if entry.workload == name:
                seeds.setdefault((entry.variant, entry.optimizer, entry.workers), set()).add(entry.seed)
        for variant in VARIANTS.values():
            several = variant.priority <= (0 if name in plans.SLOW else 1)
            for optimizer in filter(variant.applies_to, ("sgd", "adamw")):
                usual = optimizer == workload.optimizer
                planned = {0, 1, 2} if usual and several else {0}
                if not usual and not several and not variant.frozen:
                    planned = set()
                assert seeds.get((variant.name, optimizer, 2), set()) == planned
        more = {key for key in seeds if key[2] != 2}
        first = {variant.name for variant in VARIANTS.values() if variant.priority == 0}
        assert more == {(variant, workload.optimizer, workers) for variant in first for workers in (4, 8, 16)}
        assert all(seeds[key] == {0} for key in more)
    assert plans.planned(plans.everything(workloads=["text"], seeds=1)) == [
        entry for entry in plan if entry.workload == "text" and entry.seed == 0
    ]


def test_every_method_is_tuned_on_the_same_budget() -> None:
    trials = unit("text", "int8", seed=2, workers=16).trials()
    assert [trial.rate for trial in trials][2:5] == [0.0003333, 0.001, 0.003]
    assert {(trial.seed, trial.workers) for trial in trials} == {(units.TUNING_SEED, units.TUNING_WORKERS)}
    assert [trial.key for trial in trials] == [trial.key for trial in unit("text", "int8").trials()]


@pytest.mark.parametrize(
    ("losses", "made"),
    [
        ({0.001: 2.0, 0.003: 2.1, 0.0003333: 2.1}, [0.001, 0.003, 0.0003333]),
        ({0.001: 2.1, 0.003: 2.0, 0.0003333: 2.2, 0.009: 2.3}, [0.001, 0.003, 0.0003333, 0.009]),
        # Five at most, also if the best is at an end.
        (
            {0.001: math.inf, 0.003: math.inf, 0.0003333: math.inf, 0.0001111: 9.0, 3.704e-05: 8.0},
            [0.001, 0.003, 0.0003333, 0.0001111, 3.704e-05],
        ),
    ],
)
def test_rates_beyond_the_best_are_tried_while_it_is_at_an_end(
    losses: dict[float, float], made: list[float], tmp_path: Path
) -> None:
    store, int8 = workloads.Store(tmp_path / "workloads.json", "code"), unit("text", "int8")
    done: list[float] = []
    for job in workloads.jobs([int8], store, 100):
        if job.rate is None:
            break
        done.append(job.rate)
        loss = losses[job.rate]
        store.add(job, entry(rate=job.rate, loss=loss if math.isfinite(loss) else None))
    assert done == made and store.chosen_rate(int8, 100) == min(losses, key=losses.__getitem__)
    assert units.tried_rates(int8, store.trials) == losses
    store.add(int8, entry())
    assert list(workloads.jobs([int8], store, 100)) == []
    # A trial of other code, or of another number of steps, does not count.
    assert next(iter(workloads.jobs([int8], store, 200))).rate == 0.001


def entry(**fields: Any) -> dict[str, Any]:
    made = {
        "commit": "abc",
        "processor": "CPU",
        "date": "2026-01-01",
        "load": 1.0,
        "code": "code",
        "seconds": 2.0,
    }
    curve = [[step, 3 - step / 100, 50.0] for step in range(10, 101, 10)]
    run = {
        "loss": 2.0,
        "quality": 50.0,
        "rate": 0.1,
        "steps": 100,
        "sent": 1.0,
        "curve": curve,
        "data": "data",
    }
    return {**made, **run, "workload_steps": 100, "parameters": 1_000_000, **fields}


def test_a_store_keeps_units_and_replaces_those_of_other_code(tmp_path: Path) -> None:
    path = tmp_path / "workloads.json"
    one, other = workloads.Store(path, "code"), workloads.Store(path, "code")
    one.add(unit("text", "none"), entry())
    other.add(unit("text", "int8"), entry(commit="abd", load=3.0))
    other.add(unit("text", "none").trials()[0], entry())
    store = workloads.Store(path, "code")
    assert set(store.units) == {unit("text", "none").key, unit("text", "int8").key} and len(store.trials) == 1
    assert store.has(unit("text", "none"), 100) and not store.has(unit("text", "none"), 99)
    assert not workloads.Store(path, "other code").has(unit("text", "none"), 100)
    assert store.seconds(unit("text", "sign")) == 2 and store.seconds(unit("vision", "sign")) == 0
    assert [group["units"] for group in workloads.measurements(store.units)] == [1, 1]


def test_work_stops_with_the_budget_and_goes_on_from_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = [unit("recommendation", "none"), unit("recommendation", "int8")]
    trained: list[str] = []

    def train(job: Unit, *_: Any) -> dict[str, Any]:
        trained.append(job.key)
        loss = 0.3 if job.rate is None else abs(job.rate - 0.01)
        return entry(rate=job.rate or 0.1, loss=loss, workload_steps=20)

    monkeypatch.setattr(workloads, "train", train)
    clock = iter([0.0, *(float(second) for second in range(5)), *[1e6] * 9])
    path = tmp_path / "workloads.json"
    store = workloads.Store(path, "code")
    assert not workloads.work(plan, store, Budget(1000, lambda: next(clock)), 20)
    first, second = (job.trials() for job in plan)
    assert trained == [*(first[number].key for number in (3, 4, 2)), plan[0].key, second[3].key]
    assert workloads.work(plan, workloads.Store(path, "code"), Budget(1000), 20)
    assert len(trained) == len(set(trained)) == 8


def test_the_program_trains_and_lists(
    tmp_path: Path,
    small: dict[str, Workload],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(workloads, "WORKLOADS", small)
    path = str(tmp_path / "workloads.json")
    some = [
        "--workloads",
        "text",
        "--methods",
        "none",
        "--optimizers",
        "adamw",
        "--workers",
        "2",
        "--seeds",
        "1",
    ]
    kept = workloads.main([*some, "--steps", "20", "--json", path])
    (result,) = kept.values()
    assert result["rate"] in [trial.rate for trial in unit("text", "none").trials()]
    assert {"commit", "processor", "load", "code", "curve"} <= set(result)
    capsys.readouterr()
    workloads.main(["--list", "--workloads", "text", "--methods", "none", "--steps", "20", "--json", path])
    listed = capsys.readouterr().out
    assert unit("text", "none").key not in listed and unit("text", "none", seed=1).key in listed
    with pytest.raises(SystemExit):
        workloads.main(["--steps", "20"])


def test_results_of_a_changed_tree_go_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(units, "changed_files", lambda: ["dtcomm/x.py"])
    monkeypatch.delenv("BENCH_UNFIT", raising=False)
    assert workloads.destination(None) == workloads.ASIDE
    monkeypatch.setenv("BENCH_UNFIT", "1")
    assert workloads.destination(None) == workloads.KEPT


def test_the_checksum_of_the_code_is_that_of_existing_files() -> None:
    assert units.code() == units.code() and len(units.code()) == 12


def test_steps_to_a_loss_are_interpolated() -> None:
    curve = [[10, 3.0, 0.0], [20, 2.0, 0.0], [30, 1.0, 0.0]]
    assert workloads_page.steps_to(curve, 2.5) == 15
    assert workloads_page.steps_to(curve, 3.0) == 10
    assert workloads_page.steps_to(curve, 0.9) is None
    assert workloads_page.steps_to([[10, None, 0.0]], 0.9) is None


def test_cells_say_how_many_seeds_there_are_and_how_many_diverged() -> None:
    shown = "{:.1f}".format
    assert workloads_page.summary([2.0, 1.0, 3.0], shown) == "2.0 [1.0–3.0]"
    assert workloads_page.summary([2.0], shown) == "2.0 (1 seed)"
    assert workloads_page.summary([2.0, None, 1.0], shown) == "1.5 [1.0–2.0] (1 of 3 diverged)"
    assert workloads_page.summary([None, None], shown) == "2 of 2 diverged"
    assert workloads_page.summary([], shown) == ""


def test_time_to_the_loss_is_steps_by_seconds_of_a_step() -> None:
    slower = [[step, 3 - step / 100 + 0.05, 50.0] for step in range(10, 101, 10)]
    never = [[step, 3.0, 50.0] for step in range(10, 101, 10)]
    kept = {}
    for seed in range(3):
        kept[unit("text", "none", seed=seed).key] = entry()
        kept[unit("text", "torch's bf16 hook", seed=seed).key] = entry()
        kept[unit("text", "int8", seed=seed).key] = entry(curve=slower)
        kept[unit("text", "sign", seed=seed).key] = entry(curve=never)
        kept[unit("text", "sign, frozen variance", seed=seed).key] = entry(curve=slower)
    rows = [
        {"name": "none", "ms": 100.0, "faster": 1.0},
        {"name": "torch's bf16 hook", "ms": 60.0, "faster": 1.667},
        {"name": "int8", "ms": 50.0, "faster": 2.0},
        {"name": "sign", "ms": 40.0, "faster": 2.5},
        {"name": "auto", "ms": 52.0, "faster": 1.9, "faster_range": [1.8, 2.0], "chosen": "int8"},
        {"name": "auto", "ms": 105.0, "faster": 0.95, "chosen": "none", "measurements": 1},
    ]
    predicted = {"none": 1.0, "torch's bf16 hook": 1.5, "int8": 1.05, "sign": 3.0}
    lines = workloads_page.link_lines(
        workloads_page.Kept({"units": kept, "trials": {}}), TEXT, rows, predicted
    )
    by_name = {line[0]: line[1:] for line in lines}
    # The uncompressed run has 2.1 at step 90; int8 has it at step 95.
    assert by_name["int8"] == [
        "95 [95–95]", "50.0 (2.00×)", "5 s", "1.89×", "1.14×", "1.05×, does not pay", "pays",
    ]  # fmt: skip
    assert by_name["sign"][0] == by_name["sign"][2] == "not reached" and by_name["sign"][-1] == "does not pay"
    assert by_name["auto: int8"][3] == "1.80× [1.71–1.89]"
    assert by_name["auto: none, 1 of the runs"][3] == "0.95×"
    assert (lines[0][0], lines[-1][0]) == ("int8", "sign")
    # Its 95 steps are before the variance is frozen, so they take the time of uncompressed ones.
    assert by_name["sign, frozen variance"][2:4] == ["9 s", "0.95×"]
    assert by_name["sign, frozen variance"][-2] == "–"
    assert workloads_page.losers(lines) == (["sign"], ["auto: none, 1 of the runs", "sign, frozen variance"])
    # It is right about torch's hook, wrong about int8, and cannot know that sign never has the loss.
    assert workloads_page.verdicts(lines) == (
        "The planner's verdict is the measured one in 1 of 2 rows that reach the loss, and in 0 of 1 that do not."
    )
    assert workloads_page.prediction_errors(rows, predicted) == pytest.approx([1.5 / 1.667 - 1, -0.475, 0.2])


def test_the_time_to_the_loss_has_the_steps_of_both_kinds() -> None:
    relative_times = workloads_page.relative_times
    assert relative_times({0: 1000.0, 1: 100.0}, {0: 500.0, 1: 400.0}, 10.0, 200) == [0.56, 0.25]
    assert relative_times({0: 1000.0}, {0: 500.0, 1: 400.0}, 10.0) == [0.2]
    assert relative_times({0: 1000.0, 1: None}, {0: 500.0, 1: 400.0}, 10.0) == []


def test_the_page_and_the_picture_follow_from_units(tmp_path: Path) -> None:
    kept = {unit("text", name, seed=0).key: entry(loss=loss) for name, loss in (("none", 2.0), ("int8", 2.1))}
    written = workloads_page.page({"units": kept, "trials": {}}, {"rows": []})
    assert f"**2 of {len(plans.planned())} units are kept**" in written
    assert "| int8 | 0.1 | 100 % | 2.1000 (1 seed) |" in written
    assert written.count("No unit is kept yet.") == 2
    assert "(workloads.png)" in written and "not measured yet" in written
    assert "(workloads.png)" not in workloads_page.page({"units": {}, "trials": {}}, {"rows": []})
    pytest.importorskip("matplotlib")
    assert (
        workloads_page.picture({"units": kept, "trials": {}}, tmp_path / "picture.png").stat().st_size
        > 10_000
    )


def test_models_have_the_sizes_that_the_page_says() -> None:
    def millions(model: nn.Module) -> float:
        return round(sum(parameter.numel() for parameter in model.parameters()) / 1e6, 2)

    assert [millions(workload.model()) for workload in (TEXT, VISION, RECOMMENDATION)] == [6.47, 0.31, 0.94]


def test_a_rate_at_an_end_of_the_trials_is_marked() -> None:
    made = {trial.key: entry(rate=trial.rate) for trial in unit("text", "int8").trials()[2:5]}
    kept = workloads_page.Kept({"units": {}, "trials": made})
    cells = [
        workloads_page.rate_cell(kept, TEXT, "int8", "adamw", rate) for rate in (0.0003333, 0.001, 0.003)
    ]
    assert cells == ["0.0003333 (least tried)", "0.001", "0.003 (greatest tried)"]


def test_the_planner_is_right_where_both_verdicts_are_the_same() -> None:
    def line(planned: str, measured: str, seconds: str = "9 s") -> list[str]:
        return ["method", "", "", seconds, "", "", planned, measured]

    lines = [
        line("–", "–"),
        line("1.5×, pays", "pays"),
        line("1.5×, pays", "does not pay"),
        line("–", "pays"),
        line("1.0×, does not pay", "does not pay", "not reached"),
    ]
    assert workloads_page.verdicts(lines) == (
        "The planner's verdict is the measured one in 1 of 2 rows that reach the loss, and in 1 of 1 that do not."
    )
