"""A headless Chromium, driven through chromedriver's own protocol (W3C WebDriver over HTTP)."""

import base64
import json
import subprocess
import time
import urllib.request
from pathlib import Path
from typing import Any

FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
]  # fmt: skip
PATIENCE = 30.0  # seconds


class Browser:
    """One session. Everything that the page said on the console is in ``console()``."""

    def __init__(self, driver: str, chromium: str, profile: Path, *flags: str) -> None:
        self._process = subprocess.Popen([driver, "--port=0"], stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        port = next(line.split()[-1].rstrip(".") for line in self._process.stdout if "successfully on port" in line)
        self._open = urllib.request.build_opener(urllib.request.ProxyHandler({})).open
        self._url = f"http://127.0.0.1:{port}/session"
        options = {"binary": chromium, "args": [*FLAGS, f"--user-data-dir={profile}", *flags]}
        wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        made = self._call("POST", "", {"capabilities": {"alwaysMatch": wanted}})
        self._url += "/" + made["sessionId"]

    def __enter__(self) -> "Browser":
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._call("DELETE", "")
        finally:
            self._process.terminate()
            self._process.communicate()  # closes the pipe too

    def open(self, page: Path) -> None:
        """Open a file and wait until its charts are drawn."""
        self._call("POST", "/url", {"url": page.as_uri()})
        self.ready()

    def ready(self) -> None:
        """Wait until the page's charts are drawn."""
        deadline = time.monotonic() + PATIENCE
        while not self.run("return document.documentElement.dataset.ready === 'true'"):
            assert time.monotonic() < deadline, f"the page is not ready: {self.console()}"
            time.sleep(0.05)

    def run(self, script: str, *arguments: Any) -> Any:
        """The value of a script's ``return``."""
        return self._call("POST", "/execute/sync", {"script": script, "args": list(arguments)})

    def console(self) -> list[str]:
        return [f"{e['level']}: {e['message']}" for e in self._call("POST", "/se/log", {"type": "browser"})]

    def resize(self, width: int, height: int) -> None:
        """The size of what a page is drawn on, smaller than a window can be if need be."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        self._call("POST", "/goog/cdp/execute", {"cmd": "Emulation.setDeviceMetricsOverride", "params": metrics})

    def screenshot(self, width: int, height: int) -> bytes:
        """A PNG."""
        self._call("POST", "/window/rect", {"width": width, "height": height})
        return base64.b64decode(self._call("GET", "/screenshot"))

    def _call(self, method: str, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, data, {"Content-Type": "application/json"}, method=method)
        with self._open(request, timeout=PATIENCE) as answer:
            return json.load(answer)["value"]
