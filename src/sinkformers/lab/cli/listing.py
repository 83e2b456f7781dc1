"""`sinkformers list`: every artefact of the paper with its presets, their data and run time, and the paper's result."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from sinkformers.lab.artefacts.artefact import Artefact


def show(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """List the artefacts of the paper, their presets and results."""
    from sinkformers.lab.artefacts.catalogue import ARTEFACTS

    if as_json:
        typer.echo(json.dumps([_as_data(artefact) for artefact in ARTEFACTS], indent=1, ensure_ascii=False))
        return
    width = max(len(artefact.name) for artefact in ARTEFACTS)
    for artefact in ARTEFACTS:
        typer.echo(f"{artefact.name:<{width}}  {artefact.title}")
        typer.echo(f"{'':<{width}}  the paper: {artefact.paper or 'has no such experiment'}")
        for name, preset in artefact.presets.items():
            needs = f"needs {preset.data}" if preset.data not in ("", "digits") else "needs no download"
            typer.echo(f"{'':<{width}}  --preset {name:<8}{preset.about}; {needs}; {preset.takes}")


def _as_data(artefact: Artefact) -> dict[str, Any]:
    return {
        "name": artefact.name,
        "title": artefact.title,
        "paper": artefact.paper,
        "paper_numbers": artefact.paper_numbers,
        "presets": {
            name: {
                "about": preset.about,
                "data": preset.data or None,
                "takes": preset.takes,
                "seeds": list(preset.seeds),
                "arms": [arm.name for arm in preset.arms],
                "floor": preset.floor,
            }
            for name, preset in artefact.presets.items()
        },
    }
