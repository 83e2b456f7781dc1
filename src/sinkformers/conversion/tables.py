"""Small tables, as text for the console and as HTML for notebooks."""

import html
from collections.abc import Sequence


def text_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table with aligned columns; the first column is aligned to the left, the others to the right."""
    lines = [header, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    return "\n".join(
        "  ".join(
            [line[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True))]
        )
        for line in lines
    )


def html_table(caption: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table as HTML; all texts are escaped."""
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in header)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    caption = html.escape(caption)
    return f"<table><caption>{caption}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
