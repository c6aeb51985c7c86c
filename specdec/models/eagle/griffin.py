"""GRIFFIN's network: EAGLE-1's, with a gate where token and feature meet and a state of two streams.

    z = fc([e; f]);  z <- z + down(silu(up([n2(n1(z)); n2(e)])))        fusion: what the token says corrects the feature
    layer(z) = [predicted; regressed]                                   the head reads the first half, the second is fed back

A feature that must both be close to the target's and predict the next token serves neither well; here each has its own half.
The names are the official checkpoint's. Knows nothing about trees, sessions, training or files.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specdec.models.eagle.network import EagleConfig, EagleNetwork, RMSNorm


class FusionMLP(nn.Module):
    """down(silu(up([n(x); n(e)]))), one norm for both."""

    def __init__(self, config: EagleConfig):
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.up_proj = nn.Linear(2 * config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor, embedded: Tensor) -> Tensor:  # [..., H], [..., H] -> [..., H]
        both = torch.cat((self.input_layernorm(x), self.input_layernorm(embedded)), -1)
        return self.down_proj(F.silu(self.up_proj(both)))


class GatedFusion(nn.Module):
    """Token embeddings and features to what the layer reads."""

    def __init__(self, config: EagleConfig):
        super().__init__()
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=config.fc_bias)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = FusionMLP(config)

    def forward(self, embedded: Tensor, hidden: Tensor) -> Tensor:  # [..., H], [..., H] -> [..., H]
        fused = self.fc(torch.cat((embedded, hidden), -1))
        return fused + self.mlp(self.post_attention_layernorm(fused), embedded)


class GriffinNetwork(EagleNetwork):
    """Weights of a GRIFFIN drafter; its states are [..., 2H]."""

    def __init__(self, config: EagleConfig):
        super().__init__(config)
        self.fc = GatedFusion(config)
        self.midlayer.mlp.down_proj = nn.Linear(config.intermediate_size, config.state_size, bias=False)

    def attention_input(self, embedded: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        fused = self.fc(embedded, hidden)
        return fused, fused

    def finish(self, attended: Tensor, residual: Tensor) -> Tensor:  # -> [..., 2H]: both streams begin as the same
        layer = self.midlayer
        hidden = residual + layer.self_attn.o_proj(attended)
        return torch.cat((hidden, hidden), -1) + layer.mlp(layer.post_attention_layernorm(hidden))

    def spoken(self, hidden: Tensor) -> Tensor:
        return hidden[..., : self.config.hidden_size]

    def feed_back(self, hidden: Tensor) -> Tensor:
        return hidden[..., self.config.hidden_size :]


def network_of(config: EagleConfig) -> EagleNetwork:
    """A network of the kind that `config` says, with weights as they begin."""
    return (GriffinNetwork if config.griffin else EagleNetwork)(config)
