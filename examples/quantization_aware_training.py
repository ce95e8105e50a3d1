"""Quantization-aware training: a small network that learns with its weights as 2 bits would hold them.

A network is trained in float32 and then quantized to K = 2; another copy goes on training for as long with
``fake_quantize_kbit`` in every forward pass, and is quantized then. Both are tried on data that neither has seen.

    python examples/quantization_aware_training.py
"""

import copy
import itertools

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear, relu

import kbitq
from kbitq.functional import fake_quantize_kbit

K, FEATURES, HIDDEN, CLASSES = 2, 32, 64, 10


class Network(nn.Module):
    """Three linear layers; ``quantized`` says whether a forward pass sees their weights as K bits would hold them."""

    def __init__(self) -> None:
        super().__init__()
        sizes = (FEATURES, HIDDEN, HIDDEN, CLASSES)
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(sizes))
        self.quantized = False

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            weight = fake_quantize_kbit(layer.weight, K) if self.quantized else layer.weight
            x = linear(relu(x) if i else x, weight, layer.bias)
        return x


def labelled(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Points around ten centres, each class with three of them."""
    centres = torch.randn(3 * CLASSES, FEATURES, generator=torch.Generator().manual_seed(1))
    which = torch.randint(0, 3 * CLASSES, (count,), generator=generator)
    return centres[which] + 0.9 * torch.randn(count, FEATURES, generator=generator), which % CLASSES


def train(network: Network, steps: int, rate: float) -> None:
    generator = torch.Generator().manual_seed(2)
    optimizer = torch.optim.Adam(network.parameters(), lr=rate)
    for _ in range(steps):
        x, label = labelled(128, generator)
        optimizer.zero_grad()
        cross_entropy(network(x), label).backward()
        optimizer.step()


def quantized(network: Network) -> Network:
    """A copy with the weights that a kbitq file would give back."""
    network = copy.deepcopy(network)
    network.quantized = False
    for layer in network.layers:
        layer.weight.data = kbitq.quantize(layer.weight.data, K).dequantize()
    return network


@torch.no_grad()
def score(network: Network) -> tuple[float, float]:
    x, label = labelled(5_000, torch.Generator().manual_seed(3))
    y = network(x)
    return float(cross_entropy(y, label)), float((y.argmax(1) == label).float().mean())


def main() -> None:
    torch.manual_seed(0)
    network = Network()
    train(network, 200, 5e-3)
    aware = copy.deepcopy(network)
    aware.quantized = True
    train(aware, 100, 2e-3)
    train(network, 100, 2e-3)
    results = {
        "float32": score(network),
        f"quantized after training, K = {K}": score(quantized(network)),
        f"trained with fake_quantize_kbit, K = {K}": score(quantized(aware)),
    }
    for name, (loss, accuracy) in results.items():
        print(f"{name:40} loss {loss:.3f}, {accuracy:.1%} right")
    after, with_it = list(results.values())[1:]
    assert with_it[0] < after[0] and with_it[1] > after[1], "training with quantized weights should end better"


if __name__ == "__main__":
    main()
