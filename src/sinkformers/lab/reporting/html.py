"""Pages that need nothing but themselves: pictures lie inside, and nothing is loaded from elsewhere."""

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
    """A figure as a page shows it; `source` is a data URI."""

    caption: str
    alt: str
    source: str


def picture(name: str, caption: str, stem: Path, write: Callable[[Path], None]) -> Picture:
    """A figure, written beside the page in all formats under `stem` and its own name."""
    files = [stem.with_name(f"{stem.name}-{name}{suffix}") for suffix in FORMATS]
    for file in files:
        write(file)
    return Picture(caption, f"Figure: {caption} The numbers are in the tables.", data_uri(files[-1]))


def file_name(text: str) -> str:
    """A text as part of a file's name."""
    return re.sub(r"[^\w.-]+", "-", text).strip(".-") or "report"


def data_uri(file: Path) -> str:
    """A picture's bytes, in the place of its address."""
    return f"data:{KINDS[file.suffix]};base64,{base64.b64encode(file.read_bytes()).decode('ascii')}"


def render(template: str, **values: Any) -> str:
    """A page from one of the templates beside this file. Every value is escaped."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(template).render(**values)
