"""`sinkformers look`: a page with the attention of a pretrained model, or of a trained run."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sinkformers.lab.cli.refusal import need, refuse, shortened

if TYPE_CHECKING:
    from sinkformers import AttentionView

MOST_ITERATIONS = 10_000


def look(
    model: Annotated[
        str | None,
        typer.Option(
            metavar="PATH_OR_PACKAGE", help="A folder of a Hugging Face model, or an installed package of weights."
        ),
    ] = None,
    run: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="The folder of a finished run, instead of a model.")
    ] = None,
    text: Annotated[str | None, typer.Option(help="The text to look at.")] = None,
    image: Annotated[Path | None, typer.Option(metavar="FILE", help="The image to look at.")] = None,
    mesh: Annotated[Path | None, typer.Option(metavar="FILE", help="The shape to look at, for a run.")] = None,
    invert: Annotated[bool, typer.Option("--invert", help="Exchange dark and light in an image, for a run.")] = False,
    beside: Annotated[
        str | None, typer.Option(metavar="MODEL_OR_RUN", help="A second model, or run, shown beside the first.")
    ] = None,
    n_iters: Annotated[
        str | None,
        typer.Option(metavar="K", help="Convert the model to so many normalisations first; inf is the limit."),
    ] = None,
    layers: Annotated[str | None, typer.Option(metavar="0,1,…", help="The layers to show; all by default.")] = None,
    heads: Annotated[str | None, typer.Option(metavar="0,1,…", help="The heads to show; all by default.")] = None,
    out: Annotated[Path, typer.Option(metavar="FILE", help="The page to write.")] = Path("attention.html"),
) -> None:
    """Write a page that shows attention, with sliders from SoftMax to Sinkhorn."""
    if (model is None) == (run is None):
        refuse("name a model with --model, or a trained run with --run.")
    if sum(given is not None for given in (text, image, mesh)) != 1:
        refuse("give one input: --text, --image or --mesh.")
    if text is not None:
        _check_utf8(text)
    options: dict[str, Any] = {"layers": _numbers("--layers", layers), "heads": _numbers("--heads", heads)}
    count = _iterations(n_iters)
    if run is not None and count is not None:
        refuse("--n-iters is for pretrained models; the sliders of the page change it for a run.")
    if invert and (run is None or image is None):
        refuse("--invert is for the image of a run; leave it out.")
    if run is not None:
        options |= {"invert": invert, "warn": lambda sentence: print(f"sinkformers: {sentence}", file=sys.stderr)}
    first = str(run) if model is None else model
    views = [_view(name, run is not None, text, image, mesh, count, options) for name in (first, beside) if name]
    view = views[0] if len(views) == 1 else _together(*views)
    try:
        view.save(out)
    except OSError as error:
        refuse(f"cannot write {out}: {error.strerror or error}; choose another --out.")
    print(out)
    print("sinkformers: open the page in a browser; it needs no network.", file=sys.stderr)


def _view(
    name: str,
    is_run: bool,
    text: str | None,
    image: Path | None,
    mesh: Path | None,
    n_iters: int | float | None,
    options: dict[str, Any],
) -> AttentionView:
    """Return the view of one model; errors that its user can fix become one sentence."""
    for file in (image, mesh):
        if file is not None and not file.is_file():
            refuse(f"{file} is no file; name an existing one.")
    if is_run:
        need("trained runs", ("accelerate", "safetensors"), "experiments")
    else:
        need("pretrained models", ("transformers",), "hf")
        if mesh is not None:
            refuse("--mesh is for --run; a pretrained model takes --text or --image.")
    from sinkformers.lab.inference.looking import view_pretrained, view_run

    try:
        if is_run:
            return view_run(Path(name), text=text, image=image, mesh=mesh, **options)
        return view_pretrained(name, text=text, image=image, n_iters=n_iters, **options)
    except (ValueError, TypeError, NotImplementedError) as error:
        refuse(f"{name} cannot be shown: {error}")


def _together(first: AttentionView, second: AttentionView) -> AttentionView:
    try:
        return first.beside(second)
    except ValueError as error:
        refuse(str(error))


def _check_utf8(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        refuse("--text is not UTF-8; convert it, for example with iconv.")


def _numbers(name: str, text: str | None) -> list[int] | None:
    if text is None:
        return None
    try:
        return [int(each) for each in text.split(",")]
    except ValueError:
        refuse(f"{name} must be numbers separated by commas, such as 0,3; got {text!r}.")


def _iterations(text: str | None) -> int | float | None:
    if text is None or text == "inf":
        return None if text is None else float("inf")
    if not text.isdecimal() or len(text) > len(str(MOST_ITERATIONS)) or not 1 <= int(text) <= MOST_ITERATIONS:
        refuse(f"--n-iters must be a whole number from 1 to {MOST_ITERATIONS}, or inf; got {shortened(repr(text))}.")
    return int(text)
