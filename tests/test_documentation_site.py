"""The documentation builds without a warning, has every public name, and opens without a network."""

import importlib
import os
import re
import sys
import types
from pathlib import Path

import pytest

import narrowcast
from child_processes import finished

ROOT = Path(__file__).parents[1]
WIDTHS = (1280, 400)
PACKAGES = sorted(
    path.stem for path in (ROOT / "docs" / "reference").glob("*.md") if path.stem != "narrowcast"
)


@pytest.fixture(scope="session")
def site(tmp_path_factory):
    pytest.importorskip("mkdocs", reason="docs: mkdocs is not installed")
    folder = tmp_path_factory.mktemp("site")
    done = finished(
        [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", folder],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
    return folder


def pages(site):
    return sorted(path for path in site.rglob("*.html") if path.name != "404.html")


def test_every_document_is_a_page_that_can_be_reached(site):
    documents = {p.relative_to(ROOT / "docs").with_suffix("") for p in (ROOT / "docs").rglob("*.md")}
    assert {path.relative_to(site).with_suffix("") for path in pages(site)} == documents
    start = (site / "index.html").read_text(encoding="utf-8")
    for document in documents - {Path("index")}:
        assert f'href="{document.as_posix()}.html"' in start, document
    assert not list(site.rglob("*.py"))


def test_every_public_name_is_in_the_reference(site):
    text = (site / "reference" / "narrowcast.html").read_text(encoding="utf-8")
    shown = set(re.findall(r'id="narrowcast\.(\w+)"', text))
    # ``rule`` is a module of three functions.
    assert set(narrowcast.__all__) - shown - set(PACKAGES) == {"__version__", "rule"}
    assert all(f'id="narrowcast.policy._rule.{name}"' in text for name in ("op", "module", "module_type"))


@pytest.mark.parametrize("package", PACKAGES)
def test_public_names_of_packages_are_in_the_reference(package, site):
    text = (site / "reference" / f"{package}.html").read_text(encoding="utf-8")
    shown = set(re.findall(rf'id="narrowcast\.{package}\.([\w.]+)"', text))
    # ``rule`` and ``lists`` are modules that hold functions shown elsewhere, and lists of names.
    assert (
        set(public_names(importlib.import_module(f"narrowcast.{package}"))) - {"rule", "amp.lists"} <= shown
    )


def public_names(module):
    """Public names of a module, and of public modules in it, as those of apex."""
    for name in getattr(module, "__all__", None) or [
        name for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__
    ]:
        value = getattr(module, name)
        if isinstance(value, types.ModuleType) and name not in ("rule", "lists"):
            yield from (f"{name}.{inner}" for inner in public_names(value))
        elif not name.startswith("_"):
            yield name


def test_nothing_is_fetched_from_elsewhere(site):
    for path in [*pages(site), *site.rglob("*.css")]:
        text = path.read_text(encoding="utf-8")
        assert re.findall(r'<(?:script|link|img|iframe)[^>]*(?:src|href)="(?:https?:)?//[^"]*"', text) == []
        assert re.findall(r"(?:@import|url\()[\s'\"]*(?:https?:)?//[^)]*", text) == []


@pytest.mark.long
def test_pages_fit_any_window_and_fetch_nothing(site, browser):
    wrong = []
    page = browser.new_page()
    page.on("pageerror", lambda error: wrong.append(f"{page.url}: {error}"))
    page.on("request", lambda asked: asked.url.startswith(("file:", "data:")) or wrong.append(asked.url))
    for path in pages(site):
        page.goto(path.as_uri())
        for width in WIDTHS:
            page.set_viewport_size({"width": width, "height": 900})
            if page.evaluate("document.documentElement.scrollWidth") > width:
                wrong.append(f"{path.name} is wider than {width}")
        broken = "all => all.filter(one => one.complete && !one.naturalWidth).length"
        if page.eval_on_selector_all("img", broken):
            wrong.append(f"{path.name} has a broken picture")
    page.close()
    assert wrong == []
