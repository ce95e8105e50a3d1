"""Where a checkpoint is written, and how."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from kbitq.cli.options import files, parsing
from kbitq.cli.options.panels import Panel

_PANEL = Panel("Output")

Output = Annotated[
    Path | None,
    files.OUTPUT,
    _PANEL.path(
        "OUT",
        "A name ending in .safetensors is a file, any other a folder.",
        "-o",
        "--output",
        shown="beside SRC, NAME-kbitq-kN",
    ),
]
RequiredOutput = Annotated[
    Path,
    files.OUTPUT,
    _PANEL.path("OUT", "A name ending in .safetensors is a file, any other a folder.", "-o", "--output"),
]
MaxShardSize = Annotated[
    int,
    _PANEL.option(
        "SIZE", "Largest file of a folder: 500MB, 5GB (powers of 1000), 2GiB (of 1024).", parser=parsing.size
    ),
]
Dtype = Annotated[
    Literal["float32", "bfloat16", "float16", "float64"] | None,
    _PANEL.option(None, "Write the restored tensors in this dtype.", shown="each tensor's own"),
]
Force = Annotated[bool, _PANEL.flag("Replace an output that exists.", "--force")]
DryRun = Annotated[bool, _PANEL.flag("Show the plan, as kbitq plan does; write nothing.", "--dry-run")]
