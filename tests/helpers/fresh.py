"""Processes of their own that are there at once: forked from one that has imported torch and numpy, no more.

Importing torch takes two seconds of a core, and two more go into the parts of it, SymPy and SciPy that a model of
transformers needs; the tests start a hundred processes. What such a process sees is what ``python -m MODULE`` or
``python -c CODE`` would see, but for those packages: neither kbitq nor a guest of it (transformers, accelerate, PEFT,
huggingface_hub) is there. It ends without taking its modules apart. Tests of the start itself
(``tests/cli/test_startup.py``) use ``subprocess``.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

TIMEOUT = 120.0  # seconds
BEFORE = (
    "numpy", "torch", "torch._dynamo", "torch._inductor.test_operators", "torch.distributed.fsdp",
    "torch.distributed.tensor", "torch.distributed.checkpoint", "torch.distributed.elastic.agent.server.api",
    "torch.nested", "scipy.optimize", "sympy", "jinja2", "httpx2", "httpcore2", "anyio._backends._asyncio",
    "filelock", "fsspec", "packaging.version", "psutil", "regex", "safetensors.torch", "tokenizers", "tqdm",
    "truststore", "yaml",
)  # fmt: skip
"""What has been imported in a fresh process: packages that know nothing of kbitq and that kbitq changes nothing of."""


class Finished(NamedTuple):
    """How a process ended: like ``subprocess.CompletedProcess``, the code negative for a signal."""

    returncode: int
    stdout: str
    stderr: str


class Process:
    """``python *arguments``, which begin with ``-m MODULE`` or ``-c CODE``, on the given file descriptors."""

    def __init__(
        self,
        arguments: tuple[str, ...],
        descriptors: tuple[int, int, int],
        cwd: str | Path | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self._channel = _server()
        job = {"arguments": arguments, "cwd": str(cwd or Path.cwd()), "env": dict(os.environ if env is None else env)}
        socket.send_fds(self._channel, [json.dumps(job).encode()], descriptors)
        self.pid = self._told("begun", TIMEOUT)[0]

    def wait(self, timeout: float = TIMEOUT) -> int:
        """Its exit code; ``subprocess.TimeoutExpired`` if it is still running after ``timeout`` seconds."""
        pid, code = 0, 0
        while pid != self.pid:
            pid, code = self._told("ended", timeout)
        return code

    def kill(self) -> None:
        """End it, if it has not ended by itself meanwhile, and wait for that."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self.wait()

    def _told(self, what: str, timeout: float) -> list[int]:
        """The numbers of the next message of a kind. A test that failed may have left others unread: its end, which
        must not be taken for the number of a process, since signals go there."""
        self._channel.settimeout(timeout)
        try:
            while (message := json.loads(self._channel.recv(100)))[0] != what:
                pass
        except TimeoutError:
            raise subprocess.TimeoutExpired("a fresh process", timeout) from None
        numbers: list[int] = message[1:]
        return numbers


def run(
    *arguments: object,
    cwd: str | Path | None = None,
    env: Mapping[str, str] | None = None,
    stdin: int | None = None,
    timeout: float = TIMEOUT,
) -> Finished:
    """Run ``python *arguments`` to its end; stdin is empty by default."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err, Path(os.devnull).open() as nothing:
        descriptors = (nothing.fileno() if stdin is None else stdin, out.fileno(), err.fileno())
        process = Process(tuple(str(argument) for argument in arguments), descriptors, cwd, env)
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        out.seek(0)
        err.seek(0)
        return Finished(code, out.read().decode(), err.read().decode())


@functools.cache
def _server() -> socket.socket:
    """One for each process that runs tests. It ends when this end of the channel is closed, at the latest with us."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with theirs:
        server = subprocess.Popen(
            [sys.executable, __file__, str(theirs.fileno())], pass_fds=[theirs.fileno()], env=environment
        )

    def stop() -> None:
        ours.close()
        server.wait()

    atexit.register(stop)
    return ours


def _serve(channel: socket.socket) -> dict[str, Any]:
    """Fork for each job; returns the job in the child."""
    for package in BEFORE:
        with contextlib.suppress(ImportError):  # torch without a part of it: what needs the part imports it, or says so
            importlib.import_module(package)
    gc.freeze()  # a process need not search them all for garbage while it imports more
    while True:
        message, descriptors, _, _ = socket.recv_fds(channel, 1 << 20, 3)
        if not message:
            os._exit(0)
        child = os.fork()
        if child == 0:
            channel.close()
            for place, descriptor in enumerate(descriptors):
                os.dup2(descriptor, place)
                os.close(descriptor)
            job: dict[str, Any] = json.loads(message)
            return job
        for descriptor in descriptors:
            os.close(descriptor)
        channel.send(json.dumps(["begun", child]).encode())
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        channel.send(json.dumps(["ended", child, code]).encode())


def _become(job: dict[str, Any]) -> None:
    """What Python does at its start, once more."""
    os.environ.clear()
    os.environ.update(job["env"])
    os.chdir(job["cwd"])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for place, name in ((1, "stdout"), (2, "stderr")):
        old = getattr(sys, name)
        lines = 1 if place == 2 or os.isatty(place) else -1
        new = open(place, "w", lines, encoding=old.encoding, errors=old.errors, closefd=False)  # noqa: SIM115
        setattr(sys, name, new)
        setattr(sys, f"__{name}__", new)
    how, what, *rest = job["arguments"]
    sys.path[0] = job["cwd"] if how == "-m" else ""
    sys.argv = [how, *rest]
    if how == "-m":
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    else:
        exec(compile(what, "<string>", "exec"), {"__name__": "__main__", "__builtins__": __builtins__})


def _end(code: int) -> None:
    """What Python does at its end, but for taking every module apart: a third of a second of a core, more than most of
    these processes work."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code & 0xFF)


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as inherited:
        task = _serve(inherited)
    code: Any = 0
    try:
        _become(task)
    except SystemExit as asked:
        if not isinstance(asked.code, int | None):  # a message, which Python prints
            raise
        code = asked.code
    try:
        _end(code or 0)
    except OSError:  # nobody takes what is left to say: Python has words for that, and a code
        raise SystemExit(code) from None
