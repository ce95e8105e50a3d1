"""What a command does with the file that an option names: said beside the option, and held to before work starts."""

from __future__ import annotations

import enum
import os
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class Role(enum.Enum):
    """Stands in the ``Annotated`` type of every option or argument that names a file or folder."""

    READ = enum.auto()
    """It is read; nothing that the command writes may touch it."""
    WRITTEN = enum.auto()
    """A file that is written besides the output: never over anything that is read, and over others only by --force."""
    OUTPUT = enum.auto()
    """The checkpoint that is written, which ``check_destination`` holds against the source."""


READ, WRITTEN, OUTPUT = Role.READ, Role.WRITTEN, Role.OUTPUT


def role_of(annotation: Any) -> Role | None:
    """The role that an option's type carries."""
    return next((note for note in typing.get_args(annotation) if isinstance(note, Role)), None)


def check_apart(roles: Mapping[str, Role], given: Mapping[str, Any]) -> None:
    """Raise CheckpointError or OutputExistsError where the options of a command line would write over what is there.

    Args:
        roles: role by name, of the parameters that have one.
        given: value by name, of all parameters.
    """
    named = [(roles[name], Path(path)) for name in roles for path in _listed(given[name])]
    written = [path for role, path in named if role is Role.WRITTEN]
    outputs = [path for role, path in named if role is Role.OUTPUT]
    if not written and not outputs:
        return
    from kbitq.checkpoint.output.extra_output import check_apart_from_inputs, check_extra_output

    # What is not here may be a repository of the Hub, or the name of a codebook; its command will see.
    read = [path for role, path in named if role is Role.READ and os.path.lexists(path)]
    for out in outputs:
        check_apart_from_inputs(out, read)
    for i, path in enumerate(written):
        others = [*read, *written[:i]]
        check_extra_output(path, others, *outputs, force=bool(given.get("force")))


def _listed(value: Any) -> list[Any]:
    """The files that an option names: none, one, or those of an option that may be repeated."""
    if value is None:
        return []
    return value if isinstance(value, list) else [value]
