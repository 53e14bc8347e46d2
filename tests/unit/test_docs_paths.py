"""Every path of this repository that the documentation names exists."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
FOLDERS = "runner|components|hydra_plugins|conf|tests|benchmarks|docs|examples"
PATH = re.compile(rf"(?<![\w/.-])((?:{FOLDERS})/[\w./-]*\w)")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_path_exists(page: Path) -> None:
    named = set(PATH.findall(page.read_text()))
    assert sorted(path for path in named if not (ROOT / path).exists()) == []
