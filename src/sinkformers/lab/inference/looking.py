"""Views of attention: of pretrained models, and of trained runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from sinkformers import AttentionView, to_sinkformer, view_attention
from sinkformers.lab.artefacts.artefact import ExperimentError
from sinkformers.lab.inference.pretrained import load_pretrained, read_image, read_text
from sinkformers.lab.inference.trained import TrainedRun, on, open_run
from sinkformers.lab.tasks.config import LanguageConfig, PointConfig, TextConfig, TranslationConfig, VisionConfig

LONGEST_TITLE = 200


def view_pretrained(
    name: str, *, text: str | None, image: Path | None, n_iters: int | float | None, **options: Any
) -> AttentionView:
    """Return a view of a pretrained model's attention in a text or an image, converted to `n_iters` if given."""
    pretrained = load_pretrained(name)
    model = pretrained.model if n_iters is None else to_sinkformer(pretrained.model, n_iters, causal="streaming")
    options["name"] = pretrained.folder.resolve().name if Path(name).is_dir() else name
    if image is not None:
        inputs = read_image(pretrained, image)
        return view_attention(model, inputs, image=inputs["pixel_values"][0], title=image.name, **options)
    assert text is not None
    inputs, tokens = read_text(pretrained, text)
    if getattr(model.config, "is_encoder_decoder", False):
        model = model.get_encoder()  # pyright: ignore[reportCallIssue]
    return view_attention(model, inputs, tokens=tokens, title=_title(text), **options)


def view_run(
    folder: Path,
    *,
    text: str | None,
    image: Path | None,
    mesh: Path | None,
    invert: bool = False,
    warn: Callable[[str], object] = lambda _: None,
    **options: Any,
) -> AttentionView:
    """Return a view of a trained run's attention in a text, an image or a shape, whichever its model is for.

    `invert` exchanges dark and light in an image. `warn` is called with each sentence about what is cut or resized.
    """
    run = open_run(folder)
    options["name"] = run.name
    kinds = {
        TextConfig: "text",
        TranslationConfig: "text",
        LanguageConfig: "text",
        PointConfig: "mesh",
        VisionConfig: "image",
    }
    kind = next(kind for config, kind in kinds.items() if isinstance(run.config, config))
    if kind == "text" and text is not None:
        return _text(run, text, warn, options)
    if kind == "mesh" and mesh is not None:
        return _mesh(run, mesh, options)
    if kind == "image" and image is not None:
        return _image(run, image, invert, warn, options)
    raise ExperimentError(f"{run.name} is a model for --{kind}; give that.")


def _text(run: TrainedRun, text: str, warn: Callable[[str], object], options: dict[str, Any]) -> AttentionView:
    options["title"] = _title(text)
    if isinstance(run.config, LanguageConfig):
        return _language(run, text, warn, options)
    from sinkformers.lab.inference.texts import Judge, Translate

    reader = Judge(run) if isinstance(run.config, TextConfig) else Translate(run)
    run_model, tokens = reader.read(text)
    if not tokens:
        raise ExperimentError("the text has no tokens; give one that is not empty.")
    for each in reader.doubts([text]):
        warn(each)
    return view_attention(reader.model, run_model, tokens=tokens, **options)


def _language(run: TrainedRun, text: str, warn: Callable[[str], object], options: dict[str, Any]) -> AttentionView:
    config = run.config
    if config.pairs is not None:
        raise ExperimentError(f"{run.name} is a model of associative recall, which reads no text; name another run.")
    model = config.model()
    run.load_into(model)
    data = text.encode()[-config.length :]
    if not data:
        raise ExperimentError("the text is empty; give one that is not.")
    if len(data) < len(text.encode()):
        warn(f"the last {config.length} bytes of the text are read, and it has more.")
    tokens = [bytes([byte]).decode("ascii", "replace") if byte < 128 else f"0x{byte:02x}" for byte in data]
    return view_attention(model, torch.tensor([list(data)]), tokens=tokens, **options)


def _mesh(run: TrainedRun, file: Path, options: dict[str, Any]) -> AttentionView:
    from sinkformers.lab.data.formats.point_files import check_point_file
    from sinkformers.lab.inference.clouds import CloudClassifier

    check_point_file(file)
    classifier = CloudClassifier(run)
    points, given = classifier.read(file)
    inputs = tuple(on(classifier.model, given))
    return view_attention(classifier.model, inputs, points=classifier.places(points), title=file.name, **options)


def _image(
    run: TrainedRun, file: Path, invert: bool, warn: Callable[[str], object], options: dict[str, Any]
) -> AttentionView:
    from sinkformers.lab.inference.images import ImageClassifier

    classifier = ImageClassifier(run)
    for each in classifier.doubts(file, invert=invert):
        warn(each)
    pixels = classifier.read(file, invert=invert)
    inputs = tuple(on(classifier.model, classifier.standardised(pixels)))
    return view_attention(classifier.model, inputs, image=pixels, title=file.name, **options)


def _title(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= LONGEST_TITLE else text[: LONGEST_TITLE - 1] + "…"
