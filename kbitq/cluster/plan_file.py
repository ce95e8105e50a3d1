"""The file of a plan that several machines carry out: what each of them needs to make the same plan, and to be sure.

It holds the source with fingerprints that are the same on every machine, the options, where everything goes, the
version, and a hash over all of that. A process that opens it plans again from the headers and compares: nothing of what
is written where is taken from the file.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import mmap
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import kbitq
from kbitq.checkpoint.output.file_writer import sync_folder, writing
from kbitq.checkpoint.output.staging import working_folders
from kbitq.checkpoint.passes.resume import run_key
from kbitq.checkpoint.plan.options import QuantizeOptions
from kbitq.checkpoint.plan.plan import Plan
from kbitq.checkpoint.plan.planner import plan_quantize
from kbitq.checkpoint.source.gguf_storage import GgufStorage
from kbitq.checkpoint.source.header import parse_json_object
from kbitq.checkpoint.source.open import Checkpoint
from kbitq.checkpoint.source.storage import ByteFile, Storage, local_path
from kbitq.choose.knapsack import Budget
from kbitq.choose.selection import TensorRule
from kbitq.cluster.chunks import chunk_bytes
from kbitq.errors import CheckpointError, KbitqError, SourceChangedError
from kbitq.format import FORMAT_VERSION

PLAN_VERSION = 1
_MOST_BYTES = 100_000_000
_SAMPLES, _SAMPLE_BYTES = 16, 4096  # of each file: two checkpoints of one architecture have the same headers
_HUB = "hub:"
_PATHS = ("importance", "calibration")


@dataclass(frozen=True)
class PlanFile:
    """A plan as it is on the disk: where it lies, what it says, and the hash of that."""

    path: Path
    content: Mapping[str, Any]

    @property
    def hash(self) -> str:
        return str(self.content["hash"])

    @property
    def out(self) -> Path:
        return Path(self.content["out"])

    @property
    def chunk_bytes(self) -> int:
        return int(self.content["chunk_bytes"])

    @property
    def page(self) -> int:
        """Bytes of a page: what two machines write of one file never lies on one page."""
        return int(self.content["page"])

    @property
    def journals(self) -> Path:
        """The folder of the journals of all attempts."""
        return working_folders(self.out)[0] / "parts"


def plan_content(plan: Plan, size: int | None = None) -> dict[str, Any]:
    """What the file of a plan says, its hash included. Reads a few kilobytes of each file of the source.

    Args:
        plan: of which no budget was spent yet.
        size: bytes of the source in a chunk; None chooses.
    """
    out = Path(os.path.abspath(plan.out))  # noqa: PTH100 - a link in it must stay one: other machines may differ
    content: dict[str, Any] = {
        "kbitq_plan": PLAN_VERSION,
        "kbitq": kbitq.__version__,
        "code": code_digest(),
        "format_version": FORMAT_VERSION,
        "source": _source_text(plan.checkpoint.storage),
        "out": str(out),
        "options": _options_json(plan.options),
        "inputs": _inputs_digest(plan),
        "source_files": source_fingerprints(plan.checkpoint),
        "files": [{"name": s.name, "bytes": s.nbytes, "data_begins": s.header_nbytes} for s in plan.shards],
        "layout": layout_digest(plan),
        "page": max(4096, mmap.PAGESIZE),
        "chunk_bytes": chunk_bytes(plan.bytes_in) if size is None else size,
    }
    return {**content, "hash": _digest(content)}


def write_plan_file(content: Mapping[str, Any], path: Path) -> PlanFile:
    """Write the file of a plan; it appears whole or not at all."""
    data = (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode("utf-8", "surrogateescape")
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with writing(path):
        temporary.write_bytes(data)
        temporary.replace(path)
    sync_folder(path.absolute().parent)
    return PlanFile(path, content)


def read_plan_file(path: Path) -> PlanFile:
    """Read the file of a plan. Raises CheckpointError for one that is damaged, changed or of another kbitq."""
    try:
        with path.open("rb") as file:
            data = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    if len(data) > _MOST_BYTES:
        raise CheckpointError(f"{path} is too large for a plan")
    content = parse_json_object(data, str(path))
    if content.get("kbitq_plan") != PLAN_VERSION:
        raise CheckpointError(f"{path} is not a plan of kbitq plan that this version reads", remedy="plan-again")
    if content.get("hash") != _digest({key: value for key, value in content.items() if key != "hash"}):
        raise CheckpointError(
            f"{path} was changed or damaged: its hash is not that of its content", remedy="plan-again"
        )
    _check_version(path, content)
    return PlanFile(path, content)


def open_plan(path: Path, device: str | None = None) -> tuple[PlanFile, Plan]:
    """The file of a plan, and the plan made again from the headers of the source.

    Args:
        path: of the file.
        device: where to compute; None: as the plan says.

    Raises:
        SourceChangedError: the source is not the one planned with, or not the same on this machine.
        CheckpointError: the file cannot be used, or what it says is not what this machine comes to.
    """
    file = read_plan_file(path)
    try:
        options = _options_of(file.content["options"])
        source, out = _source_of(file.content["source"]), file.out
        whole = bool(out.name) and out.is_absolute() and ".." not in out.parts
        sound = file.chunk_bytes >= 1 and file.page >= 4096 and file.page % 4096 == 0
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise CheckpointError(f"{path}: its options make no sense ({error})", remedy="plan-again") from None
    if not whole or not sound:
        raise CheckpointError(f"{path}: its output {str(out)!r} is not a place to write to", remedy="plan-again")
    if file.page < mmap.PAGESIZE:
        raise CheckpointError(
            f"{path} was made on a machine with pages of {file.page} bytes; here they have {mmap.PAGESIZE}",
            remedy="plan-again",
        )
    if device is not None:
        options = dataclasses.replace(options, device=device)
    plan = plan_quantize(source, out, options, dry=True)
    _check_source(path, file.content, plan.checkpoint)
    same = file.content.get("inputs") == _inputs_digest(plan)
    if not same or file.content.get("layout") != layout_digest(plan):
        raise CheckpointError(
            f"{path}: the same options make another plan here; a file that the options name, or config.json, differs",
            remedy="plan-again",
        )
    return file, plan


def layout_digest(plan: Plan) -> str:
    """Which byte of which file everything goes to, and how it is coded, in 16 digits."""
    shards = [(s.name, s.nbytes, list(s.offsets.items())) for s in plan.shards]
    coding = [(t.name, t.k, t.codec, t.scale, t.k and plan.codebook_name(t)) for t in plan.tensors]
    return _digest([shards, coding])[:16]


def source_fingerprints(checkpoint: Checkpoint) -> dict[str, dict[str, Any]]:
    """Size and digest of each weight file: over what its header says, and over samples of its bytes or, on the Hub, the
    token that the server has for it. The same on every machine, which times of files are not."""
    told: dict[str, list[Any]] = {name: [] for name in checkpoint.fingerprints}
    for tensor in checkpoint.tensors.values():
        for t in (tensor, *tensor.parts):
            told.setdefault(t.file, []).append([t.name, t.dtype, list(t.shape), t.offset, t.nbytes])
    found = {}
    for name, header in sorted((name, told[name]) for name in checkpoint.fingerprints):
        file = checkpoint.storage.open(name)
        try:
            content = file.fingerprint().token if checkpoint.storage.distant else _sampled(file)
            found[name] = {"bytes": file.size, "digest": _digest([header, content])}
        finally:
            file.close()
    return found


def _inputs_digest(plan: Plan) -> str:
    """Over what the bytes depend on beside the weights: options, digests of the files they name, config.json."""
    return _digest([run_key(plan)["options"], plan.checkpoint.config])


def _sampled(file: ByteFile) -> str:
    digest = hashlib.sha256()
    for i in range(_SAMPLES):
        start = max(0, file.size - _SAMPLE_BYTES) * i // (_SAMPLES - 1)
        data = bytearray(min(_SAMPLE_BYTES, file.size - start))
        file.read_into(memoryview(data), start)
        digest.update(data)
    return digest.hexdigest()


@lru_cache
def code_digest() -> str:
    """Over the Python files of this package, the command line's apart: equal where the same bytes are made."""
    root, digest = Path(kbitq.__file__).parent, hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if not name.startswith("cli/"):
            digest.update(f"{name}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def _check_version(path: Path, content: Mapping[str, Any]) -> None:
    theirs, mine = str(content.get("kbitq")), kbitq.__version__
    if (theirs, content.get("format_version")) != (mine, FORMAT_VERSION):
        raise CheckpointError(
            f"{path} was made by kbitq {theirs}, and this is kbitq {mine}: all machines need the same version",
            hint=f"pip install kbitq=={theirs}",
        )
    if content.get("code") != code_digest():
        raise CheckpointError(
            f"{path} was made by another build of kbitq {mine}: its files differ from those installed here",
            hint="install the same package on every machine",
        )


def _check_source(path: Path, content: Mapping[str, Any], checkpoint: Checkpoint) -> None:
    planned, here = content.get("source_files"), source_fingerprints(checkpoint)
    if planned != here:
        known = planned if isinstance(planned, dict) else {}
        name = next((n for n in {**here, **known} if known.get(n) != here.get(n)), "")
        raise SourceChangedError(
            f"{checkpoint.where}: {name} is not the file that {path} was made from", remedy="plan-again"
        )


def _source_text(storage: Storage) -> str:
    place = local_path(storage)
    if place is not None:
        return str(place.absolute())
    chosen = storage.inner if isinstance(storage, GgufStorage) else storage
    return f"{_HUB}{getattr(chosen, 'address', chosen.label)}"


def _source_of(text: str) -> Path | Storage:
    if not text.startswith(_HUB):
        return Path(text)
    from kbitq import hub

    repo = hub.parse_repo(text.removeprefix(_HUB))
    if repo is None:
        raise CheckpointError(f"{text!r} names no repository")
    return hub.HubStorage(repo)


def _options_json(options: QuantizeOptions) -> dict[str, Any]:
    """The options with the files that they name as absolute paths."""
    values = dataclasses.asdict(options)
    for name in _PATHS:
        values[name] = None if values[name] is None else str(Path(values[name]).absolute())
    for table in (values, *values["rules"]):
        table |= {name: _absolute(text) for name, text in table.items() if name != "pattern"}
    made: dict[str, Any] = json.loads(json.dumps(values))
    return made


def _absolute(value: Any) -> Any:
    """A value; what names a file of levels, as an absolute path."""
    names_file = isinstance(value, str) and value.lower().endswith((".json", ".safetensors")) and Path(value).is_file()
    return str(Path(value).absolute()) if names_file else value


def _options_of(values: Mapping[str, Any]) -> QuantizeOptions:
    """Raises TypeError or ValueError for values that are no options."""
    given = {name: _tupled(value) for name, value in values.items()}
    given["rules"] = tuple(TensorRule(**{k: _tupled(v) for k, v in rule.items()}) for rule in values["rules"])
    if values["budget"] is not None:
        given["budget"] = Budget(**{k: _tupled(v) for k, v in values["budget"].items()})
    try:
        return QuantizeOptions(**given)
    except KbitqError as error:
        raise ValueError(str(error)) from None


def _tupled(value: Any) -> Any:
    return tuple(map(_tupled, value)) if isinstance(value, list) else value


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
