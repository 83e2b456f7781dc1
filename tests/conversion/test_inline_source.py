"""Code is read from its file, and only if it is the code that runs."""

import importlib
import pickle
import sys

import pytest

from sinkformers import to_sinkformer, to_transformer
from tests.conversion.inline_layers import PlainAttention
from tests.conversion.inline_other_layers import twice


def test_code_that_is_not_in_its_file_is_not_converted():
    changed = type("ChangedAttention", (PlainAttention,), {})
    namespace = {}
    exec("def forward(self, x):\n    return (x @ x.mT).softmax(-1) @ x", namespace)
    changed.forward = namespace["forward"]
    with pytest.raises(ValueError, match=r"ChangedAttention.*neither is torch's nor"):
        to_sinkformer(changed())


SOURCE = """
import torch
from torch import nn

class FileAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.query = nn.Linear(5, 5)

    def forward(self, x):
        return (2.0 * self.query(x) @ x.mT).softmax(-1) @ x
"""


@pytest.fixture
def file(tmp_path, monkeypatch):
    """A module of Python in a file, which can be changed."""
    path = tmp_path / "attention_in_a_file.py"
    path.write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    yield path, importlib.import_module("attention_in_a_file")
    sys.modules.pop("attention_in_a_file")


def test_a_file_that_was_changed_is_not_read(file):
    path, module = file
    layer = to_sinkformer(module.FileAttention())
    path.write_text(SOURCE.replace("2.0", "99.0"))
    to_transformer(layer)
    with pytest.raises(ValueError, match="neither is torch's nor"):
        to_sinkformer(layer)


def test_methods_that_are_replaced_are_read_again(file):
    _, module = file
    to_sinkformer(module.FileAttention())
    module.FileAttention.forward = twice(module.FileAttention.forward)
    with pytest.raises(ValueError, match="neither is torch's nor"):
        to_sinkformer(module.FileAttention())


def test_a_pickle_does_not_meet_other_code(file):
    path, module = file
    pickled = pickle.dumps(to_sinkformer(module.FileAttention()))
    assert isinstance(pickle.loads(pickled), module.FileAttention)
    path.write_text(SOURCE.replace("2.0 * self.query(x) @ x.mT", "(2.0 * self.query(x)) @ (x + 1).mT + 3"))
    importlib.invalidate_caches()
    importlib.reload(module)
    with pytest.raises(RuntimeError, match="the code of FileAttention is not the code that was converted"):
        pickle.loads(pickled)
