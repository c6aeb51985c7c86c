"""Other objectives on the given text: hard labels, HASS, EAGLE-1's features, GRIFFIN.

All of them are the training-time test with other labels, weights and gradients (`ttt`), taken from autograd. In HASS
the states of earlier steps carry no gradient, and the target's likeliest tokens count more. The released HASS code
multiplies attention scores by a mask of 0 and 1 before the softmax, so that masked keys still get weight; here they are
masked, as in decoding. GRIFFIN is HASS with its own network and token alignment (`ttt.LossRules`);
its stages, each continuing from the previous one's weights, are one run here.
Knows nothing about the trainer, files or optimisers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.errors import SpecdecError, check_name
from specdec.models.eagle.network import EagleNetwork
from specdec.training.drafter import ttt
from specdec.training.drafter.objective import FrozenTarget, Objective, TargetOutput, TokenBatch
from specdec.training.loop import seeded

LABELS = ("soft", "hard")


@dataclass(frozen=True)
class Supervised(Objective):
    """Cross-entropy along the text over unrolled steps. The comment after each default gives its source.

    rules: steps and counted positions. labels: the target's distribution ("soft") or the text's own token ("hard").
    soft_weight: of that cross-entropy. top_k, top_weight: of the same over only the target's top_k likeliest tokens.
    feature_weight: of the smooth L1 distance of each state from the target's last hidden state; EAGLE-1 networks only.
    noise: of uniform noise on the features, 512 / length times as wide. detach: no gradient from a step to the previous one.
    errors_only: count the cross-entropy only where the drafter's likeliest token is not the target's (OSD's rule).
    network: the default kind of network.
    """

    rules: ttt.LossRules = ttt.LossRules()
    labels: str = "hard"  # PPOW's equation of continued supervised training
    soft_weight: float = 1.0
    top_k: int = 0
    top_weight: float = 0.0
    feature_weight: float = 0.0
    noise: float = 0.0
    detach: bool = False
    errors_only: bool = False
    network: str = "eagle3"
    seed: int = 0

    def __post_init__(self):
        check_name("labels", self.labels, LABELS)
        if self.rules.positions != "taught":
            raise SpecdecError('only positions "taught" have a label of the text; set them in the rules.')

    def prepare(self, drafter: EagleNetwork, target: FrozenTarget) -> None:
        if self.feature_weight and drafter.config.generation != 1:
            raise SpecdecError("this drafter's states are no features of the target; set feature_weight to 0.")
        heads = getattr(drafter.config, "num_heads", 0) or getattr(drafter.config, "block", 0)
        if heads and self.rules.steps > heads:
            raise SpecdecError(
                f"a drafter of {heads} heads cannot be taught {self.rules.steps} steps; lower rules.steps."
            )

    def __call__(self, drafter: EagleNetwork, target: FrozenTarget, batch: TokenBatch) -> tuple[Tensor, dict]:
        output = target(batch)
        with torch.no_grad():
            teacher = self._weighted(drafter, ttt.teach(drafter, output, batch, self.rules), batch)
        followed = ttt.UnrollPlan(ttt.slots_to_unroll(teacher.row, self.rules.steps), detach=self.detach)
        heard = self._noisy(output, batch)
        states = ttt.unroll(drafter, target.embedding, heard, batch, self.rules.steps, followed)

        def loss(drafted: Tensor, counted: ttt.Counted) -> Tensor:
            probs, said = teacher.probs[counted.index], drafted
            if self.errors_only:
                wrong = drafted.detach().argmax(-1) != teacher.best[counted.index]
                probs, said = probs[wrong], drafted[wrong]
            total = ttt.soft_cross_entropy(said, probs)
            if self.feature_weight:  # the slot at position p predicts the feature of p + 1
                wanted = output.features[counted.rows, counted.places + 1]
                fed_back = drafter.feed_back(counted.hidden)
                distance = F.smooth_l1_loss(fed_back.float(), wanted.float(), reduction="none")
                total = total + self.feature_weight * distance.mean(-1).sum()
            return total

        found = ttt.stepped_loss(drafter, batch, teacher, self.rules, followed.slots, states, loss)
        return found.total, found.measures()

    def _weighted(self, drafter: EagleNetwork, teacher: ttt.Teacher, batch: TokenBatch) -> ttt.Teacher:
        """The teacher with this objective's labels and weights in place of the target's distribution."""
        probs, row = teacher.probs, teacher.row
        if self.labels == "hard":
            rows, places = (row >= 0).nonzero(as_tuple=True)
            columns = ttt.columns_of(drafter, batch.ids[rows, places + 2])
            probs = torch.zeros_like(probs)
            inside = columns >= 0
            probs[row[rows, places][inside], columns[inside]] = 1.0
            row = row.index_put((rows, places), torch.where(inside, row[rows, places], -1))
        weighted = self.soft_weight * probs
        if self.top_k:
            best = probs.topk(min(self.top_k, probs.shape[-1]), -1).indices
            weighted = weighted.scatter_add(-1, best, self.top_weight * probs.gather(-1, best))
        return replace(teacher, probs=weighted, row=row)

    def _noisy(self, output: TargetOutput, batch: TokenBatch) -> Tensor:
        if not self.noise:
            return output.features
        width = self.noise * 512 / batch.ids.shape[1]
        with seeded(self.seed, batch.step):
            noise = torch.rand(output.features.shape).to(output.features) - 0.5
        return output.features + width * noise
