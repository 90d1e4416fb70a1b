"""Every code block of the documentation that can run is run, and the site builds without warnings.

A comment on the line before a block says what is special about it; without one it is run:

    <!-- not run: REASON -->   the block is only read
    <!-- needs: torch -->      run where these modules are installed
    <!-- file: NAME -->        saved under this name, for a later block to run

The blocks of a page are run in their order, in one folder that has the repository's traces and
examples. ``python`` blocks share their variables; of ``console`` blocks the lines with a ``$`` are.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from conftest import REPOSITORY

import zeus_hetero

PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]
KINDS = ("python", "console", "bash")
MARKS = ("not run", "needs", "file")
PROGRAMS = {"python": "", "zeus-hetero": "-m zeus_hetero", "torchrun": "-m torch.distributed.run"}


@dataclass(frozen=True)
class Block:
    page: Path
    line: int
    kind: str
    mark: str
    value: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(REPOSITORY)}:{self.line}"


def blocks_of(page: Path) -> list[Block]:
    lines = page.read_text(encoding="utf-8").splitlines()
    found, number = [], 0
    while number < len(lines):
        fence = re.match(r"```(\w*)", lines[number])
        if fence is None:
            number += 1
            continue
        end = next(n for n in range(number + 1, len(lines)) if lines[n].startswith("```"))
        comment = re.fullmatch(r"<!-- ([\w ]+): (.+) -->", lines[number - 1])
        mark, value = comment.groups() if comment else ("", "")
        text = "\n".join(lines[number + 1 : end]) + "\n"
        found.append(Block(page, number + 1, fence[1], mark, value, text))
        number = end + 1
    return found


ALL_BLOCKS = [block for page in PAGES for block in blocks_of(page)]


def commands(block: Block) -> str:
    """What a console block has after its prompts, with continued lines."""
    if block.kind == "bash":
        return block.text
    taken, continued = [], False
    for line in block.text.splitlines():
        if line.startswith("$ ") or continued:
            taken.append(line[2:] if not continued else line)
            continued = line.endswith("\\")
    return "\n".join(taken) + "\n"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder like a checkout, in which plans and profiles may be written."""
    for name in ("trace_aws", "examples"):
        (tmp_path / name).symlink_to(REPOSITORY / name)
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, options in PROGRAMS.items():
        program = programs / name
        program.write_text(f'#!/bin/sh\nexec "{sys.executable}" {options} "$@"\n')
        program.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    ours = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
    monkeypatch.setenv("PYTHONPATH", ours)
    monkeypatch.setenv("ZEUS_HETERO_NOTES", str(tmp_path / "notes"))
    monkeypatch.setenv("ZEUS_HETERO_LOCK_FOLDER", str(tmp_path / "locks"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return tmp_path


def run_page(blocks: list[Block]) -> dict[str, list[str]]:
    """Run blocks in their order; returns which ran, which did not, and which were saved."""
    outcome: dict[str, list[str]] = {"run": [], "not run": [], "saved": []}
    variables: dict[str, object] = {"__name__": "__docs__"}
    for block in blocks:
        if block.kind not in KINDS or block.mark == "not run":
            outcome["not run"].append(f"{block}: {block.value or block.kind or 'no language'}")
            continue
        if block.mark == "file":
            Path(block.value).write_text(block.text, encoding="utf-8")
            outcome["saved"].append(f"{block}: {block.value}")
            continue
        needed = [name.strip() for name in block.value.split(",")] if block.mark else []
        absent = [name for name in needed if importlib.util.find_spec(name) is None]
        if absent:
            outcome["not run"].append(f"{block}: {', '.join(absent)} is not installed")
            continue
        if block.kind == "python":
            # Blank lines in front, so that a traceback has the page's line numbers.
            code = compile("\n" * block.line + block.text, str(block.page), "exec")
            exec(code, variables)
        else:
            run_commands(block)
        outcome["run"].append(str(block))
    return outcome


def run_commands(block: Block) -> None:
    for _ in range(3):
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", commands(block)],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120,
        )  # fmt: skip
        # torch's gloo sometimes aborts a process that has finished, while the interpreter exits:
        # 7 of 75 launches of three ranks. Nothing else is tried again.
        if "terminate called without an active exception" not in done.stdout:
            break
    assert done.returncode == 0, f"{block}:\n{commands(block)}\n{done.stdout[-3000:]}"


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_the_code_blocks_of_a_page_run(page, folder, capsys):
    outcome = run_page(blocks_of(page))
    with capsys.disabled():
        print(f"\n{page.relative_to(REPOSITORY)}: {len(outcome['run'])} blocks run", end="")
        for text in outcome["not run"]:
            print(f"\n    not run: {text}", end="")


def test_every_mark_is_known_and_says_why():
    for block in ALL_BLOCKS:
        assert block.mark in ("", *MARKS), f"{block}: unknown mark {block.mark!r}"
        assert not block.mark or len(block.value) > 3, f"{block}: {block.mark} {block.value!r}"


def test_console_blocks_have_a_prompt():
    for block in ALL_BLOCKS:
        if block.kind in ("console", "bash"):
            assert commands(block).strip(), f"{block}: no line begins with a prompt"


def test_most_pages_have_a_block_that_runs():
    runnable = {b.page for b in ALL_BLOCKS if b.kind in KINDS and b.mark != "not run"}
    without = {str(p.relative_to(REPOSITORY)) for p in PAGES if p not in runnable}
    prose = ("api", "comparison", "concepts", "models", "training")
    assert without == {f"docs/{name}.md" for name in prose}


def test_a_saved_file_is_run_by_a_later_block():
    for block in ALL_BLOCKS:
        if block.mark == "file":
            later = [b for b in ALL_BLOCKS if b.page == block.page and b.line > block.line]
            assert any(block.value in commands(b) for b in later if b.mark != "not run"), block


def test_a_block_that_cannot_run_fails_unless_it_is_marked(folder):
    page = folder / "page.md"

    def run(text: str) -> dict[str, list[str]]:
        page.write_text(text)
        blocks = [
            Block(REPOSITORY / "README.md", b.line, b.kind, b.mark, b.value, b.text)
            for b in blocks_of(page)
        ]
        return run_page(blocks)

    with pytest.raises(ZeroDivisionError):
        run("```python\n1 / 0\n```\n")
    with pytest.raises(AssertionError, match=r"README\.md:1"):
        run("```console\n$ false\n```\n")
    outcome = run("<!-- not run: divides by zero -->\n```python\n1 / 0\n```\n")
    assert outcome["not run"] == ["README.md:2: divides by zero"]
    assert len(run("```python\nx = 1\n```\n\n```python\nassert x == 1\n```\n")["run"]) == 2


def test_the_reference_has_every_public_name():
    text = (REPOSITORY / "docs" / "api.md").read_text(encoding="utf-8")
    listed = re.findall(r"^::: zeus_hetero\.(\w+)$", text, re.MULTILINE)
    assert sorted(listed) == sorted(zeus_hetero.__all__)


def test_pictures_are_small_and_those_of_the_concepts_can_be_drawn_anew(tmp_path):
    pytest.importorskip("matplotlib", reason="pictures need matplotlib")
    concepts = (REPOSITORY / "docs" / "concepts.md").read_text(encoding="utf-8")
    shown = re.findall(r"\(images/(\w+\.png)\)", concepts)
    drawing = REPOSITORY / "docs" / "images" / "draw.py"
    subprocess.run(
        [sys.executable, str(drawing), str(tmp_path)], check=True, timeout=120,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )  # fmt: skip
    drawn = {path.name for path in tmp_path.iterdir()}
    assert set(shown) - {"pareto.png"} == drawn
    for name in shown:
        assert (REPOSITORY / "docs" / "images" / name).stat().st_size < 60_000, name


@pytest.mark.slow
def test_the_site_builds_strictly(tmp_path):
    for module in ("mkdocs", "material", "mkdocstrings"):
        pytest.importorskip(module, reason=f"the extra 'docs' is not installed: no {module}")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)],
        cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=200,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:]
    assert "WARNING" not in done.stdout
    reference = (tmp_path / "api" / "index.html").read_text(encoding="utf-8")
    for name in zeus_hetero.__all__:
        assert f'id="zeus_hetero.{name}"' in reference, name
    # Readers behind a firewall, and readers who like not to be watched.
    for page in tmp_path.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        loaded = re.findall(r'<(?:script|img)[^>]* src="(https?://[^"]+)"', text)
        loaded += re.findall(r'<link[^>]* href="(https?://[^"]+)"', text)
        assert loaded == [], page
