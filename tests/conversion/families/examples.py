"""Inputs for a model of transformers, made from the names of the arguments of its `forward`."""

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

GRIDS = [[1, 4, 4], [1, 4, 8]]  # frames, rows and columns of patches of two images
LENGTH, SHORTER = 12, 8  # tokens of the first and of the second text; the second is padded


class Features(nn.Module):
    """What a model makes of images or sounds alone, before its language model reads it."""

    def __init__(self, model: nn.Module, name: str) -> None:
        super().__init__()
        self.model, self.name = model, name

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.model, self.name)(*args, **kwargs)


def parts(model: nn.Module) -> list[nn.Module]:
    """Return the parts of a model that can be called on their own."""
    return [Features(model, name) for name in ("get_image_features", "get_audio_features") if hasattr(model, name)]


def candidates(model: nn.Module, config: Any, dtype: torch.dtype) -> Iterator[dict[str, Tensor]]:
    """Yield arguments for `forward`, the most likely first; at most a few are accepted by a model."""
    function = getattr(model.model, model.name) if isinstance(model, Features) else model.forward  # pyright: ignore[reportAttributeAccessIssue, reportArgumentType, reportCallIssue]
    names = [name for name in inspect.signature(function).parameters if name not in ("args", "kwargs")]
    texts = _texts(names, config)
    for shapes in _shapes(config):
        others = _others(names, shapes, dtype)
        for parts in ((texts, others), (texts,), (others,)):
            inputs: dict[str, Tensor] = {}
            for part in parts:
                inputs |= part
            if inputs:
                yield inputs
                if "decoder_input_ids" in inputs and "input_ids" not in inputs:
                    yield {name: value for name, value in inputs.items() if name != "decoder_input_ids"}


def _find(config: Any, *names: str) -> Any:
    """Return the first of these settings that a configuration or one of its parts has."""
    for name in names:
        value = getattr(config, name, None)
        if value is not None:
            return value
    for part in vars(config).values():
        if hasattr(part, "to_dict"):
            value = _find(part, *names)
            if value is not None:
                return value
    return None


def valid_tokens() -> Tensor:
    return torch.arange(LENGTH) < torch.tensor([[LENGTH], [SHORTER]])


def _texts(names: list[str], config: Any) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)
    vocabulary = _find(config, "vocab_size") or 60
    ids = torch.randint(min(30, vocabulary // 2), vocabulary, (2, LENGTH), generator=generator)
    made: dict[str, Tensor] = {}
    if "input_ids" in names:
        made["input_ids"] = ids
        if "attention_mask" in names:
            made["attention_mask"] = valid_tokens().long()
    for name in ("decoder_input_ids", "decoder_input_features"):
        if name in names and name.endswith("ids"):
            made[name] = ids[:, :5]
    if "codebook_idx" in names:
        made["codebook_idx"] = torch.tensor(1)
        made["input_ids"] = ids[..., None].expand(-1, -1, 8) % (_find(config, "input_vocab_size") or vocabulary)
    if "task_inputs" in names:
        made["task_inputs"] = ids
    if "bbox" in names:
        corners = torch.randint(0, 50, (2, LENGTH, 4), generator=generator)
        corners[..., 2:] += corners[..., :2]  # boxes: x0 ≤ x1, y0 ≤ y1
        made["bbox"] = corners
    return made


def _others(names: list[str], shapes: dict[str, tuple[int, ...]], dtype: torch.dtype) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(6)
    made = {
        name: torch.randn(shape, generator=generator, dtype=dtype) for name, shape in shapes.items() if name in names
    }
    if "grid_thw" in names:
        made["grid_thw"] = torch.tensor(GRIDS)
    return made


def _shapes(config: Any) -> Iterator[dict[str, tuple[int, ...]]]:
    """Yield the shapes of inputs that are numbers."""
    channels = _find(config, "num_channels", "in_channels", "in_chans") or 3
    size = _find(config, "image_size", "img_size") or 64
    height, width = (size[0], size[1]) if isinstance(size, list | tuple) else (size, size)
    if not isinstance(height, int):
        height = width = 64
    frames = _find(config, "num_frames") or 4
    bins = _find(config, "num_mel_bins", "feature_size", "input_feat_per_channel", "n_mels", "num_mels") or 80
    positions = _find(config, "max_source_positions") or 64
    features = _find(config, "hidden_size", "d_model") or 32
    context = _find(config, "context_length", "seq_length", "prediction_length") or 32
    series = _find(config, "num_input_channels", "input_size") or 1
    patch, frame = _find(config, "patch_size") or 8, _find(config, "temporal_patch_size") or 1
    if isinstance(patch, int) and isinstance(frame, int):
        yield {"hidden_states": (sum(rows * columns for _, rows, columns in GRIDS), channels * frame * patch**2)}
    for image in ((height, width), (height // 2, width), (64, 64), (224, 224)):
        for channel in (channels, 3):
            yield {
                "pixel_values": (2, channel, *image),
                "pixel_values_videos": (2, frames, channel, *image),
                "input_values": (2, 3200),
                "input_features": (2, bins, 2 * positions),
                "hidden_states": (2, LENGTH, features),
                "past_values": (2, context, series),
                "visual_feats": (2, 7, _find(config, "visual_feat_dim") or 16),
                "visual_embeds": (2, 7, _find(config, "visual_embedding_dim") or 16),
                "visual_pos": (2, 7, 4),
                "prompt_pixel_values": (2, channel, *image),
                "prompt_masks": (2, channel, *image),
            }
        yield {
            "pixel_values": (2, frames, channels, *image),
            "input_values": (2, 1, 3200),
            "input_features": (2, 40, bins),
            "past_values": (2, context),
            "inputs_embeds": (2, LENGTH, features),
        }
    yield {"pixel_values": (2, 2, channels, 64, 64)}
    yield {"input_values": (2, bins, 128), "input_features": (2, 1, 64, bins), "inputs": (2, LENGTH, features)}
    yield {"input_values": (2, 128, bins), "input_features": (2, 1, 1001, bins), "pixel_values": (1, channels, 16, 16)}
