"""The page of the theory: all tables and figures, and our constants beside the paper's; one file that opens offline."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sinkformers.lab.reporting.html import Picture, picture, render
from sinkformers.lab.reporting.panels import save
from sinkformers.lab.reporting.tables import Table
from sinkformers.lab.theory import cloud, equations, pictures
from sinkformers.lab.theory.sweep import Sweep

if TYPE_CHECKING:
    from sinkformers.lab.theory.study import Study

TEMPLATE = "theory.html.jinja"

TITLES = {
    "proposition1": "Proposition 1: invariance to the cost function",
    "proposition2": "Proposition 2: energies and their gradients",
    "proposition3": "Proposition 3: SoftMax is no gradient flow",
    "theorem1": "Theorem 1: Sinkformers and the heat equation",
    "proposition4": "Proposition 4: the Transformer's equation",
    "equations": "Particles against the equations",
    "first_order": "First-order limits",
    "high_dimension": "Ten dimensions",
    "regimes": "Aggregation and diffusion",
    "deep_limit": "Infinite depth",
    "unconverged": "Few normalisations",
    "rank_collapse": "Skip connections and rank collapse",
}


@dataclass(frozen=True)
class Section:
    anchor: str
    title: str
    notes: list[str]
    tables: list[tuple[str, str, Table]]  # caption, below it, and the table
    pictures: list[Picture]


def write(study: Study, folder: Path, *, about: str) -> Path:
    """Write `index.html` and its figures, PNG and SVG, to `folder`; return the page."""
    drawn = dict(_pictures(study, folder))
    sections = [
        Section(
            name,
            TITLES[name],
            notes(name, getattr(study, name)),
            [_table(each) for each in sweeps(getattr(study, name))],
            drawn.get(name, []),
        )
        for name in TITLES
    ]
    page = folder / "index.html"
    page.write_text(render(TEMPLATE, sections=sections, about=about), encoding="utf-8")
    return page


def sweeps(record: Any) -> Iterator[Sweep]:
    """Yield the tables of a record, in order."""
    for each in fields(record):
        value = getattr(record, each.name)
        yield from (item for item in (value if isinstance(value, tuple) else (value,)) if isinstance(item, Sweep))


def notes(name: str, record: Any) -> list[str]:
    """Return sentences about the two corrections, and about other single numbers."""
    if name == "theorem1":
        return [
            f"The constant in T̄^∞ → −c ∇ρ/ρ, extrapolated to ε = 0: {record.constant:.6f} for (1 − x²)⁴, "
            f"{record.constant_of_gaussian:.6f} for a Gaussian. The derivation gives ½, the paper states 1."
        ]
    if name == "proposition4":
        vectors = {
            "SoftMax on a grid": record.measured,
            "closed form": record.closed_form,
            "limit with W_K⁻ᵀ": record.limit,
            "the paper's limit with W_K⁻¹": record.paper,
        }
        shown = "; ".join(f"{what} ({', '.join(f'{x:.4f}' for x in vector)})" for what, vector in vectors.items())
        return [f"T̄¹ at ε = {record.eps:g} for a W_K that is not symmetric: {shown}."]
    if name == "high_dimension" and record.blind_from is not None:
        return [
            f"From ε = {record.blind_from:g} downwards the largest sample errs as T̄ = 0 would, to a tenth: "
            "each particle sees itself alone."
        ]
    return []


def _table(each: Sweep) -> tuple[str, str, Table]:
    orders = ", ".join(f"{name} {order:.2f}" for name, order in each.orders.items())
    below = each.norm + (f". Fitted orders: {orders}" if orders else "") + "."
    rows = tuple(tuple(x if isinstance(x, str) else f"{x:.4g}" for x in row) for row in each.rows)
    return each.title, below, Table(each.columns, rows)


def _pictures(study: Study, folder: Path) -> Iterator[tuple[str, list[Picture]]]:
    def drawn(name: str, caption: str, figure: Any) -> Picture:
        return picture(name, caption, folder / "theory", lambda path: save(figure, path))

    yield (
        "theorem1",
        [
            drawn(
                "convergence",
                "Distance of T̄ from its limit against ε, and of samples from quadrature against their number.",
                pictures.draw_sweeps([*study.theorem1.by_eps[:2], *study.theorem1.by_particles[1:]]),
            ),
            drawn(
                "density",
                "Particles on a line, and the solutions of two heat equations.",
                pictures.draw_densities(equations.densities(n=121, eps=0.02, times=(0.0, 0.05, 0.15))),
            ),
        ],
    )
    yield (
        "proposition4",
        [drawn("transformer", "Distance of T̄¹ from its limit.", pictures.draw_sweeps(study.proposition4.by_eps))],
    )
    yield (
        "proposition2",
        [drawn("energy", "Energies along flows.", pictures.draw_energies(pictures.energies(n=30, frames=11)))],
    )
    yield (
        "deep_limit",
        [drawn("depth", "Distance of a stack from the flow.", pictures.draw_sweeps([study.deep_limit.by_depth]))],
    )
    flowing = cloud.run(n=90, frames=9)
    caption = "Particles under SoftMax and under Sinkhorn, from faint to full."
    yield "regimes", [picture("flow", caption, folder / "theory", lambda path: cloud.draw(flowing, path))]
