"""Every code block of README.md and docs/ does what the page says, each program in a process of its own."""

import re
import shlex
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path

import pytest
import typer
import typer.core

pytest.importorskip("transformers", reason="transformers is not installed")

from helpers.fake_hub import FakeHub, HostedRepo
from helpers.page_sandbox import HUB_MODEL, INSTEAD, Sandbox, run_program
from helpers.pages import Block, PageError, blocks, programs

ROOT = Path(__file__).resolve().parents[2]
PAGES = ["README.md", *sorted(p.relative_to(ROOT).as_posix() for p in ROOT.glob("docs/*.md"))]


def read(page: str) -> tuple[list[list[Block]], list[str]]:
    """The programs of a page, or why it is refused: said by a test, so that one wrong page does not hide the others."""
    try:
        return programs(blocks(ROOT / page, page)), []
    except PageError as error:
        return [], [str(error)]


READ = [read(page) for page in PAGES]
PROGRAMS = [program for found, _ in READ for program in found]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the models of the pages are kept from one program to the next."""
    return tmp_path_factory.mktemp("made")


@pytest.fixture
def sandbox(made: Path, tmp_path: Path) -> Sandbox:
    folder = tmp_path / "reader"
    folder.mkdir()
    return Sandbox(folder, made)


@pytest.fixture
def hub(sandbox: Sandbox) -> Iterator[FakeHub]:
    """A Hub with one model, which the sandbox's programs know."""
    fake = FakeHub()
    files = {p.name: p.read_bytes() for p in sandbox.ready(HUB_MODEL).iterdir()}
    fake.repos[HUB_MODEL] = HostedRepo(files=files)
    sandbox.environment |= {"HF_ENDPOINT": fake.url, "HF_TOKEN": fake.token}
    yield fake
    fake.close()


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program[0].place)
def test_what_the_pages_show(program: list[Block], sandbox: Sandbox, hub: FakeHub) -> None:
    program = [block for block in program if not block.why_not]
    if not program:
        pytest.skip("not run: it is text, or the page says why")
    assert run_program(program, sandbox) == []


def test_every_block_can_be_run() -> None:
    assert [problem for _, problems in READ for problem in problems] == []


def test_the_pages_are_found() -> None:
    languages = {block.language for program in PROGRAMS for block in program}
    assert {"bash", "console", "python", "toml"} <= languages
    assert {"README.md", "docs/python.md", "docs/transformers.md", "docs/quality.md", "docs/cli.md"} <= {
        program[0].page for program in PROGRAMS
    }


def test_every_substitution_is_used() -> None:
    code = "\n".join(f"{block.code}\n{block.marks}" for program in PROGRAMS for block in program)
    spare = {name for name in INSTEAD if not re.search(rf"(?<![\w.-]){re.escape(name)}(?![\w.-])", code)}
    assert spare == set()
    assert all(why for _, why in INSTEAD.values())


# -- what a wrong page leads to ----------------------------------------------------------------------------------------


def page(tmp_path: Path, text: str) -> list[list[Block]]:
    path = tmp_path / "page.md"
    path.write_text(text)
    return programs(blocks(path, "page.md"))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("```python\nimport kbitq\nprint(kbitq.no_such_name)\n```\n", "no_such_name"),
        ("```python\nx = 1\n```\n\n```python\nprint(x)\n```\n", "name 'x' is not defined"),
        ("```bash\nkbitq quantize model.safetensors --bits-of-nothing 4\n```\n", "--bits-of-nothing"),
        ("```bash\nkbitq inspect nothing.safetensors | head -3\n```\n", "page.md:1: 'kbitq inspect nothing"),
        ("```bash\nmake no-such-target\n```\n", "no-such-target"),
        ("```bash\npip install 'kbitq[no-such-extra]'\n```\n", "no extra no-such-extra"),
        ('```toml\nk = 3\n\n[[rule]]\nmatch = "*.no_such.weight"\nk = 4\n```\n', "no_such"),
        (
            "<!-- on all-MiniLM-L6-v2 -->\n```console\n$ echo 21.9 dB\n22.9 dB\n```\n",
            "does not show what the page shows, but\n21.9 dB",
        ),
    ],
    ids=["python", "not-continued", "option", "pipe", "target", "extra", "recipe", "output"],
)
def test_a_wrong_block_is_found(text: str, problem: str, sandbox: Sandbox, tmp_path: Path) -> None:
    found = [p for program in page(tmp_path, text) for p in run_program(program, sandbox)]
    assert len(found) == 1 and problem in found[0], found


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("```\nx\n```\n", "page.md:1: the block has no language"),
        ("text\n\n```shell\nx\n```\n", "page.md:3: the block has the language 'shell'"),
        ("```text\n$ kbitq env\n```\n", "page.md:1: a block of text holds a command"),
        ("    kbitq env\n", "page.md:1: a command stands in an indented block"),
        ("<!-- not run: -->\n```bash\nx\n```\n", "page.md:2: 'not run' needs a reason"),
        ("<!-- continues -->\n```bash\nx\n```\n", "page.md:2: the first block"),
        ("```bash\nx\n", "page.md:1: the block has no end"),
        ("```console\nx\n```\n", "begins with"),
        ("```console\n$ x\ny\n```\n", "not of which model"),
    ],
)
def test_a_block_that_says_nothing_is_refused(text: str, problem: str, tmp_path: Path) -> None:
    with pytest.raises(PageError, match=re.escape(problem)):
        for program in page(tmp_path, text):
            for block in program:
                from helpers.pages import commands

                commands(block)


