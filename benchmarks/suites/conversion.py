"""Converted models beside the originals: a training step and inference, with padding and without."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import agreement
from benchmarks.contest import Entry, compete
from benchmarks.measurement import Measurement
from benchmarks.progress import Progress
from benchmarks.settings import Settings
from benchmarks.steps import Unavailable
from sinkformers import to_sinkformer

ORIGINAL, CONVERTED = "original", "converted"
N_ITERS = (1, 3, 5)
SECONDS = 40.0
VIT: dict[str, Any] = {
    "hidden_size": 128,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "intermediate_size": 512,
}


@dataclass(frozen=True)
class Model:
    """`build` makes the model, `inputs` its arguments for a batch: hidden states or tokens come out."""

    build: Callable[[], nn.Module]
    inputs: Callable[[], dict[str, Any]]
    needs: str | None = None


class Encoder(nn.Module):
    """torch.nn's own encoder, which has a fused path of its own for inference."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(256, 8, 1024, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        return self.layers(x, src_key_padding_mask=padding)


def _bert() -> nn.Module:
    import transformers

    sizes: dict[str, Any] = {
        "hidden_size": 384,
        "num_hidden_layers": 6,
        "num_attention_heads": 12,
        "intermediate_size": 1536,
    }
    dropout: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return transformers.BertModel(transformers.BertConfig(vocab_size=2000, **sizes, **dropout))


def _vit() -> nn.Module:
    import transformers

    return transformers.ViTModel(transformers.ViTConfig(**VIT))


def _swin() -> nn.Module:
    import transformers

    sizes: dict[str, Any] = {"embed_dim": 48, "depths": [2, 2, 2], "num_heads": [3, 6, 12], "drop_path_rate": 0.0}
    return transformers.SwinModel(transformers.SwinConfig(**sizes))


def _beit() -> nn.Module:
    import transformers

    bias: dict[str, Any] = {"use_relative_position_bias": True, "drop_path_rate": 0.0}
    return transformers.BeitModel(transformers.BeitConfig(**VIT, **bias))


def _t5() -> nn.Module:
    import transformers

    sizes: dict[str, Any] = {"d_model": 256, "d_kv": 32, "d_ff": 1024, "num_layers": 6, "num_heads": 8}
    return transformers.T5EncoderModel(transformers.T5Config(vocab_size=2000, dropout_rate=0.0, **sizes))


def _images() -> dict[str, Any]:
    return {"pixel_values": torch.randn(8, 3, 224, 224)}


def _lengths() -> Tensor:
    """Half of the texts are whole, the others keep from a quarter to three quarters of their tokens."""
    return torch.tensor([128] * 8 + [32, 40, 48, 56, 64, 72, 80, 96])


def _tokens(padded: bool) -> dict[str, Any]:
    ids = torch.randint(2000, (16, 128), generator=torch.Generator().manual_seed(0))
    mask = (torch.arange(128) < _lengths()[:, None]).long() if padded else torch.ones_like(ids)
    return {"input_ids": ids, "attention_mask": mask}


def _states(padded: bool) -> dict[str, Any]:
    states = torch.randn(16, 128, 256, generator=torch.Generator().manual_seed(0))
    return {"x": states} | ({"padding": torch.arange(128) >= _lengths()[:, None]} if padded else {})


MODELS = {
    "nn.TransformerEncoder": Model(Encoder, lambda: _states(False)),
    "nn.TransformerEncoder, padded": Model(Encoder, lambda: _states(True)),
    "BERT": Model(_bert, lambda: _tokens(False), "transformers"),
    "BERT, padded": Model(_bert, lambda: _tokens(True), "transformers"),
    "ViT": Model(_vit, _images, "transformers"),
    "Swin": Model(_swin, _images, "transformers"),
    "BEiT": Model(_beit, _images, "transformers"),
    "T5 encoder": Model(_t5, lambda: _tokens(False), "transformers"),
}


class ModelStep:
    """Forward and backward with AdamW, or forward alone in eval."""

    def __init__(self, model: Model, n_iters: int | float | None, training: bool) -> None:
        if model.needs is not None and find_spec(model.needs) is None:
            raise Unavailable(f"{model.needs} is not installed; install the extra hf")
        torch.manual_seed(0)
        self.model, self.inputs, self.training = model.build().train(training), model.inputs(), training
        if n_iters is not None:
            to_sinkformer(self.model, n_iters)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5)
        self.out: Tensor | None = None

    def reset(self) -> None:
        self.out = None

    def call(self) -> None:
        with torch.set_grad_enabled(self.training):
            out = self.model(**self.inputs)
            out = out if isinstance(out, Tensor) else out.last_hidden_state
        self.out = out
        if self.training:
            out.square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)

    def outcome(self) -> list[Tensor]:
        """The outputs of valid tokens; an original may put anything into its padding."""
        assert self.out is not None
        out, mask = self.out.detach(), self.inputs.get("attention_mask")
        if "padding" in self.inputs:
            mask = ~self.inputs["padding"]
        return [out if mask is None else out[mask.bool()]]


def run(settings: Settings, progress: Progress) -> Iterator[Measurement]:
    for label, model in MODELS.items():
        for training in (True, False):
            shape = f"{label}, {'training step' if training else 'inference'}"
            entries = [model_entry(model, n_iters, training) for n_iters in (None, *N_ITERS)]
            yield from compete("conversion", shape, entries, settings.plan(SECONDS), progress, baseline=ORIGINAL)


def model_entry(model: Model, n_iters: int | float | None, training: bool) -> Entry:
    """Return a converted model as it is timed, or the original where `n_iters` is None."""

    def check() -> agreement.Checked:
        """With one iteration a converted model is the original; with more, attention itself is tested elsewhere."""
        original = ModelStep(model, None, training)
        original.call()
        return agreement.check(ModelStep(model, n_iters and 1, training), original.outcome)

    row, options = (ORIGINAL, {}) if n_iters is None else (CONVERTED, {"n_iters": n_iters})
    return Entry(row, build=lambda: ModelStep(model, n_iters, training), check=check, settings=options)
