"""The documentation: its links lead somewhere, its site builds."""

import importlib
import pathlib
import re
import subprocess
import sys

import pytest

from tsfl_jax.components import section_of
from tsfl_jax.config import LISTS, TABLES

ROOT = pathlib.Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [*ROOT.glob("*.md"), *DOCS.rglob("*.md")]
PAGES = [p for p in PAGES if not {"_build", "api"} & set(p.relative_to(ROOT).parts)]


def anchors(path):
    """The anchors of a page's headings, as GitHub and the site make them."""
    text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.M | re.S)
    found = set()
    for heading in re.findall(r"^#{1,4} (.+)$", text, re.M):
        plain = re.sub(r"[^\w\- ]", "", heading.replace("`", "").lower())
        found.add(plain.replace(" ", "-"))
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_to_files_and_headings(page):
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if link.startswith(("https:", "http:")):
            continue
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_pages_are_short_to_read():
    """Lines outside of tables; captions of tables that studies wrote are one line."""
    written = {p for p in (DOCS / "results").rglob("*.md") if p.stem != "README"}
    for page in {*PAGES, *(ROOT / "studies").glob("*.md")} - written:
        for number, line in enumerate(page.read_text().splitlines(), 1):
            assert len(line) <= 200 or line.lstrip().startswith("|"), (page, number)
    assert len((ROOT / "README.md").read_text().splitlines()) < 150


# Components by the setting that chooses them, and the pages with a table of all.
PAGES_OF = {
    **{by: ["frameworks.md"] for by in ("algorithm", "timeline.framework")},
    **{"uplink.chain": ["howto/compression.md"], "cohort.sampler": ["cohorts.md"]},
}
NAMES = [(by, name) for by in PAGES_OF for name in (TABLES | LISTS)[by]]


@pytest.mark.parametrize(("by", "name"), NAMES)
def test_a_component_has_its_row(by, name):
    missing = []
    for page in PAGES_OF[by] + ["custom.md"] * (by == "algorithm"):
        rows = re.findall(r"^\|([^|]*)", (DOCS / page).read_text(), re.M)
        if f"`{name}`" not in " ".join(rows):
            missing.append(f"docs/{page}: a row for `{name}` in the table")
    words = {*re.findall(r"\w+", (DOCS / "settings.md").read_text())}
    if {*map(section_of, (TABLES | LISTS)[by][name].sections)} - words:
        missing.append("docs/settings.md: python docs/settings_page.py")
    assert not missing


@pytest.mark.slow
def test_the_picture_of_the_readme_is_plotted(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(DOCS)
    picture = importlib.import_module("picture")
    monkeypatch.setattr(picture, "PATH", tmp_path / "picture.png")
    monkeypatch.setattr(picture, "SEEDS", 1)
    picture.main()
    assert picture.PATH.stat().st_size > 10_000


@pytest.mark.slow
def test_the_site_builds_without_warnings(tmp_path):
    pytest.importorskip("sphinx")
    pytest.importorskip("furo")
    pytest.importorskip("myst_nb")
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html"]
    done = subprocess.run(
        [*command, "docs", str(tmp_path)], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "api" / "public.html").exists()
