"""The code blocks of a Markdown page, as programs that can be run.

A block is fenced, and its language is one of ``LANGUAGES``. HTML comments right above it say more:

    <!-- continues -->              it goes on from the block before it: same folder, and for Python same process
    <!-- on all-MiniLM-L6-v2 -->    its ``model.safetensors`` is that model's, so the output shown can be compared
    <!-- not run: REASON -->        it cannot be run where tests are
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

LANGUAGES = ("bash", "console", "python", "toml", "text")
CONTINUES, ON_MINILM, NOT_RUN = "continues", "on all-MiniLM-L6-v2", "not run: "
_COMMENT = re.compile(r"<!-- (.*?) -->")
_COMMAND = re.compile(r"(\$ |(kbitq|pip|make|python3?|\.ci/run) \S)")


class PageError(Exception):
    """A page has a block that nothing can be made of; the message says where."""


@dataclass(frozen=True)
class Block:
    """A fenced block. ``line`` is where it begins, counted from 1; ``marks`` are the comments above it."""

    page: str
    line: int
    language: str
    code: str
    marks: tuple[str, ...] = ()

    @property
    def place(self) -> str:
        """Where it stands, as ``docs/cli.md:76``."""
        return f"{self.page}:{self.line}"

    @property
    def why_not(self) -> str:
        """Why it is not run; empty if it is."""
        if self.language == "text":
            return "text"
        return next((m.removeprefix(NOT_RUN) for m in self.marks if m.startswith(NOT_RUN)), "")


@dataclass(frozen=True)
class Command:
    """A line for the shell, and the output that the page shows for it (None: it shows none)."""

    line: str
    output: str | None = None


def blocks(path: Path, page: str) -> list[Block]:
    """The blocks of a page. Raises PageError for one of no known language, and for commands outside of blocks."""
    found: list[Block] = []
    marks: list[str] = []
    lines = iter(enumerate(path.read_text(encoding="utf-8").splitlines(), 1))
    for number, line in lines:
        fence = re.match(r"(\s*)```(.*)$", line)
        if fence is None:
            if line.startswith("    ") and _COMMAND.match(line.strip()):
                raise PageError(f"{page}:{number}: a command stands in an indented block; fence it, so that it is run")
            comments = _COMMENT.findall(line)
            marks = marks + comments if comments or not line.strip() else []
            continue
        body = []
        for _, text in lines:
            if text.strip() == "```":
                break
            body.append(text.removeprefix(fence[1]))
        else:
            raise PageError(f"{page}:{number}: the block has no end")
        found.append(_checked(Block(page, number, fence[2].strip(), "\n".join(body) + "\n", tuple(marks))))
        marks = []
    return found


def _checked(block: Block) -> Block:
    if block.language not in LANGUAGES:
        said = f"the language {block.language!r}" if block.language else "no language"
        raise PageError(f"{block.place}: the block has {said}; known are {', '.join(LANGUAGES)}")
    if block.language == "text" and any(_COMMAND.match(line) for line in block.code.splitlines()):
        raise PageError(f"{block.place}: a block of text holds a command, which would not be run")
    if any(mark.strip() == NOT_RUN.strip() for mark in block.marks):
        raise PageError(f"{block.place}: 'not run' needs a reason")
    if block.language == "console" and ON_MINILM not in block.marks and any(c.output for c in commands(block)):
        raise PageError(f"{block.place}: output is shown, but not of which model: <!-- {ON_MINILM} -->")
    return block


def programs(found: list[Block]) -> list[list[Block]]:
    """The blocks by program: one, and those that continue it."""
    made: list[list[Block]] = []
    for block in found:
        if CONTINUES not in block.marks:
            made.append([block])
        elif made:
            made[-1].append(block)
        else:
            raise PageError(f"{block.place}: the first block of a page continues nothing")
    return made


def commands(block: Block) -> list[Command]:
    """What a block says to a shell: each line of ``bash``, and each line after ``$ `` of ``console``."""
    if block.language == "bash":
        joined = re.sub(r"\\\n\s*", "", block.code)
        return [Command(line) for line in joined.splitlines() if line.strip() and not line.startswith("#")]
    made: list[Command] = []
    for line in block.code.splitlines():
        if line.startswith("$ "):
            made.append(Command(line[2:]))
        elif made:
            shown = line if made[-1].output is None else f"{made[-1].output}\n{line}"
            made[-1] = Command(made[-1].line, shown)
        else:
            raise PageError(f"{block.place}: a block of console begins with '$ '")
    return [Command(c.line, c.output.strip("\n") if c.output else None) for c in made]
