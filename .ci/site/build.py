"""Build the site of the documentation, build/docs/index.html, without a network (called by ``make docs``).

The repository's pages are the site's, in the order of docs/index.md; `pages` adds a page a method, the reference of
Python and that of the commands. A warning, such as a dead link, is an error.
"""

from __future__ import annotations

import re
import shutil
import sys
import time
from pathlib import Path

import pages
from sphinx.cmd.build import main as sphinx

ROOT = Path(__file__).resolve().parent.parent.parent
SOURCE, SITE = ROOT / "build" / "docs-source", ROOT / "build" / "docs"
PAGES = ("*.md", "docs/*.md", "docs/*.ipynb", "jobs/bench/*.md")
LINK = re.compile(r"\]\(([^)#:\s]+)")


def stage(source: Path) -> None:
    """Copy the pages and the files that they link to into a new folder, and write the generated ones there."""
    shutil.rmtree(source, ignore_errors=True)
    found = {page for pattern in PAGES for page in ROOT.glob(pattern)}
    linked = {
        (page.parent / link).resolve() for page in found for link in LINK.findall(page.read_text(encoding="utf-8"))
    }
    for file in (*found, *(path for path in linked if path.is_file() and path.suffix != ".md")):
        place = source / file.relative_to(ROOT)
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, place)
    for name, content in pages.generated().items():
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_text(content, encoding="utf-8")


def main() -> int:
    """Return 0, or Sphinx's exit code if a page has a fault."""
    begin = time.monotonic()
    stage(SOURCE)
    shutil.rmtree(SITE, ignore_errors=True)
    strict = ["-q", "-W", "--keep-going", "-E", "-d", str(ROOT / "build" / "docs-cache")]
    failed = sphinx([*strict, "-b", "html", "-c", str(Path(__file__).parent), str(SOURCE), str(SITE)])
    if failed:
        return failed
    (SITE / "index.html").write_text('<meta http-equiv="refresh" content="0; url=README.html">\n', encoding="utf-8")
    count = len(list(SITE.rglob("*.html"))) - 1
    print(f"{SITE.relative_to(ROOT)}/index.html: {count} pages in {time.monotonic() - begin:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
