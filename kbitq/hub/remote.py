"""A repository of the Hub as the source of a checkpoint: copied into the Hub's cache, or read by byte ranges."""

from __future__ import annotations

import re
from dataclasses import replace
from glob import escape
from pathlib import Path, PurePosixPath
from typing import Any

from huggingface_hub import HfApi, hf_hub_url, snapshot_download
from huggingface_hub.errors import HFValidationError, OfflineModeIsEnabled
from huggingface_hub.utils import build_hf_headers, hf_raise_for_status, http_backoff

from kbitq.checkpoint.source.gguf_storage import gguf_files, gguf_pattern, no_such_file
from kbitq.checkpoint.source.side_files import OTHER_WEIGHTS_SUFFIXES, PICKLE_SUFFIXES
from kbitq.checkpoint.source.storage import ByteFile, Fingerprint
from kbitq.errors import CheckpointError
from kbitq.hub.problems import HubError, check_token, explained
from kbitq.hub.repo import Repo
from kbitq.text_safety import shown

IGNORED_SUFFIXES = tuple(sorted(PICKLE_SUFFIXES | OTHER_WEIGHTS_SUFFIXES))
"""Files that are neither downloaded nor seen in a stream: pickles, and weights in other tools' formats.

GGUF files are where they are the model: ``_wanted``.
"""

REQUEST_BYTES = 16 << 20
"""Bytes asked for at a time: a cut connection costs at most this much again."""

_RETRIES, _LONGEST_WAIT_SECONDS, _TIMEOUT_SECONDS = 6, 30.0, 60.0
_LEAST_PROGRESS_BYTES = 1 << 16  # an answer that brings less than this, and less than was asked for, is a failure


_DISTRUST = "do not trust this repository"


class HubFile:
    """A file of a repository, read by HTTP ranges; each request is tried again, waiting longer every time."""

    def __init__(self, repo: Repo, name: str, commit: str, size: int, token: str) -> None:
        self.where = f"{replace(repo, file=None)}/{name}"
        self.size = size
        self._url = hf_hub_url(repo.id, name, revision=commit)
        self._token = token

    def read_into(self, buffer: memoryview, offset: int) -> None:
        done = failures = 0
        while done < len(buffer):
            count = min(REQUEST_BYTES, len(buffer) - done)
            data = self._range(offset + done, count)
            buffer[done : done + len(data)] = data
            done += len(data)
            failures = failures + 1 if len(data) < min(count, _LEAST_PROGRESS_BYTES) else 0
            if failures > _RETRIES:
                raise HubError(
                    f"{self.where}: the server answered {failures} requests in a row with too little, the last one, "
                    f"for {count:,} bytes, with {len(data):,}",
                    hint="run it again, which goes on where it stopped, or download the repository",
                    remedy="stream-short",
                )

    def _range(self, start: int, count: int) -> bytes:
        headers = {**build_hf_headers(), "Range": f"bytes={start}-{start + count - 1}", "Accept-Encoding": "identity"}
        with explained(self.where):
            response = http_backoff(
                "GET",
                self._url,
                headers=headers,
                timeout=_TIMEOUT_SECONDS,
                max_retries=_RETRIES,
                max_wait_time=_LONGEST_WAIT_SECONDS,
                follow_redirects=True,
            )
            hf_raise_for_status(response)
        data = response.content
        whole = response.status_code == 200 and len(data) == self.size
        if whole:  # a server that ignores ranges; what it sent is still right
            data = data[start : start + count]
        if not data or len(data) > count or (response.status_code != 206 and not whole):
            raise CheckpointError(
                f"{self.where}: the server answered a request for {count} bytes with {len(data)}",
                hint="download the repository and read the copy",
                remedy="no-stream",
            )
        return data

    def fingerprint(self) -> Fingerprint:
        return Fingerprint(self.size, self._token)

    def close(self) -> None:
        """Nothing is held open between requests."""


class HubStorage:
    """The files of one commit of a repository that :func:`download` would copy, as a Storage; none of them is kept.

    Raises HubError if the repository or revision cannot be read.
    """

    single = None
    distant = True

    def __init__(self, repo: Repo) -> None:
        self.repo, self.where = repo, str(replace(repo, file=None))
        self.name = repo.id.rpartition("/")[2]
        check_token(needed=False)
        with explained(str(repo)):
            info = HfApi().model_info(repo.id, revision=repo.revision, files_metadata=True)
            self.commit = _checked_commit(repo, info.sha)
            self.label = f"{repo.id}@{self.commit}"
            self.address = str(replace(repo, revision=self.commit))  # opens the same files again
            self._files: dict[str, tuple[int, str]] = {}
            listed = [file.rfilename for file in info.siblings or []]
            wanted = set(_wanted(repo, [_confined(repo, name) for name in listed]))
            for file in info.siblings or []:
                if (name := file.rfilename) not in wanted:
                    continue
                digest = file.lfs.sha256 if file.lfs else file.blob_id
                self._files[name] = (_checked_size(repo, name, file.size), str(digest or self.commit))

    def names(self) -> list[str]:
        return sorted(self._files)

    def skipped(self) -> list[str]:
        return []

    def open(self, name: str) -> ByteFile:
        if name not in self._files:
            raise CheckpointError(f"{self.where}/{name} is missing")
        size, token = self._files[name]
        return HubFile(self.repo, name, self.commit, size, token)


