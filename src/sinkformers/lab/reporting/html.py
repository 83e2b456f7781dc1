"""Self-contained pages: figures are embedded, and nothing is loaded from elsewhere."""

from __future__ import annotations

import base64
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FORMATS = (".png", ".svg")
KINDS = {".png": "image/png", ".svg": "image/svg+xml", ".gif": "image/gif"}


@dataclass(frozen=True)
class Picture:
    """A figure in a page; `source` is a data URI."""

    caption: str
    alt: str
    source: str


def picture(name: str, caption: str, stem: Path, write: Callable[[Path], None]) -> Picture:
    """Write a figure beside the page in all formats, as `stem` and its name, and return it for the page."""
    files = [stem.with_name(f"{stem.name}-{name}{suffix}") for suffix in FORMATS]
    for file in files:
        write(file)
    return Picture(caption, f"Figure: {caption} The numbers are in the tables.", data_uri(files[-1]))


def file_name(text: str) -> str:
    """Return a text that can be part of a file name."""
    return re.sub(r"[^\w.-]+", "-", text).strip(".-") or "report"


def data_uri(file: Path) -> str:
    """Return an image file as a data URI."""
    return f"data:{KINDS[file.suffix]};base64,{base64.b64encode(file.read_bytes()).decode('ascii')}"


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
