"""SHA256SUMS: the checksums of a folder, as ``sha256sum -c`` reads them."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from pathlib import Path

from kbitq.checkpoint.source.open import Checkpoint
from kbitq.checkpoint.source.progress import ProgressMeter
from kbitq.checkpoint.source.side_files import NOT_SUMMED, SUMS_FILE
from kbitq.checkpoint.source.storage import Storage, read_all
from kbitq.errors import CheckpointError, KbitqError
from kbitq.text_safety import shown

_LINE = re.compile(r"([0-9a-f]{64}) [ *](.+)")
_READ_BYTES = 1 << 20
MAX_CHECKSUMS_BYTES = 16_000_000


def read_checksums(storage: Storage) -> dict[str, str]:
    """The digests in SHA256SUMS by file name. Raises CheckpointError for a line that is none."""
    digests = {}
    for line in read_all(storage, SUMS_FILE, MAX_CHECKSUMS_BYTES).decode("utf-8", "replace").splitlines():
        match = _LINE.fullmatch(line)
        if match is None:
            raise CheckpointError(f"{storage.where}/{SUMS_FILE}: '{shown(line)}' is not a checksum and a name")
        digests[match[2]] = match[1]
    return digests


def format_checksums(digests: dict[str, str]) -> bytes:
    """The text of SHA256SUMS, sorted by name."""
    return "".join(f"{digest}  {name}\n" for name, digest in sorted(digests.items())).encode()


def check_checksums(checkpoint: Checkpoint, checks: list[str], problems: list[str], meter: ProgressMeter) -> None:
    """Check the files of a folder against SHA256SUMS; what is wrong is added to ``problems``."""
    storage = checkpoint.storage
    names = set(storage.names())
    if storage.single or SUMS_FILE not in names:
        checks.append(f"checksums: none, there is no {SUMS_FILE}")
        return
    try:
        digests = read_checksums(storage)
    except KbitqError as error:
        problems.append(str(error))
        return
    problems.extend(f"{shown(n)} is in {SUMS_FILE}, but not here" for n in sorted(digests.keys() - names))
    problems.extend(f"{shown(n)} is here, but not in {SUMS_FILE}" for n in sorted(names - digests.keys() - NOT_SUMMED))
    differing = [n for n in sorted(digests.keys() & names) if stored_digest(storage, n, meter) != digests[n]]
    problems.extend(f"{shown(name)}: its SHA-256 is not the one in {SUMS_FILE}" for name in differing)
    checks.append(f"checksums: {len(digests.keys() & names)} files")


def stored_digest(storage: Storage, name: str, meter: ProgressMeter | None = None) -> str:
    """SHA-256 of a file, in hexadecimal."""
    file, digest = storage.open(name), hashlib.sha256()
    try:
        for start in range(0, file.size, _READ_BYTES):
            data = bytearray(min(_READ_BYTES, file.size - start))
            file.read_into(memoryview(data), start)
            digest.update(data)
            if meter is not None:
                meter.add(len(data), name)
    finally:
        file.close()
    return digest.hexdigest()


_HASH_BYTES = 1 << 20


def sha256(path: Path, told: Callable[[int], object] | None = None) -> str:
    """SHA-256 of a file, in hexadecimal. ``told`` hears of bytes that were read."""
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        buffer = bytearray(_HASH_BYTES)
        while count := file.readinto(buffer):
            digest.update(memoryview(buffer)[:count])
            if told is not None:
                told(count)
    return digest.hexdigest()
