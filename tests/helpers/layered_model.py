"""Small modules for tests to quantize."""

import torch
from torch import Tensor, nn


class Experts(nn.Module):
    """A plain loop over fused experts, indexing the stacks as models do."""

    def __init__(self, experts: int = 3, hidden: int = 40, inner: int = 24) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(1)
        self.gate_up_proj = nn.Parameter(torch.randn(experts, 2 * inner, hidden, generator=draw) * 0.1)
        self.down_proj = nn.Parameter(torch.randn(experts, hidden, inner, generator=draw) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        total = torch.zeros_like(x)
        for expert in torch.arange(self.gate_up_proj.shape[0]):
            gate, up = nn.functional.linear(x, self.gate_up_proj[expert]).chunk(2, dim=-1)
            total = total + nn.functional.linear(torch.relu(gate) * up, self.down_proj[expert])
        return total


class Model(nn.Module):
    """An embedding, two linear layers (one with a tail and a bias), fused experts, a norm and a tied head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(300, 72, padding_idx=0)
        self.up = nn.Linear(72, 100)
        self.down = nn.Linear(100, 48, bias=False)
        self.experts = Experts(hidden=48, inner=64)
        self.norm = nn.LayerNorm(48)
        self.out = nn.Linear(48, 72)
        self.lm_head = nn.Linear(72, 300, bias=False)
        self.lm_head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = torch.relu(self.up(self.embed(ids)))
        return self.lm_head(self.out(self.norm(self.experts(self.down(x)))))


IDS = torch.arange(40).reshape(2, 20) * 7 % 300
