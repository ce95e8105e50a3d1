"""Wrote trellis.safetensors, once, with the numpy reference. Not run by the tests: its bytes are the format's promise.

Running it again must give the same file; a difference means that checkpoints out there would be read otherwise.
"""

from pathlib import Path

import numpy as np
from make_codec import sources
from safetensors.numpy import save_file

from kbitq.codecs import codebooks, trellis_reference


def main() -> None:
    tensors = {"importance": np.random.RandomState(2).exponential(size=75).astype(np.float32), **sources()}
    for name, w in sources().items():
        for scale_block in (32, 128):
            for k in range(1, 5):
                levels = codebooks.optimal_trellis(k, scale_block)
                for rule, importance in (("absmax", None), ("mse", None), ("importance", tensors["importance"])):
                    if importance is not None and name != "plain":
                        continue
                    scale = "mse" if importance is not None else rule
                    result = trellis_reference.quantize(
                        w, k, levels, scale=scale, importance=importance, scale_block=scale_block
                    )
                    kept = dict(zip(("packed", "absmax", "codebook"), result, strict=True))
                    if rule != "absmax" or k > 2:
                        del kept["codebook"]  # the same whatever the rule
                    for part, value in kept.items():
                        tensors[f"{name}.k{k}.b{scale_block}.{rule}.{part}"] = value
    save_file(tensors, Path(__file__).with_name("trellis.safetensors"))


if __name__ == "__main__":
    main()
