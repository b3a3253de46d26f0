"""Pages that are made from the code, and code that stands in pages."""

from __future__ import annotations

import ast
import importlib.util
import re
import tomllib
from pathlib import Path
from types import ModuleType

import click
import pytest

from wheelsched import __version__
from wheelsched.cli.main import cli
from wheelsched.model.states import LEGAL, MOVES, Status
from wheelsched.runtime.config import KEYS
from wheelsched.runtime.metrics import Metrics

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.fixture(scope="module")
def draw_states() -> ModuleType:
    spec = importlib.util.spec_from_file_location("draw_states", ROOT / "docs/draw_states.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_diagram_of_states_is_what_the_table_draws(draw_states: ModuleType) -> None:
    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    assert page == draw_states.with_diagram(page), "run: python docs/draw_states.py"


def test_diagram_has_every_legal_move_and_no_other(draw_states: ModuleType) -> None:
    arrows = re.findall(r"(\w+) --> (\w+): (.+)", draw_states.drawn_states())
    assert {(Status[before], Status[after]) for before, after, _ in arrows} == LEGAL
    assert sum(len(causes.split(", ")) for _, _, causes in arrows) == len(MOVES)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_settings_and_metrics_named_in_pages_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    sections = "|".join(sorted({name.split(".")[0] for name in KEYS}))
    named = set(re.findall(rf"`((?:{sections})\.[a-z_]+)`", text)) - {"model.states.status_of"}
    assert named <= set(KEYS)
    body = Metrics().render()[0].decode()
    for metric in re.findall(r"wheelsched_([a-z_]+[a-z])\b", text):
        assert f"wheelsched_{metric}" in body, metric


def test_python_in_the_readme_is_python() -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) >= 2
    for block in blocks:
        ast.parse(block)


def test_commands_in_pages_exist() -> None:
    for page in PAGES:
        blocks = "\n".join(re.findall(r"```\w*\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL))
        for line in re.findall(r"^wheelsched (\w+)(?: (\w+))?", blocks, re.MULTILINE):
            command = cli.get_command(click.Context(cli), line[0])
            assert command is not None, f"{page.name}: wheelsched {line[0]}"
            if isinstance(command, click.Group):
                assert command.get_command(click.Context(command), line[1]), f"{page.name}: wheelsched {' '.join(line)}"


def test_every_dependency_is_explained() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    text = (ROOT / "docs/dependencies.md").read_text(encoding="utf-8").lower()
    wanted = [*project["dependencies"], *(name for extra in project["optional-dependencies"].values() for name in extra)]
    for requirement in wanted:
        name = re.split(r"[<>=!~;\[ ]", requirement)[0].lower()
        assert name in text, f"docs/dependencies.md does not say what {name} is for"


def test_changelog_tells_of_this_version() -> None:
    assert f"## {__version__}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_no_page_or_setting_names_a_path_of_one_machine() -> None:
    for path in [*PAGES, ROOT / "Makefile", ROOT / ".ci/run", *(ROOT / "conf").glob("*")]:
        assert not re.search(r"/(work|home|root|Users)/", path.read_text(encoding="utf-8")), path
