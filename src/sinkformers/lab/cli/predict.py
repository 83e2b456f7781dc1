"""`sinkformers predict`: the answers of a trained run to images, shapes, reviews, sentences or prompts."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO

import typer

from sinkformers.lab.cli.refusal import need, refuse

if TYPE_CHECKING:
    from sinkformers.lab.inference.page import Shown
    from sinkformers.lab.inference.texts import Judge, Translate
    from sinkformers.lab.inference.trained import TrainedRun
    from sinkformers.lab.inference.writing import Write

BATCH = 32  # lines of a file
MOST_NAMED = 5  # words that are not in a vocabulary


def predict(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="The folder of a finished run, such as runs/…/n-3/seed-0.")
    ],
    inputs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="INPUT...",
            help="Images and shapes: files (.png, .jpg, …; .off, .ply, .obj, .xyz, .npy). Texts: the text itself; "
            "standard input if none.",
            show_default=False,
        ),
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option("--file", metavar="FILE", help="Texts, one per line, instead of INPUT; - is standard input."),
    ] = None,
    draw: Annotated[
        bool | None,
        typer.Option("--draw/--no-draw", help="Draw the attention, and write a page; by default, for files only."),
    ] = None,
    layer: Annotated[
        str | None, typer.Option(help="The layer whose attention is drawn; by default, the last.", metavar="NAME")
    ] = None,
    point: Annotated[
        int | None, typer.Option(help="Draw the attention that this point of a shape receives.", metavar="K")
    ] = None,
    invert: Annotated[bool, typer.Option("--invert", help="Exchange dark and light in an image.")] = False,
    top: Annotated[int, typer.Option(help="The number of classes to print.", min=1)] = 5,
    tokens: Annotated[int, typer.Option(help="The number of bytes that a language model writes.", min=1)] = 120,
    temperature: Annotated[
        float, typer.Option(help="Of a language model: 0 takes the likeliest byte each time.", min=0)
    ] = 0.8,
    seed: Annotated[int, typer.Option(help="Of the random numbers of a language model.", min=0)] = 0,
    out: Annotated[Path, typer.Option(help="The folder for pictures and page.", metavar="DIR")] = Path("predictions"),
) -> None:
    """Classify an image, a shape or a review, translate a sentence, or continue a text."""
    need("predictions", ("accelerate", "safetensors"), "experiments")
    from sinkformers.lab.inference.trained import open_run
    from sinkformers.lab.tasks.config import LanguageConfig, PointConfig, TextConfig, TranslationConfig, VisionConfig

    trained = open_run(run)
    if invert and not isinstance(trained.config, VisionConfig):
        refuse("--invert is for images; leave it out.")
    if isinstance(trained.config, VisionConfig):
        if file is not None or point is not None:
            refuse("--file is for texts and --point for shapes; name the files of images as INPUT.")
        shown = _images(trained, inputs or [], top, layer, invert, draw is not False)
    elif isinstance(trained.config, PointConfig):
        if file is not None:
            refuse("--file is for texts; name the files of shapes as INPUT.")
        shown = _shapes(trained, inputs or [], top, layer, point, draw is not False)
    elif isinstance(trained.config, TextConfig | TranslationConfig):
        if point is not None:
            refuse("--point is for shapes; leave it out.")
        shown = _texts(trained, inputs or [], file, layer, draw is True)
    elif isinstance(trained.config, LanguageConfig):
        if point is not None or layer is not None or draw is True:
            refuse("--point, --layer and --draw are for other models; leave them out to continue a text.")
        _continue(trained, inputs or [], file, most=tokens, temperature=temperature, seed=seed)
        shown = []
    else:
        refuse(f"{trained.name} is a model that predict does not support.")
    if shown:
        _write(trained, shown, out)


def _shapes(
    run: TrainedRun, files: list[str], top: int, layer: str | None, point: int | None, draw: bool
) -> list[Shown]:
    from sinkformers.lab.data.formats.point_files import check_point_file

    if not files:
        refuse("there is nothing to predict; name files with shapes (.off, .ply, .obj, .xyz or .npy) after the run.")
    for name in files:
        check_point_file(Path(name))
    from rich.console import Console

    from sinkformers.lab.inference.clouds import CloudClassifier
    from sinkformers.lab.reporting.tables import Table, terminal

    classifier = CloudClassifier(run)
    shown: list[Shown] = []
    for name in files:
        prediction = classifier.predict(Path(name), layer=layer, point=point)
        rows = tuple((label, f"{likely:.1%}") for label, likely in prediction.classes[:top])
        table = Table(("class", "probability"), rows)
        typer.echo(name)  # not as the title of the table, which would be wrapped
        Console().print(terminal(table, ""))
        if draw:
            need("pictures", ("matplotlib", "jinja2"), "cli")
            from sinkformers.lab.inference import pictures
            from sinkformers.lab.inference.page import Shown

            caption = f"{name} from three sides, coloured by the attention that each point receives."
            shown.append(Shown(Path(name).name, table, pictures.cloud(prediction), caption))
    return shown


def _images(run: TrainedRun, files: list[str], top: int, layer: str | None, invert: bool, draw: bool) -> list[Shown]:
    from sinkformers.lab.data.formats.image_files import check_image_file

    if not files:
        refuse(f"there is nothing to predict; name files with images after the run, such as {_example(run)}.")
    for name in files:
        check_image_file(Path(name))
    from rich.console import Console

    from sinkformers.lab.inference.images import ImageClassifier
    from sinkformers.lab.reporting.tables import Table, terminal

    classifier = ImageClassifier(run)
    shown: list[Shown] = []
    for name in files:
        for warning in classifier.doubts(Path(name), invert=invert):
            print(f"sinkformers: {warning}", file=sys.stderr)
        prediction = classifier.predict(Path(name), layer=layer, invert=invert)
        rows = tuple((label, f"{likely:.1%}") for label, likely in prediction.classes[:top])
        table = Table(("class", "probability"), rows)
        typer.echo(name)  # not as the title of the table, which would be wrapped
        Console().print(terminal(table, ""))
        if draw:
            need("pictures", ("matplotlib", "jinja2"), "cli")
            from sinkformers.lab.inference import pictures
            from sinkformers.lab.inference.page import Shown

            caption = f"{name}, the attention that each of its patches receives, and the weights between all tokens."
            shown.append(Shown(Path(name).name, table, pictures.image(prediction), caption))
    return shown


def _example(run: TrainedRun) -> str:
    """Return an image that was kept with the model."""
    return str(next(iter(sorted(run.folder.glob("example-*.png"))), "image.png"))


def _texts(run: TrainedRun, inputs: list[str], file: Path | None, layer: str | None, draw: bool) -> list[Shown]:
    from sinkformers.lab.tasks.config import TextConfig

    if layer is not None and not draw:
        refuse("--layer is for pictures; add --draw.")
    with _read(inputs, file) as (lines, batch):
        from sinkformers.lab.inference.texts import Judge, Translate

        answer = Judge(run) if isinstance(run.config, TextConfig) else Translate(run)
        if layer is not None:
            answer.attention("a", layer)  # refuses an unknown layer before anything is answered
        answered = _answer(answer, lines, batch)
        return [_drawn(answer, line, found, layer) for line, found in answered if draw and found]


def _continue(run: TrainedRun, inputs: list[str], file: Path | None, **options: Any) -> None:
    with _read(inputs, file) as (lines, batch):
        from sinkformers.lab.inference.writing import Write

        for _ in _answer(Write(run, **options), lines, batch):
            pass


@contextmanager
def _read(inputs: list[str], file: Path | None) -> Iterator[tuple[Iterator[str], int]]:
    """Yield the texts, and how many of them are answered at a time: one by one where they arrive so."""
    if inputs and file is not None:
        refuse("give texts as INPUT or with --file, not both.")
    file = None if str(file) == "-" else file
    with _open(file) as source:
        lines = _arguments(inputs) or _lines(source, "standard input" if file is None else str(file))
        yield iter(lines), 1 if not inputs and file is None else BATCH


def _answer(answer: Judge | Translate | Write, lines: Iterator[str], batch: int) -> Iterator[tuple[str, str]]:
    """Print the answers to `lines`, `batch` lines at a time, and yield each line with its answer."""
    warned: set[str] = set()
    words, unknown = 0, Counter[str]()
    while some := list(islice(lines, batch)):
        for warning in answer.doubts(some):
            if warning not in warned:
                print(f"sinkformers: {warning}", file=sys.stderr)
            warned.add(warning)
        answers = iter(answer([line for line in some if line.strip()]) if any(line.strip() for line in some) else [])
        for count, pieces in map(answer.words, some):
            words += count
            unknown.update(pieces)
        for line in some:  # an empty line has an empty answer, so that input and output have the same lines
            found = next(answers) if line.strip() else ""
            _print(found)
            yield line, found
    if unknown:
        often = ", ".join(word for word, _ in unknown.most_common(MOST_NAMED))
        more = ", …" if len(unknown) > MOST_NAMED else ""
        print(
            f"sinkformers: {unknown.total()} of {words} words are not in the vocabulary of this model, which reads "
            f"them in pieces or not at all ({often}{more}).",
            file=sys.stderr,
        )


def _drawn(answer: Judge | Translate, line: str, found: str, layer: str | None) -> Shown:
    need("pictures", ("matplotlib", "jinja2"), "cli")
    from sinkformers.lab.inference import pictures
    from sinkformers.lab.inference.page import Shown
    from sinkformers.lab.reporting.tables import Table

    attention = answer.attention(line, layer)
    caption = "Attention from rows to columns, and above it the attention that each token receives."
    return Shown(line, Table(("answer",), ((found,),)), pictures.sentence(attention), caption)


def _open(file: Path | None) -> AbstractContextManager[BinaryIO]:
    if file is None:
        return nullcontext(sys.stdin.buffer)
    try:
        return file.open("rb")
    except OSError as error:
        refuse(f"--file: {file} cannot be read ({error.strerror or error}); name an existing file.")


def _print(found: str) -> None:
    try:
        print(found, flush=True)
    except BrokenPipeError:  # the reader has closed the pipe
        raise
    except OSError as error:
        refuse(f"cannot write the answers: {error.strerror or error}.")


def _arguments(texts: list[str]) -> list[str]:
    for number, text in enumerate(texts, 1):
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:
            refuse(f"INPUT {number} is not UTF-8; convert it, for example with iconv.")
        if os.path.isfile(text):  # unlike Path.is_file, it accepts texts that cannot be paths
            print(f"sinkformers: {text} is read as a text; use --file to read the lines of a file.", file=sys.stderr)
    return texts


def _lines(source: Iterable[bytes], name: str) -> Iterator[str]:
    for number, line in enumerate(source, 1):
        try:
            yield line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
        except UnicodeDecodeError as error:
            refuse(f"{name} is not UTF-8 in line {number} ({error.reason}); convert it, for example with iconv.")


def _write(run: TrainedRun, shown: list[Any], out: Path) -> None:
    from sinkformers.lab.inference import page

    try:
        written = page.write(run.name, shown, out)
    except OSError as error:
        refuse(f"cannot write {error.filename or out}: {error.strerror or error}; choose another --out.")
    print(f"Drawn to {written}", file=sys.stderr)
