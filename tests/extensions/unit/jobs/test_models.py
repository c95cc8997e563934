"""Shapes of models: parameters as published, FLOPs, names, and shapes of a given size."""

import pytest

from dtcomm.extensions.jobs import PRESETS, find_model, model_of_size
from dtcomm.extensions.jobs.models import is_preset

# Exact counts: those of the published checkpoints. Others: as the reports say, in billions.
EXACT = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_620_634_112,
}


@pytest.mark.parametrize(("name", "parameters"), EXACT.items())
def test_parameters_are_those_of_the_published_checkpoints(name: str, parameters: int) -> None:
    assert find_model(name).parameters == parameters


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [("mixtral-8x7b", 46.7, 12.9), ("mixtral-8x22b", 140.6, 39.2), ("deepseek-v3", 671.0, 37.6)],
)
def test_active_parameters_of_models_with_experts(name: str, total: float, active: float) -> None:
    model = find_model(name)
    assert model.parameters / 1e9 == pytest.approx(total, rel=1e-3)
    assert model.active_parameters / 1e9 == pytest.approx(active, rel=3e-3)
    assert model.dense_parameters + model.expert_parameters == model.parameters


def test_flops_of_a_token_are_six_for_each_active_matrix_parameter_and_attention() -> None:
    model = find_model("llama3-70b")
    matrices = model.parameters - model.vocab * model.hidden - (2 * model.layers + 1) * model.hidden
    assert model.flops_per_token(1) == pytest.approx(6 * matrices, rel=1e-4)
    grown = model.flops_per_token(8192) - model.flops_per_token(4096)
    assert grown == pytest.approx(3 * 80 * 2 * 4096 * 64 * 128 * 2 / 2)
    assert model.attention_flops(100, causal=False) == 2 * model.attention_flops(100)


def test_names_in_any_case_and_a_wrong_name() -> None:
    assert find_model("LLAMA-70B") is PRESETS["llama3-70b"] and is_preset("Mixtral-8x7B")
    with pytest.raises(
        ValueError, match=r"'lama-70b' is not one of gpt2, .*did you mean 'llama-70b'.*params=70B"
    ):
        find_model("lama-70b")


@pytest.mark.parametrize("parameters", [1e8, 1e9, 7e9, 70e9, 1e12])
def test_a_shape_of_a_given_size(parameters: float) -> None:
    model = model_of_size(parameters)
    assert model.parameters == pytest.approx(parameters, rel=0.1)
    assert 50 <= model.hidden / model.layers <= 200


def test_a_shape_with_given_layers_and_one_that_is_too_small() -> None:
    assert model_of_size(7e9, layers=32).layers == 32
    with pytest.raises(ValueError, match="params: expected at least 1M"):
        model_of_size(1000)
