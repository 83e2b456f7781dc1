"""Arguments that are not models, or not modules of one, raise errors that explain why."""

import warnings

import pytest
import torch
from torch import nn

from sinkformers import anneal_tau, set_n_iters, set_tau, to_sinkformer, to_transformer, watch_attention


def scripted():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.script(nn.TransformerEncoderLayer(8, 2, batch_first=True).eval())


NOT_MODELS = {
    "None": (lambda: None, r"got NoneType\. Pass the model that holds the attention"),
    "class": (lambda: nn.MultiheadAttention, r"got the class MultiheadAttention\. Make one, MultiheadAttention\(…\)"),
    "state": (
        lambda: nn.Linear(2, 2).state_dict(),
        r"got OrderedDict, a state_dict\?.*load_state_dict",
    ),
    "tensor": (lambda: torch.zeros(2, 2), "got Tensor"),
    "scripted": (scripted, r"got one compiled by torch.jit \(TransformerEncoderLayer\).* before torch.jit.script or"),
}
FUNCTIONS = {
    "to_sinkformer": to_sinkformer,
    "to_transformer": to_transformer,
    "set_n_iters": lambda model: set_n_iters(model, 3),
    "set_tau": lambda model: set_tau(model, 0.5),
    "anneal_tau": lambda model: anneal_tau(model, 0, 4),
    "watch_attention": lambda model: watch_attention(model).__enter__(),
}


@pytest.mark.parametrize("what", NOT_MODELS)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_arguments_that_are_not_models(function, what):
    make, message = NOT_MODELS[what]
    with pytest.raises(TypeError, match=f"^{function}: model must be a (torch.nn.M|m)odule.*; {message}"):
        FUNCTIONS[function](make())


def test_a_scripted_part_of_a_model_is_not_converted_and_is_reported():
    model = nn.ModuleDict({"ours": nn.MultiheadAttention(8, 2), "theirs": scripted(), "linear": nn.Linear(8, 8)})
    report = to_sinkformer(model).sinkformer_report
    assert set(report.converted) == {"ours"}
    assert list(report.kept) == ["theirs"]
    assert "compiled by torch.jit" in report.kept["theirs"]
    with pytest.raises(ValueError, match=r"theirs .*: compiled by torch.jit, which cannot be changed: convert the"):
        to_sinkformer(nn.ModuleDict({"theirs": scripted()}))


def test_an_unknown_name_of_a_watched_module():
    model = to_sinkformer(nn.ModuleDict({"a": nn.MultiheadAttention(8, 2), "b": nn.MultiheadAttention(8, 2)}))
    with watch_attention(model) as watch:
        pass
    with pytest.raises(KeyError, match="watch_attention: no watched module is called 'nope'; there are 'a', 'b'"):
        watch["nope"]
    assert "nope" not in watch
    assert watch.get("nope") is None
