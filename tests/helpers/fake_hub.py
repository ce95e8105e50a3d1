"""A server that speaks as much of the Hub's HTTP API as huggingface_hub's own client uses, on the loopback address.

Repositories live in memory. Faults are planned: ``hub.fail(path_part, status, times)`` answers the next requests whose
path has that part with a status; status ``CUT`` sends half of the body and drops the connection.
"""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

CUT = -1
LFS_BYTES = 10_000  # files of this size and more are LFS files


@dataclass
class HostedRepo:
    """A repository: files by branch, who may read it."""

    files: dict[str, bytes] = field(default_factory=dict)
    branches: dict[str, dict[str, bytes]] = field(default_factory=dict)
    private: bool = False
    gated: bool = False

    def at(self, revision: str) -> dict[str, bytes] | None:
        if revision in ("main", commit_of(self.files)):
            return self.files
        return next((f for n, f in self.branches.items() if revision in (n, commit_of(f))), None)


def commit_of(files: dict[str, bytes]) -> str:
    digest = hashlib.sha1()
    for name in sorted(files):
        digest.update(name.encode() + b"\0" + hashlib.sha1(files[name]).digest())
    return digest.hexdigest()


class FakeHub:
    """The server, its repositories, and a log of the requests it got."""

    token = "hf_right"

    def __init__(self) -> None:
        self.repos: dict[str, HostedRepo] = {}
        self.lfs: dict[str, bytes] = {}
        self.requests: list[str] = []
        self.ranges: list[str] = []
        self.sizes: dict[str, object] = {}  # by name of the file: what is said instead of the truth
        self.longest: int | None = None  # bytes that a request for a range is answered with at most
        self.info: dict[str, object] = {}  # what else of a repository is said otherwise
        self._faults: list[list] = []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self}))
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def fail(self, path_part: str, status: int, times: int = 1, message: str = "planned") -> None:
        self._faults.append([path_part, status, times, message])

    def fault(self, path: str) -> tuple[int, str] | None:
        for planned in self._faults:
            if planned[0] in path and planned[2] > 0:
                planned[2] -= 1
                return planned[1], planned[3]
        return None

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    hub: FakeHub
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else a body waits 40 ms for the client to acknowledge the headers

    def log_message(self, *_: object) -> None:
        """Silent."""

    def do_GET(self) -> None:
        self._handle(b"")

    def do_HEAD(self) -> None:
        self._handle(b"")

    def do_POST(self) -> None:
        self._handle(self._body())

    def do_PUT(self) -> None:
        self._handle(self._body())

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            parts = []
            while size := int(self.rfile.readline(), 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def _handle(self, body: bytes) -> None:
        split = urlsplit(self.path)
        path, query = unquote(split.path), parse_qs(split.query)
        self.hub.requests.append(f"{self.command} {path}")
        planned = self.hub.fault(path)
        if planned and planned[0] != CUT:
            return self._json(planned[0], {"error": planned[1]}, {"X-Error-Message": planned[1]})
        self.cut = planned is not None
        parts = path.strip("/").split("/")
        if parts[0] == "api":
            return self._api(parts[1:], query, body)
        if parts[0] == "lfs-put":
            self.hub.lfs[parts[1]] = body
            return self._json(200, {})
        if path.endswith(".git/info/lfs/objects/batch"):
            return self._lfs_batch(json.loads(body))
        if len(parts) > 4 and parts[2] == "resolve":
            return self._resolve("/".join(parts[:2]), parts[3], "/".join(parts[4:]))
        return self._json(404, {"error": "no such route"})

    def _api(self, parts: list[str], query: dict[str, list[str]], body: bytes) -> None:
        if parts == ["repos", "create"]:
            return self._create(json.loads(body))
        if parts == ["validate-yaml"]:
            return self._json(200, {"errors": [], "warnings": []})
        if parts[0] != "models":
            return self._json(404, {"error": "no such route"})
        name, rest = "/".join(parts[1:3]), parts[3:]
        repo = self._allowed(name)
        if repo is None:
            return None
        if not rest or rest[0] == "revision":
            return self._info(name, repo, "/".join(rest[1:]) or "main", "blobs" in query)
        if rest[0] == "tree":
            return self._tree(repo, rest[1])
        if rest[0] == "branch":
            repo.branches.setdefault("/".join(rest[1:]), dict(repo.files))
            return self._json(200, {})
        if rest[0] == "preupload":
            return self._preupload(json.loads(body))
        if rest[0] == "commit":
            return self._commit(name, repo, "/".join(rest[1:]), body, "create_pr" in query)
        return self._json(404, {"error": "no such route"})

    def _allowed(self, name: str) -> HostedRepo | None:
        """The repository, if this request may see it; else the refusal has been sent."""
        repo = self.hub.repos.get(name)
        authorised = self.headers.get("Authorization") == f"Bearer {self.hub.token}"
        if repo is None or (repo.private and not authorised):
            self._json(404, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"})
            return None
        if repo.gated and not authorised:
            self._json(403, {"error": "gated"}, {"X-Error-Code": "GatedRepo"})
            return None
        return repo

    def _create(self, asked: dict) -> None:
        if self.headers.get("Authorization") != f"Bearer {self.hub.token}":
            return self._json(401, {"error": "Invalid username or password."})
        name = "/".join(filter(None, (asked.get("organization"), asked["name"])))
        url = f"{self.hub.url}/{name}"
        if name in self.hub.repos:
            return self._json(409, {"error": "You already created this model repo", "url": url})
        private = asked.get("private") or asked.get("visibility") == "private"
        self.hub.repos[name] = HostedRepo(private=bool(private))
        return self._json(200, {"url": url, "name": name})

    def _info(self, name: str, repo: HostedRepo, revision: str, blobs: bool) -> None:
        files = repo.at(revision)
        if files is None:
            return self._json(404, {"error": "Revision not found"}, {"X-Error-Code": "RevisionNotFound"})
        siblings = []
        for file, data in sorted(files.items()):
            entry: dict = {"rfilename": file}
            if blobs:
                entry |= {"size": self.hub.sizes.get(file, len(data)), "blobId": hashlib.sha1(data).hexdigest()}
                if len(data) >= LFS_BYTES:
                    entry["lfs"] = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}
            siblings.append(entry)
        told = {"id": name, "modelId": name, "sha": commit_of(files), "siblings": siblings, "tags": []}
        return self._json(200, told | self.hub.info)

    def _tree(self, repo: HostedRepo, revision: str) -> None:
        files = repo.at(revision) or {}
        entries = []
        for file, data in sorted(files.items()):
            entry = {"type": "file", "path": file, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
            if len(data) >= LFS_BYTES:
                entry["lfs"] = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}
            entries.append(entry)
        return self._json(200, entries)

    def _resolve(self, name: str, revision: str, file: str) -> None:
        repo = self._allowed(name)
        if repo is None:
            return None
        files = repo.at(revision)
        if files is None or file not in files:
            code = "RevisionNotFound" if files is None else "EntryNotFound"
            return self._json(404, {"error": "not found"}, {"X-Error-Code": code})
        data, status, headers = files[file], 200, {}
        lfs = len(data) >= LFS_BYTES
        etag = hashlib.sha256(data).hexdigest() if lfs else hashlib.sha1(data).hexdigest()
        headers = {"ETag": f'"{etag}"', "X-Repo-Commit": commit_of(files), "Accept-Ranges": "bytes"}
        if asked := self.headers.get("Range"):
            self.hub.ranges.append(asked)
            first, last = asked.removeprefix("bytes=").split("-")
            stop = min(int(last) + 1 if last else len(data), len(data))
            headers["Content-Range"] = f"bytes {first}-{stop - 1}/{len(data)}"
            data, status = data[int(first) : stop][: self.hub.longest], 206
        return self._send(status, data, headers)

    def _preupload(self, asked: dict) -> None:
        files = [
            {"path": f["path"], "uploadMode": "lfs" if f["size"] >= LFS_BYTES else "regular", "shouldIgnore": False}
            for f in asked["files"]
        ]
        return self._json(200, {"files": files})

    def _lfs_batch(self, asked: dict) -> None:
        objects = []
        for item in asked["objects"]:
            entry = dict(item)
            if item["oid"] not in self.hub.lfs:
                entry["actions"] = {"upload": {"href": f"{self.hub.url}/lfs-put/{item['oid']}"}}
            objects.append(entry)
        return self._json(200, {"transfer": "basic", "objects": objects})

    def _commit(self, name: str, repo: HostedRepo, branch: str, body: bytes, pull_request: bool) -> None:
        if self.headers.get("Authorization") != f"Bearer {self.hub.token}":
            return self._json(401, {"error": "Invalid username or password."})
        if pull_request:
            branch = "refs/pr/1"
            repo.branches.setdefault(branch, dict(repo.files))
        files = repo.at(branch)
        if files is None:
            return self._json(404, {"error": "no branch"}, {"X-Error-Code": "RevisionNotFound"})
        for line in body.splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif entry["key"] == "lfsFile":
                files[value["path"]] = self.hub.lfs[value["oid"]]
            elif entry["key"] == "deletedFile":
                files.pop(value["path"], None)
        oid = commit_of(files)
        answer = {"commitOid": oid, "commitUrl": f"{self.hub.url}/{name}/commit/{oid}", "success": True}
        if pull_request:
            answer["pullRequestUrl"] = f"{self.hub.url}/{name}/discussions/1"
        return self._json(200, answer)

    def _json(self, status: int, value: object, headers: dict[str, str] | None = None) -> None:
        self._send(status, json.dumps(value).encode(), {"Content-Type": "application/json", **(headers or {})})

    def _send(self, status: int, data: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            if getattr(self, "cut", False):
                self.wfile.write(data[: len(data) // 2])
                self.wfile.flush()
                self.close_connection = True
                self.connection.shutdown(2)
                return
            self.wfile.write(data)


CARD = "---\nlicense: mit\nlanguage:\n- en\ntags:\n- tiny\n---\n# Tiny\n"


@contextmanager
def hosting(name: str, weights: Path) -> Iterator[FakeHub]:
    """A server that has one repository, of this file and an empty config."""
    server = FakeHub()
    server.repos[name] = HostedRepo({"model.safetensors": weights.read_bytes(), "config.json": b"{}"})
    try:
        yield server
    finally:
        server.close()


def tiny_repo() -> HostedRepo:
    """A model of two weights that are quantized and a norm, with a card and a file that is not for kbitq."""
    import torch
    from safetensors.torch import save

    generator = torch.Generator().manual_seed(5)
    weights = {f"layers.{i}.mlp.up_proj.weight": torch.randn(96, 160, generator=generator) for i in range(2)}
    weights["norm.weight"] = torch.ones(160)
    files = {
        "model.safetensors": save(weights, metadata={"format": "pt"}),
        "config.json": json.dumps({"model_type": "llama"}).encode(),
        "README.md": CARD.encode(),
        "pytorch_model.bin": b"\x80pickle" * 2000,
    }
    return HostedRepo(files)
