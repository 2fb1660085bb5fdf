"""Pages in a real browser: they draw, fetch nothing, run nothing of a capture, and fit any window."""

import made_captures
import pytest
from made_diagnoses import CPU, FOUND, GPU

from narrowcast.report import diagnosis_page, doctor_page, write_page

WIDTHS = {1280: "light", 390: "dark"}
# One of each kind of page; the hostile ones and the largest take their turn in the long tests.
MAKES = {
    "training": made_captures.trained,
    "many parameters": made_captures.many_parameters,
    "hostile": made_captures.hostile,
    "one run": made_captures.one_run,
    "explained": made_captures.explained_run,
    "hostile explanation": made_captures.hostile_explanation,
    "doctor": lambda folder: write_page(doctor_page(GPU), folder / "doctor.html"),
    "doctor script": lambda folder: write_page(diagnosis_page(FOUND, CPU), folder / "doctor.html"),
}
FAST = ("training", "explained", "doctor script")


HIDDEN_CELLS = """() => [...document.querySelectorAll('.scrolls')].flatMap(card => {
  const edge = card.getBoundingClientRect().right + 1;
  const cells = [...card.querySelectorAll('tbody th, tbody td')];
  return cells.filter(cell => cell.getBoundingClientRect().right > edge).map(cell => cell.outerHTML);
})"""


class Opened:
    """A page that was opened, and all that happened which should not."""

    def __init__(self, browser, path, **settings):
        self.wrong = []
        self.page = browser.new_page(**settings)
        self.page.route("**/*", self._only_itself)
        self.page.on("console", lambda said: self.wrong.append(f"console: {said.text}"))
        self.page.on("pageerror", lambda error: self.wrong.append(f"error: {error}"))
        self.page.on("dialog", self._dismiss)
        self._own = path.as_uri()
        self.page.goto(self._own)
        self.page.wait_for_load_state("load")

    def _only_itself(self, route):
        url = route.request.url
        if url == self._own:
            route.continue_()
        else:
            self.wrong.append(f"request: {url[:200]}")
            route.abort()

    def _dismiss(self, dialog):
        self.wrong.append(f"dialog: {dialog.message}")
        dialog.dismiss()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.page.close()


def drawn(page):
    """Of each figure: how many of its paths take up space."""
    shown = "[...one.querySelectorAll('path')].filter(p => p.getBoundingClientRect().width > 5).length"
    return page.eval_on_selector_all(".plot", f"all => all.map(one => {shown})")


@pytest.mark.parametrize(
    "what", [pytest.param(what, marks=[pytest.mark.long] * (what not in FAST)) for what in MAKES]
)
def test_a_page_draws_fits_and_does_nothing_else(browser, tmp_path, what):
    path = MAKES[what](tmp_path)
    path = made_captures.write_page(path) if path.is_dir() else path
    for width, scheme in WIDTHS.items():
        with Opened(browser, path, viewport={"width": width, "height": 900}, color_scheme=scheme) as opened:
            page = opened.page
            page.eval_on_selector_all("details", "all => all.forEach(one => one.open = true)")
            assert all(drawn(page)), "a figure is empty"
            assert bool(drawn(page)) == ("expla" not in what and "doctor" not in what)
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            assert page.evaluate(HIDDEN_CELLS) == [], "a column is beyond the edge of its card"
            if what.startswith("doctor"):
                cut_off = "all => all.filter(one => one.scrollWidth > one.clientWidth).length"
                assert page.eval_on_selector_all(".scrolls", cut_off) == 0, "a column is lost"
            assert page.evaluate("typeof window.hacked") == "undefined"
            assert page.locator("h1").count() == 1
            assert opened.wrong == []


def test_the_policy_stops_a_script_that_got_through(browser, tmp_path):
    """The second wall: even if escaping failed, the script would not run and nothing would be fetched."""
    path = made_captures.write_page(made_captures.trained(tmp_path, steps=5))
    inside = (
        "<script>window.hacked=1</script><img src='https://example.invalid/x.png' onerror='window.hacked=1'>"
    )
    path.write_text(path.read_text(encoding="utf-8").replace("<main>", f"<main>{inside}"), encoding="utf-8")
    with Opened(browser, path) as opened:
        assert opened.page.evaluate("typeof window.hacked") == "undefined"
        assert all(drawn(opened.page))
        assert opened.wrong, "the browser said nothing of what it refused"
        assert not any(wrong.startswith("request") for wrong in opened.wrong)


@pytest.mark.long
def test_colours_follow_the_system_and_paper_is_light(browser, tmp_path):
    path = made_captures.write_page(made_captures.trained(tmp_path, steps=30))
    stroke = "getComputedStyle(document.querySelector('#plot-loss-0 path.fp32')).stroke"
    with Opened(browser, path, color_scheme="light") as opened:
        page = opened.page
        light = page.evaluate(stroke)
        page.emulate_media(color_scheme="dark")
        assert page.evaluate(stroke) != light
        page.emulate_media(media="print", color_scheme="dark")
        assert page.evaluate(stroke) == light
        assert page.pdf().startswith(b"%PDF")
        assert opened.wrong == []
