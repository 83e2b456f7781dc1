"""The page in Chromium: it opens without errors, and its sliders, pointer and keys do what they say."""

import re

import pytest
import torch
from torch import nn

from sinkformers import to_sinkformer, view_attention
from sinkformers.models import LanguageModel, ViT
from tests.viewing.test_view import HOSTILE, encoder

pytestmark = [
    pytest.mark.browser,
    # Playwright's own event loop and pipes, which it closes when it likes.
    pytest.mark.filterwarnings("default::ResourceWarning", "default::pytest.PytestUnraisableExceptionWarning"),
]
FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking")
TOKENS = ["to", "be", "or", "not", "to be"]


@pytest.fixture(scope="module")
def chromium():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=[*FLAGS, "--disable-sync"])
        yield browser
        browser.close()


@pytest.fixture
def opened(chromium, tmp_path):
    """Return a function that opens the page of a view; at the end nothing may have been loaded or gone wrong."""
    said, asked, contexts = [], [], []

    def open_page(view, address="", width=1280, **options):
        context = chromium.new_context(viewport={"width": width, "height": 900}, **options)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(view.save(tmp_path / "page.html").as_uri() + address)
        page.wait_for_function(
            "document.querySelectorAll('.map[aria-label]').length || !document.querySelector('.map')"
        )
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert said == []
    assert {url.split("#")[0] for url in asked if not url.startswith(("blob:", "data:"))} == {
        (tmp_path / "page.html").as_uri()
    }


def view(model=None, **options):
    torch.manual_seed(0)
    options = {"tokens": TOKENS} | options
    return view_attention(
        encoder() if model is None else model, 2 * torch.randn(1, 5, 12, dtype=torch.float64), **options
    )


def sums(page, panel=0):
    """Return the smallest and the largest column sum as the page states them."""
    text = page.locator(".panel").nth(panel).locator(".numbers dd").first.inner_text()
    return tuple(map(float, text.split(" to ")))


def slide(page, name, value):
    page.locator(f".{name}").first.evaluate(
        "(input, value) => { input.value = value; input.dispatchEvent(new Event('input', {bubbles: true})); }",
        str(value),
    )
    page.wait_for_timeout(100)


def test_the_sliders_change_the_sums(opened):
    page = opened(view())
    assert "SoftMax" in page.locator("h2").inner_text()
    low, high = sums(page)
    assert high - low > 0.5
    slide(page, "iterations", 32)
    assert sums(page) == (1.0, 1.0)
    assert "n_iters ∞" in page.locator("h2").inner_text()
    assert "reached after" in page.locator(".numbers").inner_text()
    slide(page, "tau", 0)
    assert sums(page) == (low, high)
    slide(page, "iterations", 2)
    slide(page, "tau", 1)
    assert sums(page) == (1.0, 1.0)
    assert "off by" in page.locator(".numbers").inner_text()
    page.locator(".own").click()
    page.wait_for_timeout(100)
    assert sums(page) == (low, high)


def test_the_first_head_is_the_least_even(opened):
    shown = view()
    page = opened(shown)
    layer, head = max(
        ((layer, head) for layer in shown.models[0].layers for head in layer.heads), key=lambda each: each[1].unevenness
    )
    assert f"layer {layer.number} · head {head.number}" in page.locator(".where").inner_text()


def test_pointing_at_a_cell_says_its_weight(opened):
    page = opened(view())
    box = page.locator("canvas.head").bounding_box()
    page.mouse.move(box["x"] + 150, box["y"] + 150)
    page.wait_for_timeout(100)
    assert re.search(r"(→.*weight \d|has entropy \d)", page.locator(".readout").inner_text())
    assert page.locator(".bars").count() == 3
    page.mouse.click(box["x"] + 150, box["y"] + 150)
    page.mouse.move(box["x"] + 60, box["y"] + 60)
    page.wait_for_timeout(100)
    assert "Held" in page.locator(".readout").inner_text()
    page.keyboard.press("Escape")
    page.wait_for_timeout(100)
    assert "Point at the map" in page.locator(".readout").inner_text()


def test_arrow_keys_move_through_the_map_and_the_heads(opened):
    page = opened(view())
    page.locator("canvas.head").focus()
    for key in ("ArrowDown", "ArrowRight", "ArrowRight"):
        page.keyboard.press(key)
    page.wait_for_timeout(100)
    assert "or → " not in page.locator(".readout").inner_text()
    assert "→" in page.locator(".readout").inner_text()
    chosen = page.locator(".map[aria-pressed=true]")
    before = chosen.get_attribute("aria-label")
    chosen.focus()
    page.keyboard.press("ArrowRight" if "head 2" not in before else "ArrowLeft")
    page.wait_for_timeout(100)
    after = page.locator(".map[aria-pressed=true]").get_attribute("aria-label")
    assert before.split(":")[0] != after.split(":")[0]
    assert after.split(":")[0].replace(",", " ·") in page.locator(".where").inner_text()


