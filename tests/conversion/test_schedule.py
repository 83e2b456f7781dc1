"""The schedule from SoftMax to Sinkhorn."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from sinkformers import anneal_tau, to_sinkformer


def taus(model):
    return [module.sinkhorn.tau for module in model.modules() if hasattr(module, "sinkhorn")]


def encoder():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
    return to_sinkformer(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), 3)


def test_tau_rises_linearly_from_start_to_end_and_stays_there():
    model = encoder()
    for step, expected in enumerate([0.1, 0.3, 0.5, 0.7, 0.9, 0.9, 0.9]):
        assert anneal_tau(model, step, 4, start=0.1, end=0.9) == pytest.approx(expected)
        assert taus(model) == pytest.approx([expected] * 2)
    for step in (0, 1):
        assert anneal_tau(model, step, 0, start=0.1, end=0.9) == 0.9
        assert taus(model) == [0.9] * 2


def test_selected_modules_only():
    model = encoder()
    anneal_tau(model, 1, 4, select="layers.1.*")
    assert taus(model) == [1.0, 0.25]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((-1, 4), "anneal_tau: step must be a whole number ≥ 0; got -1"),
        ((1, 2.5), "anneal_tau: n_steps must be a whole number ≥ 0; got 2.5"),
    ],
)
def test_refusals(arguments, message):
    with pytest.raises(ValueError, match=message):
        anneal_tau(encoder(), *arguments)
    with pytest.raises(ValueError, match="start must be a number from 0 to 1; got -1"):
        anneal_tau(encoder(), 0, 4, start=-1)


@pytest.mark.parametrize(("fraction", "expected"), [(1, [0, 1, 2, 3, 4]), (0.5, [0, 2, 4, 4, 4]), (0, [4] * 5)])
def test_the_callback_takes_its_fraction_of_the_run(fraction, expected):
    """With `fraction=1` too, `end` is reached: at the end of training, one step after the last trained one."""
    pytest.importorskip("transformers", reason="the hf extra is not installed")
    from sinkformers.hf import AnnealTau

    model, callback, seen = encoder(), AnnealTau(fraction=fraction), []
    for step in range(5):
        state = SimpleNamespace(global_step=step, max_steps=4)
        (callback.on_step_begin if step < 4 else callback.on_train_end)(None, state, None, model=model)
        seen.append(taus(model)[0])
    assert seen == [step / 4 for step in expected]


def test_the_callback_anneals_under_the_trainer(tmp_path):
    hf = pytest.importorskip("transformers", reason="the hf extra is not installed")
    pytest.importorskip("accelerate", reason="the Trainer needs accelerate")
    from sinkformers.hf import AnnealTau
    from tests.conversion.hugging_face_models import TEXT

    model = to_sinkformer(hf.BertForSequenceClassification(hf.BertConfig(**TEXT)), 3)
    seen = []
    model.register_forward_pre_hook(lambda module, _args: seen.append(taus(module)[0]))
    data = [{"input_ids": torch.randint(5, 53, (7,)), "labels": torch.tensor(i % 2)} for i in range(8)]
    arguments = {"max_steps": 8, "per_device_train_batch_size": 2, "save_steps": 3, "seed": 1}
    quiet = {"report_to": [], "use_cpu": True, "disable_tqdm": True, "logging_strategy": "no"}

    def trainer(model):
        options = hf.TrainingArguments(str(tmp_path), **arguments, **quiet)
        return hf.Trainer(model, options, train_dataset=data, callbacks=[AnnealTau(fraction=0.5)])

    trainer(model).train()
    assert seen == [0.0, 0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0]
    assert taus(model) == [1.0, 1.0]
    seen.clear()
    trainer(model).train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert seen == [0.75, 1.0, 1.0, 1.0, 1.0]
