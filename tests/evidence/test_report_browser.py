"""The report as a real Chromium shows it."""

import dataclasses
import re
import shutil

import pytest

from heedful.evidence._report import write_report
from tests.evidence.fakes import many_tasks_result, small_result

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine: apt-get install chromium"),
]

HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)>"
LONG = "a_name_without_any_place_to_break_" * 6
PHONE, DESK = {"width": 375, "height": 800}, {"width": 1200, "height": 900}


@pytest.fixture(scope="module")
def chromium():
    sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install playwright")
    arguments = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-quic",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
    ]
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=arguments)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """The pages under test, by name."""
    folder = tmp_path_factory.mktemp("reports")
    hostile = small_result(arms=(HOSTILE, LONG, "sgd"), tasks=("digits", HOSTILE))
    trials = tuple(dataclasses.replace(t, log=HOSTILE, settings={HOSTILE: LONG}) for t in hostile.trials)
    chosen = {key: {HOSTILE: LONG} for key in hostile.chosen}
    results = {
        "small": [small_result()],
        "several": [small_result(), many_tasks_result(n_tasks=30, seeds=3)],
        "hostile": [dataclasses.replace(hostile, trials=trials, chosen=chosen, command=HOSTILE + LONG)],
    }
    return {name: write_report(of, folder / f"{name}.html") for name, of in results.items()}


@pytest.fixture
def show(chromium, files):
    """Open a page with all its parts unfolded; at the end no page may have complained or asked for anything."""
    contexts, complaints, requests = [], [], []

    def open_page(name, *, viewport=DESK, scheme="light", scripts=True, unfold=True):
        context = chromium.new_context(viewport=viewport, color_scheme=scheme, java_script_enabled=scripts)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("dialog", lambda dialog: (complaints.append(f"dialog {dialog.message}"), dialog.dismiss()))
        page.on("request", lambda request: requests.append(request.url))
        page.goto(files[name].as_uri())
        if unfold:
            page.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert complaints == []
    own = {path.as_uri() for path in files.values()}
    assert [url for url in requests if url not in own and not url.startswith("data:")] == []


@pytest.mark.parametrize("name", ["small", "several", "hostile"])
@pytest.mark.parametrize("viewport", [PHONE, DESK], ids=["phone", "desk"])
def test_every_figure_has_a_size_and_the_page_does_not_overflow(show, name, viewport):
    page = show(name, viewport=viewport)
    boxes = page.evaluate(
        "[...document.querySelectorAll('svg[role=img]')].map(s => s.getBoundingClientRect()).map(b => [b.width, b.height])"
    )
    assert len(boxes) >= 20
    assert min(width for width, _ in boxes) > 100
    assert min(height for _, height in boxes) > 15
    assert page.evaluate("document.documentElement.scrollWidth") <= viewport["width"]


def test_marks_lie_inside_their_drawings(show):
    outside = show("small").evaluate("""
        [...document.querySelectorAll('svg[role=img]')].flatMap(svg => {
            const box = svg.getBoundingClientRect();
            return [...svg.querySelectorAll('circle, use, path, line')].map(e => e.getBoundingClientRect()).filter(b =>
                b.right < box.left - 8 || b.left > box.right + 8 || b.bottom < box.top - 8 || b.top > box.bottom + 8);
        }).length""")
    assert outside == 0


def test_seeds_and_means_are_drawn(show):
    page = show("small")
    sizes = page.evaluate(
        "[...document.querySelectorAll('.seeds circle, .dots circle, .effect, .big use, path.mean, path.seed')]"
        ".map(e => e.getBoundingClientRect()).map(b => Math.min(b.width, b.height))"
    )
    assert len(sizes) > 100
    assert min(sizes) > 3


def test_a_click_sorts_by_number_and_a_second_click_turns_the_order(show):
    page = show("small")
    table = page.locator("table.verdicts")
    head = table.locator("thead th", has_text="Advantage")
    column = table.locator("tbody tr td:nth-child(4)")
    head.locator("button").click()
    rising = [float(text.replace("−", "-").split()[0]) for text in column.all_inner_texts()]
    assert rising == sorted(rising)
    assert len(set(rising)) > 4
    assert head.get_attribute("aria-sort") == "ascending"
    head.locator("button").click()
    falling = [float(text.replace("−", "-").split()[0]) for text in column.all_inner_texts()]
    assert falling == rising[::-1]
    assert head.get_attribute("aria-sort") == "descending"


def test_sorting_works_from_the_keyboard(show):
    page = show("small")
    head = page.locator("table.verdicts thead th").first
    head.locator("button").focus()
    page.keyboard.press("Enter")
    outcomes = page.locator("table.verdicts tbody tr td:first-child").all_inner_texts()
    assert outcomes == ["✓ holds"] * 5 + ["~ inconclusive"] * 3


