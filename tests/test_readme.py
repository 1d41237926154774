"""What the README and the documentation show is what happens."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

import planner

#: Where the packages under test were imported from, for the processes started here.
PACKAGES = str(Path(planner.__file__).parents[1])
ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PYTHON = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def run(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "ignore", *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONIOENCODING": "utf-8", "PYTHONPATH": PACKAGES},
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=300,
        check=False,
    )


def test_the_python_of_the_readme_runs(tmp_path):
    assert PYTHON
    script = tmp_path / "readme.py"
    script.write_text("\n".join(PYTHON), encoding="utf-8")
    done = run(str(script), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Offset map of a backward plan" in done.stdout


@pytest.mark.slow
def test_the_demo_of_the_readme_runs(tmp_path):
    assert "&& arenaplan demo\n" in README
    done = run("-c", "from runtime.cli import main; main()", "demo", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "arenaplan-demo" / "plan.json").is_file()
    assert (tmp_path / "arenaplan-demo" / "offset_map.html").is_file()


def test_the_memory_table_is_what_the_planner_reaches():
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        import refresh_docs
    finally:
        sys.path.pop(0)
    shown = README.split(refresh_docs.BEGIN)[1].split(refresh_docs.END)[0].strip()
    assert shown == refresh_docs.memory_table(), "run tools/refresh_docs.py"


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md"])
def test_links_to_files_lead_somewhere(page):
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", (ROOT / page).read_text(encoding="utf-8"))
    assert links
    missing = [link for link in links if "://" not in link and not (ROOT / link).exists()]
    assert not missing


def commands() -> dict[str, Any]:
    from runtime.cli import app

    group: Any = typer.main.get_command(app)
    return dict(group.commands)


def section_and_options(name: str) -> tuple[str, list[Any]]:
    """A command's section of the page, and its options or those of its subcommands."""
    pages = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
    assert f"## arenaplan {name}\n" in pages
    section = pages.split(f"## arenaplan {name}\n")[1].split("\n## ")[0]
    command = commands()[name]
    parts = list(command.commands.values()) if hasattr(command, "commands") else [command]
    return section, [item for part in parts for item in part.params if item.param_type_name == "option"]


@pytest.mark.parametrize("name", sorted(commands()))
def test_every_command_and_option_is_documented(name):
    section, parameters = section_and_options(name)
    options = [item.opts[0] for item in parameters if item.opts[0] not in {"--help", "--json", "--debug"}]
    assert [option for option in options if f"`{option}" not in section] == []


def documented_defaults(section: str) -> dict[str, set[str]]:
    """What the tables say of each option; some rows tell of two, and some options stand in several tables."""
    found: dict[str, set[str]] = {}
    for row in re.findall(r"^\|(.*)\|(.*)\|(.*)\|$", section, re.MULTILINE):
        for option in re.findall(r"`(-[\w-]+)", row[0]):
            found.setdefault(option, set()).update(word.strip(" `") for word in re.split("[,;:]", row[2]))
    return found


@pytest.mark.parametrize("name", sorted(commands().keys() - {"inspect"}))  # every option of which is off
def test_every_default_is_documented(name):
    section, parameters = section_and_options(name)
    if name == "plan":
        assert "with the same defaults" in section
        section = section_and_options("attention")[0]
    told = documented_defaults(section)
    for item in parameters:
        default = "required" if item.required else getattr(item.default, "value", item.default)
        if default is not None and not isinstance(default, bool):
            shown = int(default) if isinstance(default, float) and default.is_integer() else default
            assert str(shown) in told.get(item.opts[0], set()), item.opts[0]
