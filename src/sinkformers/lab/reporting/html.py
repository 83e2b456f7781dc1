"""Self-contained pages: figures are embedded, and nothing is loaded from elsewhere."""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sinkformers.lab.reporting import panels

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMATS = (".png", ".svg")
KINDS = {".png": "image/png", ".svg": "image/svg+xml", ".gif": "image/gif"}


@dataclass(frozen=True)
class Picture:
    """A figure in a page; `source` is a data URI, and `narrow` one that is arranged for a narrow screen."""

    caption: str
    alt: str
    source: str
    narrow: str | None = None


def picture(name: str, caption: str, stem: Path, write: Callable[[Path], None]) -> Picture:
    """Write a figure beside the page in all formats, as `stem` and its name, and return it for the page."""
    files = [stem.with_name(f"{stem.name}-{name}{suffix}") for suffix in FORMATS]
    for file in files:
        write(file)
    return Picture(caption, f"Figure: {caption} The numbers are in the tables.", data_uri(files[-1]))


def drawn(name: str, caption: str, stem: Path, draw: Callable[[], Figure]) -> Picture:
    """Write a figure as `picture` does, and return it for the page in two arrangements, for wide and narrow screens."""
    figure = draw()
    wide = picture(name, caption, stem, lambda file: panels.save(figure, file))
    written = io.BytesIO()
    with panels.narrow():
        panels.save(draw(), written, "svg")
    return replace(wide, narrow=_uri(".svg", written.getvalue()))


def file_name(text: str) -> str:
    """Return a text that can be part of a file name."""
    return re.sub(r"[^\w.-]+", "-", text).strip(".-") or "report"


def data_uri(file: Path) -> str:
    """Return an image file as a data URI."""
    return _uri(file.suffix, file.read_bytes())


def _uri(suffix: str, content: bytes) -> str:
    return f"data:{KINDS[suffix]};base64,{base64.b64encode(content).decode('ascii')}"


def render(template: str, **values: Any) -> str:
    """Render one of the templates beside this file. All values are escaped."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(template).render(**values)