def test_cells_without_a_number_come_last_in_both_orders(show):
    page = show("small")
    page.evaluate("document.querySelector('table.verdicts tbody tr td:nth-child(4)').dataset.key = ''")
    page.evaluate("document.querySelector('table.verdicts tbody tr td:nth-child(4)').textContent = 'none'")
    button = page.locator("table.verdicts thead th", has_text="Advantage").locator("button")
    for _ in range(2):
        button.click()
        assert page.locator("table.verdicts tbody tr").last.locator("td").nth(2).inner_text() == "none"


def test_without_javascript_everything_is_there(show, files):
    with_scripts = show("small", unfold=False).locator("main").inner_text()
    page = show("small", scripts=False, unfold=False)
    assert page.locator("thead button").count() == 0
    assert page.locator("main").inner_text() == with_scripts
    assert page.locator("svg[role=img]").count() > 20


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_and_marks_stand_out(show, scheme):
    page = show("several", scheme=scheme)
    texts = page.evaluate("""
        ['body', 'h1', '.answer', '.note', 'a', 'small', 'thead th', 'tbody th', 'td', '.quiet', '.tag', 'summary', 'pre', 'dt',
         '.badge.holds', '.badge.contradicted', '.badge.inconclusive', '.tally .holds', '.tally .inconclusive',
         '.x-axis span', '.legend span', '.eyebrow', '.eyebrow span', '.contents span', '.axis-name'].map(selector => {
            let e = document.querySelector(selector);
            if (!e) {  // an outcome that no verdict has: the badge as it would be
                e = document.querySelector('.badge').cloneNode(true);
                e.className = selector.slice(1).replace('.', ' ');
                document.querySelector('td').append(e);
            }
            const ink = getComputedStyle(e).color;
            while (getComputedStyle(e).backgroundColor === 'rgba(0, 0, 0, 0)') e = e.parentElement;
            return [selector, ink, getComputedStyle(e).backgroundColor];
        })""")
    weak = {selector: contrast(ink, paper) for selector, ink, paper in texts if contrast(ink, paper) < 4.5}
    assert weak == {}  # WCAG 2.2, 1.4.3: text of usual size
    marks = page.evaluate("""
        [0, 1, 2, 3, 4, 5, 6, 7].map(i => {
            const e = document.createElement('i');
            e.className = 'c' + i;
            document.body.append(e);
            return [getComputedStyle(e).color, getComputedStyle(document.body).backgroundColor];
        })""")
    assert min(contrast(ink, paper) for ink, paper in marks) >= 3  # 1.4.11: what is needed to read a graphic
    light = luminance(texts[0][2]) > 0.5
    assert light == (scheme == "light")


def test_hostile_names_do_not_run_and_are_shown_as_they_are(show):
    page = show("hostile")
    assert page.locator("img").count() == 0
    assert page.locator("script").count() == 1
    text = page.locator("main").inner_text()
    assert text.count(HOSTILE) > 20
    assert page.locator("pre", has_text=HOSTILE).count() >= 2
    assert page.locator(".settings", has_text=HOSTILE).count() >= 2


def test_a_script_that_slipped_in_would_be_refused(chromium, files, tmp_path):
    """The policy is in force: the same page with a foreign script and image runs and loads neither."""
    html = files["small"].read_text(encoding="utf-8")
    bad = tmp_path / "bad.html"
    bad.write_text(
        html.replace("</main>", "<script>window.ran = 1</script><img src='other.png'></main>"), encoding="utf-8"
    )
    page = chromium.new_page()
    refused = []
    page.on("console", lambda message: refused.append(message.text))
    page.goto(bad.as_uri())
    assert page.evaluate("window.ran") is None
    assert sum("Content Security Policy" in text for text in refused) == 2
    page.close()


def test_parts_of_a_large_study_are_folded(show):
    page = show("several", unfold=False)
    assert page.locator("#study-2 details.task").count() == 30
    assert page.locator("#study-2 details.task[open]").count() == 0
    assert page.locator("#study-1 details.task[open]").count() == 2
    assert page.locator("#study-2 .overview").count() == 1


def luminance(color: str) -> float:
    """Relative luminance of a CSS ``rgb(…)`` colour (WCAG 2.2)."""
    channels = [int(value) / 255 for value in re.findall(r"\d+", color)[:3]]
    r, g, b = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


def contrast(one: str, other: str) -> float:
    """Contrast ratio of two colours, 1 to 21 (WCAG 2.2)."""
    low, high = sorted([luminance(one), luminance(other)])
    return (high + 0.05) / (low + 0.05)
