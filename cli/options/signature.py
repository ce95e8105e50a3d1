"""One list of options for several commands: the fields of a dataclass, spread out into a command's signature."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import typing
from collections.abc import Callable
from typing import Any, cast

from kbitq.cli.options import files


def spread(command: Callable[..., None]) -> Callable[..., None]:
    """``command`` with every dataclass parameter replaced by parameters of its own, one for each field.

    Typer reads options from a function's signature; this gives it one, and hands the command the dataclasses back.
    Files that the options name are held apart first (``files.check_apart``).
    """
    signature = inspect.signature(command, eval_str=True)
    groups: dict[str, Any] = {
        p.name: p.annotation for p in signature.parameters.values() if dataclasses.is_dataclass(p.annotation)
    }
    parameters = [spread_out for p in signature.parameters.values() for spread_out in _spread(p)]

    roles = {p.name: role for p in parameters if (role := files.role_of(p.annotation)) is not None}

    @functools.wraps(command)
    def called(**given: Any) -> None:
        files.check_apart(roles, given)
        for name, group in groups.items():
            given[name] = cast(type[Any], group)(
                **{field.name: given.pop(field.name) for field in dataclasses.fields(group)}
            )
        command(**given)

    called.__annotations__ = {p.name: p.annotation for p in parameters}
    called.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]  # PEP 362
    return called


def _spread(parameter: inspect.Parameter) -> list[inspect.Parameter]:
    """The parameters that stand for one: itself, or a keyword for each field of its dataclass."""
    group = parameter.annotation
    if not dataclasses.is_dataclass(group):
        return [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)]
    hints = typing.get_type_hints(group, include_extras=True)
    return [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if field.default is dataclasses.MISSING else field.default,
            annotation=hints[field.name],
        )
        for field in dataclasses.fields(group)
    ]
