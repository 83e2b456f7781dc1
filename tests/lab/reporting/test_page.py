"""The page is self-contained, escapes its values, and is the same for the same runs."""

import base64
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from sinkformers.lab.artefacts.artefact import Arm, Artefact, Preset
from sinkformers.lab.reporting import page
from sinkformers.lab.reporting.records import find
from sinkformers.lab.reporting.summary import summarise
from tests.lab.fake_runs import write_run, write_unfinished

pytest.importorskip("matplotlib")
pytest.importorskip("jinja2")

VOID = {"meta", "img", "br", "hr", "link", "input", "source"}


class Page(HTMLParser):
    """The elements of a page; an element that is closed in the wrong place fails."""

    def __init__(self, text):
        super().__init__()
        self.open, self.elements, self.text = [], [], ""
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data if "style" not in self.open else ""

    def all(self, tag):
        return [attrs for name, attrs in self.elements if name == tag]


def report(root, out, artefact=None):
    return page.write(summarise(find([root]), lambda _name: artefact), out).read_text(encoding="utf-8")


def write_runs(root):
    for n_iters, finals in ((1, (0.5, 0.9, 0.6)), (3, (0.7, 0.8, 0.75))):
        for seed, final in enumerate(finals):
            write_run(root, n_iters=n_iters, seed=seed, final=final)
    return root


@pytest.fixture
def runs(tmp_path):
    return write_runs(tmp_path / "runs")


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The folder of a report on two arms of an unknown artefact."""
    folder = tmp_path_factory.mktemp("plain")
    report(write_runs(folder / "runs"), folder / "report")
    return folder / "report"


@pytest.fixture
def text(plain):
    return (plain / "index.html").read_text(encoding="utf-8")


def test_the_page_parses_and_is_accessible(text):
    found = Page(text)
    assert found.all("html") == [{"lang": "en-GB"}]
    assert any(attrs.get("name") == "viewport" for attrs in found.all("meta"))
    assert len(found.all("img")) == 4
    assert all(len(attrs["alt"]) > 20 for attrs in found.all("img"))
    assert {attrs.get("scope") for attrs in found.all("th")} == {"col", "row"}
    assert len(found.all("caption")) == len(found.all("table")) == 6


def test_the_page_loads_nothing(text):
    found = Page(text)
    sources = [
        attrs[name] for _, attrs in found.elements for name in ("src", "href", "srcset", "data") if name in attrs
    ]
    assert sources
    assert all(source.startswith(("data:image/svg+xml;base64,", "#")) for source in sources)
    assert "http://" not in text
    assert "https://" not in text
    assert not {"script", "link", "iframe", "object", "embed"} & {tag for tag, _ in found.elements}
    [policy] = [attrs["content"] for attrs in found.all("meta") if attrs.get("http-equiv") == "Content-Security-Policy"]
    assert policy.startswith("default-src 'none'")


def test_the_numbers_and_the_scale_are_on_the_page(text):
    for expected in (
        "60.00%",
        "75.00%",
        "90.00%",
        "seed 2",
        "abacus",
        "2.13.0",
        "0123abc",
        "51850",
        "mnist: 600 for training",
    ):
        assert expected in Page(text).text


def test_the_papers_result_is_shown_beside_ours(runs, tmp_path):
    arms = (Arm("n-1", {"n_iters": 1}), Arm("n-3", {"n_iters": 3}))
    preset = Preset(
        about="Fewer epochs.", takes="a minute", data="mnist", seeds=(0, 1, 2, 3), arms=arms, config=None, floor=0.65
    )
    numbers = {"Sinkformer": {"median": 0.987}}
    artefact = Artefact(
        name="figure6", title="Patches", paper="Ahead.", presets={"small": preset}, paper_numbers=numbers
    )
    text = Page(report(runs, tmp_path / "report", artefact)).text
    for expected in ("Patches (small)", "Ahead.", "Fewer epochs.", "median 98.7%", "Not comparable yet", "Not begun"):
        assert expected in text


def test_unfinished_runs_are_named(runs, tmp_path):
    write_unfinished(runs, arm="n-3", seed=7, epochs=5)
    write_unfinished(runs, preset="paper", arm="n-21", seed=8)
    text = Page(report(runs, tmp_path / "report")).text
    assert "n-3 seed 7 (5 epochs done)" in text
    assert "n-21 seed 8 (3 epochs done)" in text


def test_hostile_names_are_text(tmp_path):
    hostile = "<script>alert('1')</script>\"><img src=x onerror=alert(2)>&"
    folder = write_run(tmp_path / "runs", arm="a", patch=hostile)
    metrics = (folder / "metrics.json").read_text(encoding="utf-8")
    for name in ('"figure6"', '"a"', '"mnist"', '"blocks.0.attention"'):
        metrics = metrics.replace(name, '"' + hostile.replace('"', '\\"') + '"')
    (folder / "metrics.json").write_text(metrics, encoding="utf-8")
    found = Page(report(tmp_path / "runs", tmp_path / "report"))
    assert not found.all("script")
    assert all(attrs["src"].startswith("data:") for attrs in found.all("img"))
    assert not any(name.startswith("on") for _, attrs in found.elements for name in attrs)
    assert found.text.count(hostile) > 4


def test_a_name_cannot_leave_the_folder(tmp_path):
    folder = write_run(tmp_path / "runs")
    metrics = (folder / "metrics.json").read_text(encoding="utf-8")
    (folder / "metrics.json").write_text(metrics.replace('"figure6"', '"../../away"'), encoding="utf-8")
    report(tmp_path / "runs", tmp_path / "report")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report", "runs"]
    assert (tmp_path / "report" / "away-small-runs.svg").exists()


def test_two_equal_reports_are_equal_bytes(plain, runs, tmp_path):
    report(runs, tmp_path / "report")
    one, two = ({file.name: file.read_bytes() for file in folder.iterdir()} for folder in (plain, tmp_path / "report"))
    assert one == two
    assert sorted(Path(name).suffix for name in one) == [".csv", ".html", ".md", *[".png"] * 4, *[".svg"] * 4]


def test_the_page_embeds_the_figures_that_are_written_as_files(plain, text):
    shown = [base64.b64decode(attrs["src"].partition(",")[2]) for attrs in Page(text).all("img")]
    names = [f"figure6-small-{name}.svg" for name in ("runs", "learning", "columns", "errors")]
    assert shown == [(plain / name).read_bytes() for name in names]


def test_the_template_is_part_of_the_package():
    template = Path(page.__file__).with_name(page.TEMPLATE).read_text(encoding="utf-8")
    parts = re.findall(r'\{% (?:extends|from) "([\w.]+)"', template)
    assert parts == ["frame.html.jinja", "table.html.jinja", "figure.html.jinja"]
    assert all(Path(page.__file__).with_name(part).is_file() for part in parts)
