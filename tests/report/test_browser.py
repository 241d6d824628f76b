"""The page in a real browser: phone and desktop, light and dark."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.report import browser
from tests.report.conftest import make_report, make_rows, write_clients, write_run

pytestmark = pytest.mark.skipif(
    browser.CHROMIUM is None and os.environ.get("CI") != "true", reason="needs chromium (apt-get install chromium)"
)
OVERFLOW = """[...document.querySelectorAll("body *")]
    .filter(e => !e.closest(".scroll, pre, svg") && e.getBoundingClientRect().right > innerWidth + 0.5)
    .map(e => e.tagName + " " + e.textContent.slice(0, 40))"""
CLIPPED = """[...document.querySelectorAll(".scroll")].filter(e => e.scrollWidth > e.clientWidth + 1)
    .map(e => e.getAttribute("aria-label"))"""
FAINT = """(() => {
    const channel = c => (c /= 255) <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
    const numbers = colour => colour.match(/[\\d.]+/g).map(Number);
    const light = colour => {
        const [r, g, b] = numbers(colour).map(channel);
        return .2126 * r + .7152 * g + .0722 * b;
    };
    const behind = e => {
        for (; e; e = e.parentElement) {
            const colour = getComputedStyle(e).backgroundColor;
            if (numbers(colour)[3] !== 0) return colour;
        }
        return "rgb(255, 255, 255)";
    };
    const faint = new Set();
    for (const e of document.querySelectorAll("body *")) {
        if (![...e.childNodes].some(n => n.nodeType === 3 && n.data.trim()) || !e.getClientRects().length) continue;
        const style = getComputedStyle(e);
        const [a, b] = [light(e.closest("svg") ? style.fill : style.color), light(behind(e))];
        const contrast = (Math.max(a, b) + .05) / (Math.min(a, b) + .05);
        if (contrast < 4.5) faint.add(`${contrast.toFixed(2)} ${e.tagName} ${e.textContent.trim().slice(0, 40)}`);
    }
    return [...faint];
})()"""
SMALLEST = """Math.min(...[...document.querySelectorAll("figure svg text")].filter(e => e.textContent.trim()).map(e => {
    const {a, b} = e.getScreenCTM();
    const sizes = [e, ...e.querySelectorAll("tspan")].map(part => parseFloat(getComputedStyle(part).fontSize));
    return Math.max(...sizes) * Math.hypot(a, b);
}))"""


BROKEN = """[...document.querySelectorAll("th")].flatMap(e => {
    const texts = document.createTreeWalker(e, NodeFilter.SHOW_TEXT), found = [];
    while (texts.nextNode())
        for (const word of texts.currentNode.data.matchAll(/[^\\s/-]+/g)) {
            const range = document.createRange();
            range.setStart(texts.currentNode, word.index);
            range.setEnd(texts.currentNode, word.index + word[0].length);
            if (new Set([...range.getClientRects()].map(r => r.top)).size > 1) found.push(word[0]);
        }
    return found;
})"""


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Path:
    """A report with everything on it: long names, three seeds, clients, a run that is going on."""
    folder = tmp_path_factory.mktemp("page")
    long = {"guess": "remaining", "local": {"steps": 20, "batch_size": 50, "lr": 0.1, "weight_decay": 0.0001}}
    runs = [
        write_run(folder / f"{name}-{seed}", name, seed, rows=make_rows(20, name, seed), change=change)
        for name, change in (("fedavg", {}), ("fedexp", {}), ("feddyn", long), ("fedprox", long))
        for seed in range(2)
    ]
    runs.append(write_run(folder / "going-on", "fedexp", 2, rows=make_rows(7, "fedexp", 2), status=None))
    write_clients(runs[0], [0.5, 0.9, 0.7, 1.0])
    return make_report(runs, folder / "report", figures=False)


@pytest.fixture(scope="module")
def chromium():
    assert browser.CHROMIUM is not None, "no chromium, which CI does not allow"
    with browser.started() as one:
        yield one


@pytest.mark.every(3)
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [390, 1400])
def test_the_page_in_a_browser(chromium, page, width, dark):
    events = chromium.open(page, width=width, dark=dark)
    requests = [event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent"]
    assert [url for url in requests if not url.startswith("data:")] == [page.as_uri()]
    assert [event for event in events if event["method"] != "Network.requestWillBeSent"] == []
    assert chromium.value("document.documentElement.scrollWidth") == width
    assert chromium.value(OVERFLOW) == []
    if width == 390:
        assert chromium.value(CLIPPED) == []  # a phone shows rows as cards, and no table has to be pushed aside
    assert chromium.value("document.querySelectorAll('details').forEach(e => e.open = true)") is None
    assert chromium.value(FAINT) == []
    assert chromium.value(BROKEN) == []
    assert chromium.value("getComputedStyle(document.body).backgroundColor") == (
        "rgb(22, 24, 29)" if dark else "rgb(255, 255, 255)"
    )
    assert chromium.value(SMALLEST) >= 10  # pixels: the text in figures stays readable


PARTS = "[...document.querySelectorAll('figure:first-of-type [data-method=\"0\"]')]"
SHOWN = f"{PARTS}.map(e => getComputedStyle(e).display)"
SMOOTHED = "document.querySelectorAll('.smoothed[d^=M]').length"


def test_curves_are_read_off_hidden_and_smoothed_and_paper_has_the_still_picture(chromium, page):
    chromium.open(page, width=1400, dark=False)
    chromium.value("document.querySelector('figure svg').scrollIntoView()")
    frame = chromium.value(
        "(({left, top, width, height}) => [left + width / 2, top + height / 2])"
        "(document.querySelector('figure svg').getBoundingClientRect())"
    )
    chromium.ask("Input.dispatchMouseEvent", type="mouseMoved", x=frame[0], y=frame[1])
    head, *rows = chromium.value("document.querySelector('.tip').innerText").splitlines()
    number = int(head.removeprefix("round "))
    assert number in range(8, 13)
    runs = [make_rows(20, "fedavg", seed)[number - 1]["test_accuracy"] for seed in range(2)]
    assert f"FedAvg {50 * sum(runs):.2f} %" in rows
    assert set(chromium.value(SHOWN)) == {"inline"}
    chromium.value("document.querySelector('.keys li').click()")
    slide = "(e => { e.value = 4; e.dispatchEvent(new Event('input')); })(document.querySelector('.smoothing input'))"
    assert (chromium.value(SMOOTHED), chromium.value(slide)) == (0, None)
    assert set(chromium.value(SHOWN)) == {"none"}
    assert chromium.value(SMOOTHED) > 10
    opened = "document.querySelector('details:not([open]) pre').checkVisibility()"
    assert not chromium.value(opened)
    chromium.ask("Emulation.setEmulatedMedia", media="print")
    assert chromium.value(opened)  # paper has no fold to open
    assert set(chromium.value(SHOWN)) == {"inline"}
    assert chromium.value("getComputedStyle(document.querySelector('.smoothed')).display") == "none"
    chromium.ask("Emulation.setEmulatedMedia", media="")
    assert not [event for event in chromium.events if event["method"] == "Runtime.exceptionThrown"]