def _wanted(repo: Repo, listed: list[str]) -> list[str]:
    """The files of a repository that are read: a GGUF file that was named with the rest of its set, or everything.

    GGUF files are part of everything where they are one model and the repository has no other weights.
    """
    models = gguf_files(str(replace(repo, file=None)), listed, repo.file)
    if repo.file is not None:
        return models
    return models + [name for name in listed if not name.endswith(IGNORED_SUFFIXES)]


def _checked_commit(repo: Repo, commit: object) -> str:
    """A commit as the Hub gives it. Raises HubError for what is none."""
    if not isinstance(commit, str) or not re.fullmatch(r"[0-9a-f]{7,64}", commit):
        raise HubError(f"{repo}: the Hub does not say which commit this is", hint=_DISTRUST)
    return commit


def _checked_size(repo: Repo, name: str, size: object) -> int:
    """The size of a file as the Hub gives it. Raises HubError for what is no size."""
    if size is None:
        return 0
    if not isinstance(size, int) or isinstance(size, bool) or size < 0:
        raise HubError(f"{repo}/{shown(name)}: the Hub says that its size is {shown(size)}", hint=_DISTRUST)
    return size


def _confined(repo: Repo, name: str) -> str:
    """A file name of a repository. Raises CheckpointError for one that would leave the folder it is written to."""
    path = PurePosixPath(name)
    if not path.parts or path.is_absolute() or ".." in path.parts or "\\" in name or "\0" in name:
        raise HubError(f"{repo}: the name '{shown(name)}' leaves the folder", hint=_DISTRUST)
    return name


def download(repo: Repo) -> Path:
    """Copy a repository's weights and small files into the Hub's cache; what is there already is not fetched again.

    Returns:
        The folder of the snapshot; of a repository with a ``file``, that file in it.

    Raises:
        HubError: it cannot be read, or it is offline and not in the cache.
        CheckpointError: it has no such ``file``, or GGUF files of several models and ``file`` does not say which.
    """
    check_token(needed=False)
    if repo.file is not None:
        return _download_file(repo, repo.file)
    folder = _snapshot(repo, ignore_patterns=[f"*{suffix}" for suffix in IGNORED_SUFFIXES])
    if any(path.name.endswith(".safetensors") for path in folder.iterdir()):
        return folder
    pinned = replace(repo, revision=folder.name)
    models = gguf_files(str(repo), _listed(pinned))
    return _snapshot(pinned, allow_patterns=[escape(name) for name in models]) if models else folder


def _download_file(repo: Repo, name: str) -> Path:
    """One GGUF file and the rest of its set, without the Hub's list of files: the cache alone may have them."""
    file = _snapshot(repo, allow_patterns=[gguf_pattern(name)]) / name
    if not file.exists():
        whole = replace(repo, file=None)
        raise no_such_file(str(whole), _listed(whole), name)
    return file


def _listed(repo: Repo) -> list[str]:
    """The files of a repository; offline, those that the cache has."""
    with explained(str(repo)):
        try:
            names = HfApi().list_repo_files(repo.id, revision=repo.revision)
        except OfflineModeIsEnabled:
            folder = _snapshot(repo, local_files_only=True)
            names = [str(path.relative_to(folder)) for path in sorted(folder.rglob("*")) if path.is_file()]
    return [_confined(repo, name) for name in names]


def _snapshot(repo: Repo, **which: Any) -> Path:
    """The folder of a repository's snapshot in the cache, after ``which`` of its files were copied there."""
    with explained(str(repo)):
        try:
            snapshot = Path(snapshot_download(repo.id, revision=repo.revision, **which))
        except HFValidationError:
            raise
        except ValueError as error:  # a file name that would leave the cache, among others
            raise HubError(f"{repo}: the Hub's client refuses it ({shown(error)})", hint=_DISTRUST) from error
    _checked_commit(repo, snapshot.name)  # the client names the folder by what the Hub said
    return snapshot
