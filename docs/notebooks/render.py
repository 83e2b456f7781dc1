"""Execute the notebooks beside this file, and render each as a Markdown page with its pictures.

    python docs/notebooks/render.py

Pages are rendered where the notebooks change, and committed: the documentation is built without running models. A test
compares the pages with the notebooks, and executes the code of both.
"""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbconvert import MarkdownExporter

FOLDER = Path(__file__).parent
COLOURS = re.compile(r"\x1b\[[0-9;]*m")


def main() -> None:
    for file in sorted(FOLDER.glob("*.ipynb")):
        notebook = nbformat.read(file, as_version=4)
        executed = NotebookClient(notebook.copy(), timeout=600).execute()
        for cell in executed.cells:  # progress bars and warnings are of no use on a page
            cell.outputs = [one for one in cell.get("outputs", []) if one.get("name") != "stderr"]
        page, resources = MarkdownExporter().from_notebook_node(executed, {"unique_key": file.stem})
        for name, content in resources["outputs"].items():
            (FOLDER / name).write_bytes(content)
        note = f"*This page is the notebook `docs/notebooks/{file.name}`, executed.*"
        title, _, rest = COLOURS.sub("", page).partition("\n")
        text = f"{title}\n\n{note}\n{rest}".replace("![png]", f"![Picture of the notebook {file.stem}]")
        file.with_suffix(".md").write_text(re.sub(r"\n{3,}", "\n\n", text), encoding="utf-8")
        print(file.with_suffix(".md"))


if __name__ == "__main__":
    main()
