"""Running a model that does not fit: one layer at a time, over all windows, with the weights of that layer only.

The model's own forward runs for every layer and window anew, up to that layer: the layers before it hand on what they
are given, and the layer itself is given what the one before made of the window. So masks, positions and whatever else a
model hands its layers are its own, and nothing here knows an architecture.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kbitq.calibration.collect import Collector, NotSharedError
from kbitq.calibration.skeleton import Skeleton
from kbitq.calibration.weights import Weight
from kbitq.calibration.writer import Gathered
from kbitq.checkpoint.output.file_writer import writing
from kbitq.errors import CalibrationError
from kbitq.eval.failures import told


class _Stop(BaseException):
    """The layer at hand is done: what comes after it in the model's forward is not wanted."""


class Activations:
    """What goes from one layer to the next, for each batch of windows: in memory, or in a file.

    Args:
        path: the file, made anew; None: in memory.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._held: dict[int, Tensor] = {}
        self._kinds: dict[int, tuple[int, torch.Size, torch.dtype]] = {}  # where in the file, shape, dtype
        self._end = 0

    def put(self, batch: int, value: Tensor) -> None:
        """Keep the activations ``[windows, length, hidden]`` of a batch."""
        value = value.detach().to("cpu").contiguous()
        if self._path is None:
            self._held[batch] = value
            return
        if batch not in self._kinds:
            self._kinds[batch] = self._end, value.shape, value.dtype
            self._end += value.nbytes
        with writing(self._path), self._path.open("r+b" if self._path.exists() else "w+b") as file:
            file.seek(self._kinds[batch][0])
            file.write(value.reshape(-1).view(torch.uint8).numpy().data)

    def get(self, batch: int) -> Tensor:
        """What was put, on the CPU."""
        if self._path is None:
            return self._held[batch]
        at, shape, dtype = self._kinds[batch]
        data = bytearray(shape.numel() * dtype.itemsize)
        with self._path.open("rb") as file:
            file.seek(at)
            file.readinto(data)
        return torch.frombuffer(data, dtype=dtype).reshape(shape)

    def close(self) -> None:
        """Remove the file."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)


class LayerRun:
    """One walk over the layers of a model.

    Args:
        skeleton: the model.
        weights: to collect for.
        batches: int64 ``[n, length]`` each.
        block: see :class:`Collector`.
        folder: for activations; None keeps them in memory.
        step: called with the number of tokens whenever a batch went through a layer.
    """

    def __init__(
        self,
        skeleton: Skeleton,
        weights: Sequence[Weight],
        batches: Sequence[Tensor],
        block: int | None,
        folder: Path | None,
        step: Callable[[int], None],
    ) -> None:
        self._skeleton, self._batches, self._block, self._step = skeleton, batches, block, step
        self._by_layer: dict[int | None, list[Weight]] = {}
        for weight in weights:
            self._by_layer.setdefault(self._layer_of(weight.name), []).append(weight)
        self._inputs, self._outputs = (
            Activations(folder / name if folder is not None else None) for name in ("activations-a", "activations-b")
        )
        self._layer = self._batch = 0
        self._wraps: dict[int, bool] = {}  # whether a layer gives a tuple

    def run(self, add: Callable[[list[Gathered]], None], done: int) -> None:
        """Collect layer by layer, then what lies around the layers.

        Args:
            add: takes what was collected, once for each layer and once at the end.
            done: how often it was called in an earlier run; those layers are run, and not collected.
        """
        skeleton = self._skeleton
        skeleton.load(skeleton.around())
        for i, layer in enumerate(skeleton.layers):
            layer.forward = partial(self._pass, i, layer.forward)
        try:
            for index in range(len(skeleton.layers) + 1):
                self._layer = index
                names = skeleton.within(index) if index < len(skeleton.layers) else []
                skeleton.load(names)
                weights = self._by_layer.get(index if names else None, [])
                found = self._collect(weights if index >= done else [])
                skeleton.drop(names)
                if index >= done:
                    add(found)
                del found  # not held beside the next layer's
                self._inputs, self._outputs = self._outputs, self._inputs
        finally:
            for layer in skeleton.layers:
                del layer.forward
            self._inputs.close()
            self._outputs.close()

    def _collect(self, weights: Sequence[Weight]) -> list[Gathered]:
        parameters = dict(self._skeleton.model.named_parameters(remove_duplicate=False))
        for share in (True, False):
            collector = Collector(weights, parameters, self._block, share=share)
            try:
                for batch, ids in enumerate(self._batches):
                    self._batch = batch
                    self._forward(ids, collector)
                return collector.gathered()[0]
            except NotSharedError:
                continue
        raise AssertionError("without sharing nothing is NotSharedError")

    def _forward(self, ids: Tensor, collector: Collector) -> None:
        base = self._skeleton.model.base_model
        try:
            with told("the model cannot read the tokens"), torch.no_grad(), collector:
                base(input_ids=ids.to(self._skeleton.device))
        except _Stop:
            pass
        self._step(ids.numel())

    def _pass(self, index: int, forward: Any, *args: Any, **kwargs: Any) -> Any:
        """Stands for a layer's forward."""
        given = args[0] if args else kwargs["hidden_states"]
        if index < self._layer:
            last = index == len(self._skeleton.layers) - 1  # the step after all layers: what they made, at last
            handed = self._inputs.get(self._batch).to(given.device) if last else given
            return (handed,) if self._wraps[index] else handed
        if index > 0:
            given = self._inputs.get(self._batch).to(given.device)
        made = forward(given, *args[1:], **kwargs) if args else forward(**{**kwargs, "hidden_states": given})
        self._wraps[index] = isinstance(made, tuple)
        made = made[0] if isinstance(made, tuple) else made
        if not isinstance(made, Tensor) or made.shape != given.shape:
            raise CalibrationError(
                "a layer does not give what the next one takes, so the model cannot be run layer by layer",
                hint="give it enough memory for the whole model",
            )
        self._outputs.put(self._batch, made)
        raise _Stop

    def _layer_of(self, name: str) -> int | None:
        rest = name.removeprefix(f"{self._skeleton.name}.")
        return int(rest.partition(".")[0]) if rest != name else None
