"""kbitq.functional: the function names that users of bitsandbytes' k-bit kernels know, on the CPU and on CUDA."""

import torch

from kbitq.functional import create_normal_float_codebook, dequantize_kbit, quantize_kbit


def main() -> None:
    torch.manual_seed(0)
    weight = torch.randn(1000, 300, dtype=torch.float16)  # flattened; blocks of 32 run across rows here

    for k in (2, 3, 4, 5):
        for absmax_format in ("e4m4", "fp32"):
            packed, absmax, codebook = quantize_kbit(weight, k=k, absmax_format=absmax_format)
            restored = dequantize_kbit(packed, absmax, codebook, k, weight.numel(), dtype=torch.float16)
            error = (weight.flatten().float() - restored.float()).square().mean()
            print(f"k={k} absmax {absmax_format} ({absmax.dtype}): mean squared error {float(error):.5f}")

    # Any ascending codebook: here one for weights that are never negative.
    levels = create_normal_float_codebook(4, torch.device("cpu")).abs().sort().values
    packed, absmax, codebook = quantize_kbit(weight.abs(), k=4, codebook=levels)
    restored = dequantize_kbit(packed, absmax, codebook, 4, weight.numel(), dtype=torch.float32)
    print(f"one-sided codebook: lowest restored value {float(restored.min()):.4f}")


if __name__ == "__main__":
    main()
