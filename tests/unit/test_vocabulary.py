"""An argument has one name in all integrations, and one default; groups are given as groups or as axes of a mesh."""

from __future__ import annotations

import inspect

from tests.support.structure import reference

INTEGRATIONS = (
    "dtcomm.context_parallel.",
    "dtcomm.ddp.",
    "dtcomm.extensions.elastic.",
    "dtcomm.fsdp.",
    "dtcomm.local_sgd.",
    "dtcomm.moe.",
    "dtcomm.pipeline.",
    "dtcomm.tp.",
)
#: Made by the functions of their packages, and not by users.
MADE_BY_FUNCTIONS = ("dtcomm.fsdp.FSDPState", "dtcomm.moe.MoEState", "dtcomm.pipeline.PipelineState")
#: What a user may expect every integration to take.
COMMON = ("exclude", "feedback", "guard", "seed")
#: Words whose defaults differ, and why.
DIFFERENT = {
    "algorithm": "with the direct one an averaged gradient does not depend on the bucket that it is in, which resumed "
    "runs of DDP and LocalSGD need; FSDP's units and tensor parallelism's layers stay, so they choose by size",
    "backward_codec": "None follows the codec of the forward pass; tensor parallelism compresses gradients if asked to",
    "codec": "layers replace torch's own, bit for bit unless asked; the format of experts is that of their paper",
    "hierarchical": "on several hosts dispatch sends fewer bytes that way; dispatch_padded only fewer messages",
    "sample_every": "LocalSGD counts averages, of which there is one in `every` steps",
    "timeout_s": "the coordinator waits for connections, the ranks for averages",
}


def parameters() -> dict[str, dict[str, inspect.Parameter]]:
    """Return the parameters of all integrations: name of the parameter → function → parameter."""
    found: dict[str, dict[str, inspect.Parameter]] = {}
    for name, value in reference().public().items():
        if name.startswith(INTEGRATIONS) and name not in MADE_BY_FUNCTIONS:
            for word, parameter in reference().option_parameters(value).items():
                found.setdefault(word, {})[name] = parameter
    return found


PARAMETERS = parameters()


def test_codecs_are_not_called_specs() -> None:
    assert "spec" not in PARAMETERS and len(PARAMETERS["codec"]) > 5


def test_a_word_has_the_same_default_everywhere() -> None:
    differing = {
        word
        for word, functions in PARAMETERS.items()
        if len({repr(p.default) for p in functions.values() if p.default is not inspect.Parameter.empty}) > 1
    }
    assert differing == set(DIFFERENT)
    assert {p.default for p in PARAMETERS["feedback"].values()} == {"auto"}


def test_the_reference_says_why_an_integration_does_not_take_a_common_word() -> None:
    integrations = reference().INTEGRATIONS
    missing = {word for word in COMMON if not PARAMETERS[word].keys() >= set(integrations)}
    assert missing == reference().WHY_NOT.keys()
    assert all(set(PARAMETERS[word]) & set(integrations) for word in COMMON)


def test_groups_may_be_axes_of_a_mesh() -> None:
    annotations = {name: str(parameter.annotation) for name, parameter in PARAMETERS["group"].items()}
    assert len(annotations) > 5 and set(annotations.values()) == {"GroupOrMesh"}, annotations