def test_blocks_that_continue_are_one_program(sandbox: Sandbox, tmp_path: Path) -> None:
    text = "```python\nx = 1\n```\n<!-- continues -->\n```python\nassert x == 1\nopen('a', 'w').close()\n```\n"
    shell = "<!-- continues -->\n```bash\ntest -e a\n# a comment\necho 1 \\\n  2 > b\n```\n"
    made = page(tmp_path, text + shell)
    assert [len(program) for program in made] == [3]
    assert run_program(made[0], sandbox) == []
    assert (sandbox.folder / "b").read_text() == "1 2\n"


# -- commands within sentences -----------------------------------------------------------------------------------------


def spoken(page: str) -> list[str]:
    """`code` in the text of a page, outside of blocks."""
    text = re.sub(r"^```.*?^```", "", (ROOT / page).read_text(), flags=re.MULTILINE | re.DOTALL)
    return [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", text)]


def unknown(root: typer.core.TyperGroup, words: list[str]) -> list[str]:
    """Of a command line of kbitq: its command or its options, where there are none of that name."""
    if words[0] not in root.commands:
        return words[:1]
    if words[0] == "run":  # what follows the name of a program is the program's
        words = ["run", *takewhile(lambda word: word.startswith("-"), words[1:])]
    known = {o for p in root.commands[words[0]].params for o in (*p.opts, *p.secondary_opts)}
    return [word for word in words if re.match(r"--?[a-z]", word) and word.split("=")[0] not in known]


@pytest.fixture(scope="module")
def root() -> typer.core.TyperGroup:
    from kbitq.cli.app import app

    return typer.main.get_command(app)


@pytest.mark.parametrize("page", [*PAGES, "CONTRIBUTING.md"])
def test_commands_in_sentences_exist(page: str, root: typer.core.TyperGroup) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for span in spoken(page):
        word, *rest = span.split()
        if word == "kbitq" and rest and re.match("[a-z]", rest[0]):
            assert unknown(root, rest) == [], span
        elif word == "make" and rest:
            assert rest[0] in targets, span
        elif word == "python" and rest and rest[0].endswith(".py"):
            assert (ROOT / rest[0]).is_file(), span


def test_examples_of_help_exist(root: typer.core.TyperGroup) -> None:
    lines = [line.strip() for made in root.commands.values() for line in made.epilog.splitlines() if "  kbitq" in line]
    assert len(lines) > 20
    assert {line: wrong for line in lines if (wrong := unknown(root, shlex.split(line, comments=True)[1:]))} == {}


def test_a_wrong_command_is_found(root: typer.core.TyperGroup) -> None:
    assert unknown(root, ["quantise", "--k", "4"]) == ["quantise"]
    assert unknown(root, ["run", "--no-such", "lm_eval", "--model", "hf"]) == ["--no-such"]
    assert unknown(root, ["quantize", "a", "--k=4", "-o", "b", "--bits", "4"]) == ["--bits"]


def test_links_lead_to_headings_that_exist() -> None:
    for page in PAGES:
        for file, anchor in re.findall(r"\]\(([^)#:]*)#([^)]+)\)", (ROOT / page).read_text()):
            target = (ROOT / page).parent / file if file else ROOT / page
            headings = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in headings}, (page, anchor)
