"""Online speculative decoding: a drafter that keeps learning while it serves (OSD, and any other objective).

Weights change only between cycles, and no drafter can change the text: it stays the target's own. Keys and values
computed earlier in a turn keep the values of the older weights.
Knows nothing about files; the learned weights are lost with the pair unless its owner saves them.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import nn

from specdec.core.decode import opened, turn
from specdec.core.pair import Pair
from specdec.core.policy import Policy
from specdec.core.records import Generation
from specdec.errors import SpecdecError
from specdec.models.eagle.network import EagleNetwork, network_of
from specdec.models.heads import HeadsNetwork, heads_network
from specdec.models.small_lm import LMNetwork, SmallLM
from specdec.models.target import Target
from specdec.training.drafter.eagle3 import DrafterRun
from specdec.training.drafter.objective import FrozenTarget, Objective, TokenBatch
from specdec.training.drafter.presets import Settings, objective_named
from specdec.training.drafter.supervised import Supervised
from specdec.training.drafter.ttt import LossRules


@dataclass(frozen=True)
class OnlineConfig:
    """every: cycles between two steps. learning_rate: OSD's own is 1e-5. longest: number of newest tokens that a step reads."""

    every: int = 8
    learning_rate: float = 1e-5
    longest: int = 256


class OnlineDrafter:
    """A pair whose drafter learns from the texts it helps to write: EAGLE's layers, heads, or a small language model.

    objective: default OSD's rule, which learns only where the drafter was corrected.

    >>> import specdec
    >>> pair = specdec.load_pair("tiny", dtype="float32")
    >>> out = OnlineDrafter(pair).decode("What is 2 + 3?", max_new_tokens=16)
    >>> out.tokens == specdec.autoregress(pair, "What is 2 + 3?", max_new_tokens=16).tokens
    True
    """

    def __init__(self, pair: Pair, objective: Objective | None = None, config: OnlineConfig = OnlineConfig()):
        if config.every < 1:
            raise SpecdecError(f"every must be at least 1, got {config.every}.")
        self.pair, self.config, self.steps = pair, config, 0
        self._served: TokenBatch | None = None
        self.network, taps = learned_by(pair.drafter), pair.drafter.taps or (pair.target.num_layers,)
        network = copy_of(self.network, pair.target)
        frozen = FrozenTarget(pair.target.model, taps)
        settings = Settings(muon=False, learning_rate=config.learning_rate)
        if objective is None:
            levels = min(4, getattr(network.config, "num_heads", 4))
            ours = Supervised(LossRules(levels), labels="soft", errors_only=True)
            objective = objective_named("osd") if network.config.generation == 3 else ours
        self.run = DrafterRun(frozen, network, self, objective, settings)

    begins = held_out = ()  # for DrafterRun: the text is given later, and nothing is held out

    def batch(self, number: int) -> TokenBatch:
        """The newest served text."""
        return self._served

    def decode(self, prompt, policy: Policy | None = None, max_new_tokens: int = 128, **settings) -> Generation:
        """`specdec.decode`, with a learning step every few cycles. settings: those of `specdec.decode`."""
        engine, policy = opened(self.pair, prompt, policy, max_new_tokens, **settings)
        generation = Generation(engine.tokens, engine.prompt_tok, finish_reason="unfinished")
        cycles, ids = turn(engine, policy, generation), self.pair.ids_of(prompt)
        while not engine.finished:
            with engine.inference():
                next(cycles)
            if engine.cycles and engine.cycles % self.config.every == 0:
                self.learn([*ids, *engine.tokens], len(ids))
        for _ in cycles:
            pass
        generation.text = self.pair.text_of(engine.tokens)
        return generation

    def learn(self, ids: list[int], prompt_tok: int) -> dict:
        """One step on a text whose tokens after `prompt_tok` the target wrote; returns the objective's measures."""
        first = max(0, len(ids) - self.config.longest)
        tokens = torch.tensor([ids[first:]], device=self.pair.target.device)
        written = torch.arange(first, len(ids), device=tokens.device)[None] >= prompt_tok
        self._served = TokenBatch(tokens, written.long(), torch.zeros_like(tokens), step=self.steps)
        measures = self.run.step(self.steps, 1.0)
        self.steps += 1
        with torch.no_grad():
            for weight, learned in zip(self.network.parameters(), self.run.network.parameters(), strict=True):
                weight.copy_(learned)
        self.pair.drafter.repack()
        return measures


def learned_by(drafter) -> nn.Module:
    """The trainable network of a drafter. SpecdecError if it has none, or an embedding of its own."""
    network = drafter.network if drafter is not None else None
    if isinstance(drafter, SmallLM):
        return LMNetwork(network, (drafter.target.num_layers,))
    if not isinstance(network, EagleNetwork | HeadsNetwork) or network.config.own_embedding:
        raise SpecdecError(
            "only EAGLE's layers that use their target's embedding, heads and small language models can learn while they serve."
        )
    return network


def copy_of(network: nn.Module, target: Target) -> nn.Module:
    """The same weights in a trainable network, without anything prepared for drafting."""
    if isinstance(network, LMNetwork):
        return copy.deepcopy(network).requires_grad_(True)
    made = (network_of if isinstance(network, EagleNetwork) else heads_network)(network.config).to(target.device)
    made.load_state_dict(network.state_dict())
    if not hasattr(made, "lm_head"):
        made.use_head(target.model.get_output_embeddings())
    return made
