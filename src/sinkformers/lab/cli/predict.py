"""`sinkformers predict`: a trained run put to use on shapes, reviews or sentences of one's own."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sinkformers.lab.cli.refusal import need, refuse

if TYPE_CHECKING:
    from sinkformers.lab.inference.page import Shown
    from sinkformers.lab.inference.texts import Judge, Translate
    from sinkformers.lab.inference.trained import TrainedRun

AT_A_TIME = 32  # lines of a file


def predict(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="The folder of a finished run, such as runs/…/n-3/seed-0.")
    ],
    inputs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="INPUT...",
            help="Shapes: files (.off, .ply, .obj, .xyz, .npy). Texts: the text itself; standard input if none.",
            show_default=False,
        ),
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option("--file", metavar="FILE", help="Texts, one a line, instead of INPUT; - is standard input."),
    ] = None,
    draw: Annotated[
        bool | None,
        typer.Option("--draw/--no-draw", help="Pictures of the attention, and a page; shapes are drawn unless told."),
    ] = None,
    layer: Annotated[
        str | None, typer.Option(help="The layer whose attention is drawn; the last if left out.", metavar="NAME")
    ] = None,
    point: Annotated[
        int | None, typer.Option(help="Draw the attention that this point of a shape receives.", metavar="K")
    ] = None,
    top: Annotated[int, typer.Option(help="How many classes of a shape are printed.", min=1)] = 5,
    out: Annotated[Path, typer.Option(help="Where pictures and page go.", metavar="DIR")] = Path("predictions"),
) -> None:
    """Say what a shape is, whether a review is positive, or what a sentence means in English."""
    need("predictions", ("accelerate", "safetensors"), "experiments")
    from sinkformers.lab.artefacts.artefact import ExperimentError
    from sinkformers.lab.data import DataError
    from sinkformers.lab.inference.trained import open_run
    from sinkformers.lab.tasks.points import PointConfig
    from sinkformers.lab.tasks.texts import TextConfig
    from sinkformers.lab.tasks.translation import TranslationConfig

    try:
        trained = open_run(run)
        if isinstance(trained.config, PointConfig):
            if file is not None:
                refuse("--file is for texts; name the files of shapes as INPUT.")
            shown = _shapes(trained, inputs or [], top, layer, point, draw is not False)
        elif isinstance(trained.config, TextConfig | TranslationConfig):
            if point is not None:
                refuse("--point is for shapes; leave it out.")
            shown = _texts(trained, inputs or [], file, layer, draw is True)
        else:
            refuse(f"{trained.name} is a model of images, and predict knows shapes and texts only.")
    except (ExperimentError, DataError) as error:
        refuse(str(error))
    if shown:
        _write(trained, shown, out)


def _shapes(
    run: TrainedRun, files: list[str], top: int, layer: str | None, point: int | None, draw: bool
) -> list[Shown]:
    from rich.console import Console

    from sinkformers.lab.inference.clouds import CloudClassifier
    from sinkformers.lab.reporting.tables import Table, terminal

    if not files:
        refuse("there is nothing to predict; name files with shapes (.off, .ply, .obj, .xyz or .npy) after the run.")
    classifier = CloudClassifier(run)
    shown: list[Shown] = []
    for name in files:
        prediction = classifier.predict(Path(name), layer=layer, point=point)
        rows = tuple((label, f"{likely:.1%}") for label, likely in prediction.classes[:top])
        table = Table(("class", "probability"), rows)
        typer.echo(name)  # as a title of the table a long one would be folded
        Console().print(terminal(table, ""))
        if draw:
            need("pictures", ("matplotlib", "jinja2"), "cli")
            from sinkformers.lab.inference import pictures
            from sinkformers.lab.inference.page import Shown

            caption = f"{name} from three sides, coloured by what each point receives of the attention."
            shown.append(Shown(Path(name).name, table, pictures.cloud(prediction), caption))
    return shown


def _texts(run: TrainedRun, inputs: list[str], file: Path | None, layer: str | None, draw: bool) -> list[Shown]:
    from sinkformers.lab.inference.texts import Judge, Translate
    from sinkformers.lab.tasks.texts import TextConfig

    if inputs and file is not None:
        refuse("give texts as INPUT or with --file, not both.")
    if layer is not None and not draw:
        refuse("--layer is for pictures; add --draw.")
    answer = Judge(run) if isinstance(run.config, TextConfig) else Translate(run)
    if layer is not None:
        answer.attention("a", layer)  # a layer that is not there is refused before anything is answered
    file = None if str(file) == "-" else file
    streams = not inputs and file is None
    lines = _arguments(inputs) or (_lines(sys.stdin.buffer, "standard input") if file is None else _file(file))
    shown: list[Shown] = []
    waiting, at_a_time = iter(lines), 1 if streams else AT_A_TIME
    doubts: set[str] = set()
    while some := list(islice(waiting, at_a_time)):
        for doubt in answer.doubts(some):
            if doubt not in doubts:  # once is enough
                print(f"sinkformers: {doubt}", file=sys.stderr)
            doubts.add(doubt)
        answers = iter(answer([line for line in some if line.strip()]) if any(line.strip() for line in some) else [])
        for line in some:  # an empty line has an empty answer, so that lines stay in step
            found = next(answers) if line.strip() else ""
            _say(found)
            if draw and found:
                shown.append(_drawn(answer, line, found, layer))
    return shown


def _drawn(answer: Judge | Translate, line: str, found: str, layer: str | None) -> Shown:
    need("pictures", ("matplotlib", "jinja2"), "cli")
    from sinkformers.lab.inference import pictures
    from sinkformers.lab.inference.page import Shown
    from sinkformers.lab.reporting.tables import Table

    attention = answer.attention(line, layer)
    caption = "Attention between the tokens, rows looking at columns, and above it what each token receives."
    return Shown(line, Table(("answer",), ((found,),)), pictures.sentence(attention), caption)


def _file(file: Path) -> Iterator[str]:
    try:
        opened = file.open("rb")
    except OSError as error:
        refuse(f"--file: {file} cannot be read ({error.strerror or error}); name a file that is there.")
    with opened:
        yield from _lines(opened, str(file))


def _say(found: str) -> None:
    try:
        print(found, flush=True)
    except BrokenPipeError:  # nobody reads on
        raise
    except OSError as error:
        refuse(f"cannot write the answers: {error.strerror or error}.")


def _arguments(texts: list[str]) -> list[str]:
    for number, text in enumerate(texts, 1):
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:
            refuse(f"INPUT {number} is not UTF-8; convert it, for example with iconv.")
        if os.path.isfile(text):  # unlike Path.is_file, it bears texts that no path can be
            print(f"sinkformers: {text} is taken for a text; the lines of a file are read by --file.", file=sys.stderr)
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
