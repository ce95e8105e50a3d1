"""Numbers and names as text: sizes, rates, times, shortened tensor names. Pure functions, nothing is printed here."""

from __future__ import annotations

import math
import re

from kbitq.text_safety import shown

_LARGEST = 1 << 60  # bytes: a size that numbers of 64 bits can be reckoned with
_UNITS = {"": 1, "B": 1}
_UNITS.update({f"{p}{s}": 1000 ** (i + 1) for i, p in enumerate("KMGT") for s in ("", "B")})
_UNITS.update({f"{p}I{s}": 1024 ** (i + 1) for i, p in enumerate("KMGT") for s in ("", "B")})


def parse_size(text: str) -> int:
    """'5GB' -> 5_000_000_000, '2GiB' -> 2 * 1024**3, '1.5 MB', '4096'. Raises ValueError with a sentence."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    unit = _UNITS.get(match[2].upper()) if match else None
    if match is None or unit is None:
        raise ValueError(f"{text!r} is not a size; write it as 500MB, 5GB or 2GiB.")
    count = float(match[1]) * unit
    if count < 1:
        raise ValueError(f"{text!r} is not a size above zero.")
    if count >= _LARGEST:
        raise ValueError(f"{shown(text)} is more than any file holds.")
    return int(count)


def size_text(count: float) -> str:
    """Bytes in powers of 1000, three or four digits: '812 B', '90.9 MB', '1.23 GB'."""
    return f"{_scaled(count, ' kMGTP')}B"


def count_text(count: float) -> str:
    """A number of parameters: '812', '22.7 M', '1.23 B'."""
    return _scaled(count, " kMBT").rstrip()


def _scaled(count: float, units: str) -> str:
    unit = 0
    while unit < len(units) - 1 and count >= 999.5:
        count /= 1000
        unit += 1
    if unit == 0:
        return f"{count:.0f} "
    digits = 2 if count < 9.995 else 1 if count < 99.95 else 0
    return f"{count:.{digits}f} {units[unit]}"


def seconds_text(seconds: float) -> str:
    """'0.34 s', '12.3 s', '4 min 05 s', '2 h 07 min'."""
    if seconds < 9.995:
        return f"{seconds:.2f} s"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def left_text(seconds: float) -> str:
    """Time left, which is a guess and so has no fractions: '3 s', '4:05', '2:07:00'."""
    minutes, rest = divmod(math.ceil(seconds), 60)
    if minutes < 1:
        return f"{rest} s"
    return f"{minutes}:{rest:02d}" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


def decibel_text(decibels: float | None) -> str:
    """'15.53', 'exact' for an error of zero, '-' where there is no measurement."""
    if decibels is None or math.isnan(decibels):
        return "-"
    return "exact" if decibels == math.inf else f"{decibels:.2f}"


def share_text(part: float, whole: float) -> str:
    """Part of a whole as a percentage; never '0.0 %' or '100.0 %' unless it is."""
    if not whole:
        return "-"
    percent = 100 * part / whole
    if 0 < percent < 0.05:
        return "<0.1 %"
    if 99.95 <= percent < 100:
        return ">99.9 %"
    return f"{percent:.1f} %"


def shape_text(shape: list[int] | tuple[int, ...]) -> str:
    """[1536, 384] -> '1536x384'; a scalar -> 'scalar'."""
    return "x".join(str(n) for n in shape) or "scalar"


def shorten(name: str, width: int) -> str:
    """A tensor name in at most ``width`` characters, cut between its dots.

    The last two components say what the tensor is and the numbers tell a layer from its likes, so the other components
    go first, from the left: 'model.layers.7.mlp.up_proj.weight' -> '…7.mlp.up_proj.weight' -> '…7…up_proj.weight'.
    """
    if len(name) <= width:
        return name
    parts = name.split(".")
    order = sorted(range(len(parts) - 2), key=lambda i: parts[i].isdigit())
    shown: list[str | None] = [*parts]
    for i in order:
        shown[i] = None
        bare = _join(shown)
        if len(bare) <= width:
            filled = _join(_refill(shown, i, parts[i], width - len(bare)))
            return filled if len(filled) <= width else bare  # longer only where components are empty
    return "…" + name[len(name) - width + 1 :] if width > 1 else "…"[:width]


def _join(parts: list[str | None]) -> str:
    """Parts joined by dots; a run of dropped ones (None) becomes one '…', which needs no dots beside it."""
    text = ".".join("…" if part is None else part for part in parts)
    return re.sub(r"\.?…[….]*", "…", text)


def _refill(parts: list[str | None], i: int, whole: str, spare: int) -> list[str | None]:
    """Give the room left over back to the component dropped last: its start, or its end where all before it is gone."""
    if spare < 4:  # a dot and three letters
        return parts
    before_is_gone = i == 0 or parts[i - 1] is None
    rest = [f"…{whole[1 - spare :]}"] if before_is_gone else [f"{whole[: spare - 1]}…"]
    return [*parts[:i], *rest, *parts[i + 1 :]]


def natural_key(name: str) -> list[tuple[int, int | str]]:
    """Sorts 'layers.9' before 'layers.10'."""
    return [(0, int(part)) if part.isdigit() else (1, part) for part in re.split(r"(\d+)", name)]
