"""Every tolerance of the matrix products, in one place; all else in this project is compared for equality.

The measure is the relative error of a whole result, |y - reference| / |reference| (Frobenius norms), against float64.
"""

import torch
from torch import Tensor

LINEAR = {
    torch.float32: 2e-6,  # float32 sums of up to some thousand terms
    # The result is rounded to 8 bits, the weight or its levels may be too: at most 2^-9 each. CUDA libraries may also
    # round the parts of a sum that they have split.
    torch.bfloat16: 5e-3,
    torch.float16: 4e-4,  # 11 bits, and the same
}
"""``torch.ops.kbitq.linear`` against the decoded weight in float64, by the dtype of the activations."""

LOGITS = {torch.float32: 1e-5, torch.bfloat16: 3e-2}
"""Logits of a whole packed model against those of the model with decoded weights: errors of many layers add up."""


def relative_error(result: Tensor, reference: Tensor) -> float:
    """|result - reference| / |reference|; the absolute error where the reference is zero."""
    wide = reference.detach().double().cpu()
    scale = wide.norm().item()
    return (result.detach().double().cpu() - wide).norm().item() / (scale or 1.0)
