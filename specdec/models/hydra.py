"""Hydra: Medusa's heads in sequence. Each reads the tokens drafted before it; Hydra++ adds a layer over the target's states.

    path_i = [s; e(t_0); ...; e(t_i)]        t_0 the root, t_1 .. t_i what was drafted below it on the way to the node
    s      = h, the target's last state (Hydra), or that of one more Llama layer over all of them (Hydra++)

The layer has keys and values of its own, which an `EagleSession` keeps as it does EAGLE's. Knows nothing about training,
files or policies.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.models.eagle.drafter import EagleDrafter, EagleSession
from specdec.models.eagle.network import EagleConfig, EagleNetwork, RMSNorm
from specdec.models.medusa import HeadsConfig, HeadsNetwork, MedusaDrafter, MedusaSession
from specdec.models.target import Target


class PrefixLayer(EagleNetwork):
    """One Llama layer and a final norm over the target's states alone: an EAGLE-1 layer that fuses nothing."""

    def __init__(self, config: EagleConfig):
        super().__init__(config)
        del self.fc
        self.midlayer.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def attention_input(self, embedded: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        return self.midlayer.input_layernorm(hidden), hidden

    def finish(self, attended: Tensor, residual: Tensor) -> Tensor:
        return self.norm(super().finish(attended, residual))


class HydraNetwork(HeadsNetwork):
    """Weights of Hydra's heads, and of Hydra++'s layer."""

    def __init__(self, config: HeadsConfig):
        super().__init__(config)
        if config.path == "layer":
            self.prefix = PrefixLayer(config.layer)

    def width(self, head: int) -> int:
        return self.config.hidden_size * (head + 2)

    def extend(self, path: Tensor, embedded: Tensor) -> Tensor:
        return torch.cat((path, embedded.to(path.dtype)), -1)


class HydraDrafter(MedusaDrafter):
    """Hydra's heads bound to a target."""

    layer: EagleDrafter | None = None

    def __init__(self, network: HydraNetwork, target: Target):
        super().__init__(network, target)
        if self.config.path == "layer":
            self.layer = EagleDrafter(network.prefix, target)
            self.repack()

    def repack(self) -> None:
        if self.layer is not None:
            self.layer.repack()
        super().repack()  # the layer's fused products among them

    def session(self, context_tok: int, tree_tok: int) -> HydraSession:
        return HydraSession(self, context_tok)


class HydraSession(MedusaSession):
    """One turn; Hydra++'s layer reads every committed token's state once."""

    def __init__(self, drafter: HydraDrafter, context_tok: int):
        super().__init__(drafter)
        self._lasting = EagleSession(drafter.layer, context_tok, 0) if drafter.layer is not None else None

    def context(self, tokens: Tensor, features: Tensor) -> Tensor:
        return features if self._lasting is None else self._lasting.advance(tokens, features)


def heads_network(config: HeadsConfig) -> HeadsNetwork:
    """Medusa's or Hydra's network, with weights as they begin."""
    return (HydraNetwork if config.path else HeadsNetwork)(config)
