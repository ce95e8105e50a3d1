"""What a format gives: weights, each of which decodes from tensors that a checkpoint stores. Imports no torch.

A format is a module with ``recognise(catalogue)``. It takes the tensors that are its own out of a catalogue of names,
shapes and the config, and returns a ``ForeignWeight`` for each weight that they make up. Values are read later, and
only the rows that are asked for.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from kbitq.errors import CheckpointError
from kbitq.format import CONFIG_KEY, element_count, matrix_shape, tensor_nbytes
from kbitq.text_safety import shown

if TYPE_CHECKING:
    from torch import Tensor

MAX_ROW_ELEMENTS = 1 << 26  # a row is decoded as a whole
PEEK_BYTES = 1 << 16
_SECTIONS = ("text_config", "llm_config", "language_config")


@dataclass(frozen=True)
class Stored:
    """A tensor as it lies in a file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


class StoredValues(Protocol):
    """How a decoder reads stored tensors. Results are the caller's own; calls may come from several threads."""

    def whole(self, name: str) -> Tensor:
        """A tensor in its shape and dtype. Those of one weight are kept while it is worked on."""

    def rows(self, name: str, first: int, count: int) -> Tensor:
        """``count`` rows of a tensor, ``[count, ...]``."""

    def columns(self, name: str, first: int, count: int) -> Tensor:
        """``count`` columns of a matrix, ``[rows, count]``; a view, not to be written."""

    def elements(self, name: str, first: int, count: int) -> Tensor:
        """``count`` elements of a tensor in its order, ``[count]``."""

    def raw(self, name: str, first: int, count: int) -> Tensor:
        """``count`` bytes of a tensor from byte ``first`` of it, uint8 ``[count]``."""

    def nbytes(self, name: str) -> int:
        """Bytes of a tensor."""


@dataclass(frozen=True)
class ForeignWeight(ABC):
    """A weight of another tool's format, known without its values. A format adds the fields that decoding takes.

    Attributes:
        name: of the weight, as an unquantized checkpoint has it.
        shape: of it.
        dtype: what it decodes to, in safetensors' spelling.
        scheme: how messages and the ledger call what it was: ``GPTQ, 4 bits, groups of 128``; empty for numbers that
            were only moved.
        stored: names of the stored tensors that it is made of, the codes first.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    scheme: str
    stored: tuple[str, ...]

    @abstractmethod
    def decode(self, values: StoredValues, first_row: int, rows: int, out: Tensor | None = None) -> Tensor:
        """Rows ``[first_row, first_row + rows)`` of the weight's matrix (``matrix_of``), ``[rows, cols]``.

        Exactly what the format's own package decodes them to, in ``dtype``. ``out``, contiguous and of that shape and
        dtype, is where they may be written: then ``out`` itself is returned. Raises CheckpointError for values that
        point outside the tensors.
        """


@dataclass
class Found:
    """What a format took out of a catalogue.

    Attributes:
        weights: in the order of the files.
        dropped: stored tensors that no weight needs, each with the reason.
    """

    weights: list[ForeignWeight] = field(default_factory=list)
    dropped: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Catalogue:
    """A checkpoint as a format sees it.

    Attributes:
        where: names the checkpoint in messages.
        tensors: by name, in the order of the files.
        config: the whole of config.json; empty without one.
        metadata: of the files' headers, in one table.
        peek: reads a small tensor (at most ``PEEK_BYTES``): its bytes.
    """

    where: str
    tensors: Mapping[str, Stored]
    config: Mapping[str, Any]
    metadata: Mapping[str, str]
    peek: Callable[[str], bytes]

    @property
    def quantization(self) -> Mapping[str, Any]:
        """``quantization_config`` of the config or of a section of it; empty where there is none."""
        for section in (self.config, *(self.config.get(key) for key in _SECTIONS)):
            found = section.get(CONFIG_KEY) if isinstance(section, Mapping) else None
            if isinstance(found, Mapping):
                return found
        return {}

    @property
    def method(self) -> str:
        """Its ``quant_method`` in lower case; empty where it says none."""
        method = self.quantization.get("quant_method")
        return method.lower() if isinstance(method, str) else ""

    @property
    def float_dtype(self) -> str:
        """The dtype that the config says the model computes in, in safetensors' spelling; BF16 where it says none."""
        for section in (self.config, *(self.config.get(key) for key in _SECTIONS)):
            if isinstance(section, Mapping):
                named = section.get("dtype", section.get("torch_dtype"))
                if isinstance(named, str) and named.removeprefix("torch.") in FLOAT_DTYPES:
                    return FLOAT_DTYPES[named.removeprefix("torch.")]
        return "BF16"

    def ending(self, suffix: str) -> Iterator[tuple[str, Stored]]:
        """Tensors whose names end so: what stands before, and the tensor."""
        for name, tensor in self.tensors.items():
            if name.endswith(suffix):
                yield name.removesuffix(suffix), tensor

    def json(self, name: str) -> dict[str, Any]:
        """The JSON object that a tensor's bytes spell. Raises CheckpointError where they do not."""
        try:
            value = json.loads(self.peek(name).decode("utf-8"))
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, dict):
            raise self.broken(name, "it should hold a JSON object")
        return value

    def broken(self, name: str, what: str) -> CheckpointError:
        """The error of a tensor that does not fit its format."""
        return CheckpointError(
            f"{self.where}: tensor {shown(name)}: {what}", hint="download the checkpoint again, or take the original"
        )

    def refused(self, what: str) -> CheckpointError:
        """The error of a checkpoint whose scheme is not read here."""
        return CheckpointError(
            f"{self.where} {what}",
            hint="quantize the original model (often the repository that this one's card calls its base model)",
        )

    def want(self, name: str, dtypes: tuple[str, ...], *shapes: tuple[int, ...]) -> Stored:
        """A tensor, which must be there, of one of the dtypes and (if any are given) of the shapes."""
        tensor = self.tensors.get(name)
        if tensor is None:
            raise self.broken(name, "it is missing")
        if tensor.dtype not in dtypes:
            raise self.broken(name, f"its dtype {tensor.dtype} should be {' or '.join(dtypes)}")
        if shapes and tensor.shape not in shapes:
            raise self.broken(name, f"its shape {list(tensor.shape)} should be {list(shapes[0])}")
        return tensor


FLOAT_DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
HALVES = ("F16", "BF16", "F32")


def whole_number(value: Any, least: int, most: int) -> int | None:
    """A number of a config, if it is one and within these bounds."""
    return value if isinstance(value, int) and not isinstance(value, bool) and least <= value <= most else None


def plain_nbytes(weight: ForeignWeight) -> int:
    """Bytes of a weight as an ordinary tensor."""
    nbytes = tensor_nbytes(weight.dtype, weight.shape)
    assert nbytes is not None
    return nbytes


def groups_text(size: int, cols: int) -> str:
    """How a scheme calls its groups of columns."""
    return "a scale for each row" if size >= cols else f"groups of {size}"


def matrix_of(weight: ForeignWeight) -> tuple[int, int]:
    """Rows and columns that a weight is decoded by; a vector is one row."""
    return matrix_shape(weight.name, weight.shape) if len(weight.shape) > 1 else (1, element_count(weight.shape))


def check_rows(catalogue: Catalogue, weight: ForeignWeight, rows: int) -> None:
    """Raise CheckpointError for a weight whose rows are too long to be decoded one at a time."""
    if rows and element_count(weight.shape) // rows > MAX_ROW_ELEMENTS:
        raise catalogue.broken(weight.stored[0], f"a row of more than {MAX_ROW_ELEMENTS:,} elements is not decoded")