def test_softmax_beside_it(opened):
    page = opened(view(to_sinkformer(encoder(), 21)))
    assert page.locator(".panel").count() == 1
    page.locator("#compare").click()
    assert page.locator(".panel").count() == 2
    (low, high), (sinkhorn_low, sinkhorn_high) = sums(page), sums(page, 1)
    assert high - low > 3 * (sinkhorn_high - sinkhorn_low)
    page.locator("#compare").click()
    assert page.locator(".panel").count() == 1


def test_pictures_are_saved(opened):
    page = opened(view(tokens=HOSTILE[:5]))
    with page.expect_download() as download:
        page.locator("button.svg").click()
    svg = download.value.path().read_text(encoding="utf-8")
    assert svg.startswith("<svg")
    assert "alert" not in re.sub("&[a-z]+;.*?&[a-z]+;", "", svg) or "<script" not in svg
    from xml.etree import ElementTree

    names = {element.tag.split("}")[1] for element in ElementTree.fromstring(svg).iter()}
    assert names == {"svg", "title", "rect", "line", "text"}
    with page.expect_download() as download:
        page.locator("button.png").click()
    assert download.value.path().read_bytes().startswith(b"\x89PNG")


def test_tables_stand_behind_the_pictures(opened):
    page = opened(view())
    for summary in page.locator(".behind summary").all():
        summary.click()
    page.wait_for_timeout(200)
    assert page.locator(".one table").count() == 2
    assert page.locator(".one table").first.locator("tbody tr").count() == 5
    assert page.locator(".overview tbody tr").count() == 6
    slide(page, "iterations", 32)
    column = page.locator(".one table").first.locator("tbody td:nth-child(2)")
    assert column.all_inner_texts() == ["1.00"] * 5


def test_hostile_tokens_stay_text(opened):
    shown = view_attention(encoder(), torch.randn(1, 9, 12, dtype=torch.float64), tokens=HOSTILE, title=HOSTILE[0])
    page = opened(shown)
    assert page.title() == HOSTILE[0]
    assert page.locator("h1").inner_text() == HOSTILE[0]
    chips = page.locator(".token")
    assert chips.count() == 9
    assert max(len(text) for text in chips.all_inner_texts()) < 40
    assert chips.nth(3).inner_text() == HOSTILE[3]
    assert "202e" in chips.nth(2).inner_text()
    for number in range(9):
        chips.nth(number).hover()
    assert page.locator("script").count() == 2


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1280])
def test_it_fits_on_narrow_screens_and_follows_the_theme(opened, width, scheme):
    page = opened(view().beside(view(to_sinkformer(encoder(), 3))), width=width, color_scheme=scheme)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate("document.documentElement.dataset.theme") == scheme
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", ground))) > 380) == (scheme == "light")
    page.locator("#theme").click()
    assert page.evaluate("document.documentElement.dataset.theme") != scheme


def test_images_points_and_causal_models_open(opened):
    vit = ViT(image=12, patch=4, channels=1, classes=2, dim=12, depth=1, heads=1, mlp_dim=8, readout="cls")
    page = opened(view_attention(vit, torch.rand(1, 1, 12, 12), image=torch.rand(1, 12, 12)))
    page.locator("canvas.image[tabindex]").hover()
    page.wait_for_timeout(100)
    assert page.locator(".subject figcaption").inner_text().startswith("where “2,2” looks")
    page = opened(view(tokens=None, points=torch.randn(5, 3)))
    page.locator("canvas.points").focus()
    page.keyboard.press("ArrowRight")
    model = LanguageModel(vocabulary=19, length=16, dim=12, depth=1, heads=3, hidden=16, n_iters=3)
    page = opened(view_attention(model, torch.arange(5)[None], tokens=TOKENS))
    slide(page, "iterations", 32)
    assert "31 are made" in page.locator(".controls .note").inner_text()


def test_twelve_layers_of_twelve_heads_open_within_a_second(opened):
    layer = nn.TransformerEncoderLayer(24, 12, 8, batch_first=True)
    model = nn.TransformerEncoder(layer, 12, enable_nested_tensor=False)
    page = opened(view_attention(model, torch.randn(1, 128, 24)))
    # Scripts that are modules have run by then.
    entry = "performance.getEntriesByType('navigation')[0].domContentLoadedEventEnd"
    assert page.evaluate(entry) < 1000


def test_it_is_shown_in_a_notebook(chromium, tmp_path):
    """In a frame without an origin: its scripts run, and do not reach the notebook."""
    (tmp_path / "notebook.html").write_text(f"<!doctype html><p>cell</p>{view()._repr_html_()}", encoding="utf-8")
    page = chromium.new_page()
    said = []
    page.on("console", lambda message: said.append(message.text))
    page.goto((tmp_path / "notebook.html").as_uri())
    frame = page.frame_locator("iframe")
    frame.locator(".numbers dd").first.wait_for()
    frame.locator("#compare").click()
    assert frame.locator(".panel").count() == 2
    assert said == []
    page.close()
