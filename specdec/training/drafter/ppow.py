"""PPOW (arXiv 2605.14978): a drafter learns from its own windows and how far they are accepted.

At each window place, G windows of K tokens are drafted, verified, rewarded and compared with each
other, as in GRPO:

    J = mean over windows and tokens of  min(r A, clip(r, 1 - e, 1 + e) A) - beta D(drafter, target)
    A = (R - mean of the group) / (its standard deviation + delta)            0 where all are equal
    R = k / (k gamma + 1) + eta [k = 0] [Delta < epsilon]

Without a reward it is distillation on the drafter's own text.

A window at slot i follows the tokens up to i + 1: its state is that of slot i in `ttt.unroll`,
which reads the target's features of positions up to i and the tokens up to i + 1, as in a decoding
cycle. It drafts stream positions i + 2 .. i + 1 + K, and at step s > 0 reads its own drafts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.errors import SpecdecError, check_integer, check_name
from specdec.models.eagle_network import vocabulary_ids
from specdec.training.drafter.objective import FrozenTarget, Objective, TokenBatch, wide
from specdec.training.drafter.ttt import columns_of, fuse_norms, unroll
from specdec.training.loop import mixed_seed

# full logits computed at once
ROWS = 256
# of the windows with k = 0: `epsilon` is measured such that so many are paid
PAID_FRAC = 0.2
CHOICES = {
    "places": ("adaptive", "errors"),
    "curriculum": ("gradual", "switched"),
    "verify": ("sampled", "greedy"),
    "reward": ("cost_aware", "measured", "none"),
    "divergence": ("reverse_kl", "forward_kl"),
}


@dataclass(frozen=True)
class Ppow(Objective):
    """PPOW and its ablations.

    places: hard windows begin with probability proportional to their mean criticality
        (`divergence_along`): "adaptive"; or where the drafter's first choice is not the target's:
        "errors". All others begin anywhere.
    curriculum: the share of hard places rises linearly over curriculum_steps ("gradual"), or jumps
        after them ("switched").
    verify: tokens are accepted by rejection "sampled" once, or where "greedy" decoding matches.
    reward: for k accepted tokens "cost_aware" k / (k gamma + 1), gamma the cost of a drafted token
        over one of the target; "measured" speedups[k]; "none".
    eta, epsilon: paid too if k = 0 and the target finds the window less than epsilon nats worse
        than its own greedy one. None: measured before the first step.
    after_rejection: also reinforce tokens behind the first rejected one.
    divergence: from the target at every drafted token. Forward KL renormalises the target over the
        draft vocabulary.
    """

    window: int = 10  # K, the paper's
    group: int = 8  # G, the paper's
    places_per_row: int = 4  # ours; the paper's algorithm has one per prefix
    places: str = "adaptive"  # the paper's
    hard_from: float = 0.2  # ours: the paper says "a smaller proportion"
    hard_to: float = 0.8  # ours
    curriculum: str = "gradual"  # the paper's; its Figure 4 shows "switched"
    curriculum_steps: int = 1000  # ours; 44,000 in Figure 4
    verify: str = "sampled"  # the paper's
    reward: str = "cost_aware"  # the paper's
    gamma: float = 0.12  # the paper's
    speedups: tuple[float, ...] = ()  # ours: measured per accepted length 0 .. K
    eta: float = 0.5  # ours: below the reward of one accepted token
    # ours, as a constant; over six tokens it pays 0.03 to 1 % of all windows
    epsilon: float | None = 2.0
    clip: float = 0.2  # ours
    delta: float = 1e-6  # ours
    after_rejection: bool = True  # the paper's
    beta: float = 0.04  # ours
    divergence: str = "reverse_kl"  # the paper's
    seed: int = 0

    def __post_init__(self):
        for name, allowed in CHOICES.items():
            check_name(name, getattr(self, name), allowed)
        for name in ("window", "group", "places_per_row", "curriculum_steps"):
            check_integer(name, getattr(self, name), 1)
        if self.reward != "none" and self.group < 2:
            raise SpecdecError("a group of 1 leaves nothing to compare with; raise group.")
        if self.reward == "measured" and len(self.speedups) != self.window + 1:
            raise SpecdecError(f"the measured reward needs speedups for 0 to {self.window} tokens.")

    def prepare(self, drafter, target: FrozenTarget, batches: Iterable[TokenBatch]) -> Ppow:
        """With epsilon, if None, set so that PAID_FRAC of the windows with k = 0 are below it."""
        if drafter.config.generation != 3:
            raise SpecdecError("windows are drafted by EAGLE-3 drafters; this is another kind.")
        fuse_norms(drafter)
        if self.epsilon is not None or self.reward == "none" or not self.eta:
            return self
        unpaid = replace(self, epsilon=0.0)
        gaps = []
        for batch in batches:
            windows, _ = unpaid.collect(drafter, target, batch).collected
            usable = windows.usable.repeat_interleave(self.group, 1)
            gaps.append(windows.gap[usable & (windows.accepted < 1)].cpu())
        rejected = torch.cat(gaps).double()
        epsilon = float(rejected.quantile(PAID_FRAC)) if len(rejected) else 0.0
        return replace(self, epsilon=epsilon)

    def collect(self, drafter, target: FrozenTarget, batch: TokenBatch) -> TokenBatch:
        """The batch with its `Windows`: drafted, verified and rewarded with the current weights."""
        batch = replace(batch, output=target(batch))
        generator = torch.Generator(batch.ids.device)
        generator.manual_seed(mixed_seed(self.seed, batch.step))
        # 1. where windows begin; a group begins at the same place
        places, usable, hard_frac = self._choose_places(drafter, target, batch, generator)
        slots = places.repeat_interleave(self.group, 1)
        # the trainings of the committed tables drew one more number per window
        torch.rand(slots.shape, generator=generator, device=slots.device)

        def draw(logits: Tensor) -> Tensor:
            probs = torch.softmax(logits, -1).flatten(0, -2)
            return torch.multinomial(probs, 1, generator=generator).view(logits.shape[:-1])

        # 2. the drafter drafts them, and the target reads all of them in one forward per row
        drafted, logits = roll_out(drafter, target.embedding, batch, slots, self.window, draw)
        target_logits, caches = target.continued(batch, slots, drafted)
        columns = columns_of(drafter, drafted)
        log_p_drafted = token_log_probs(target_logits, drafted)
        log_q_drafted = at_columns(torch.log_softmax(logits, -1), columns)
        # 3. k tokens are accepted
        if self.verify == "greedy":
            is_accepted = target_logits.argmax(-1) == drafted
        else:
            chance = (log_p_drafted - log_q_drafted).clamp(max=0).exp()
            draws = torch.rand(chance.shape, generator=generator, device=chance.device)
            is_accepted = draws < chance
        accepted = is_accepted.float().cumprod(-1).sum(-1)
        # 4. how far a window without any is from the target's own greedy one
        is_none = accepted == 0
        gap = torch.full_like(accepted, float("inf"))
        needed = is_none.unflatten(1, (-1, self.group)).any(-1) & usable
        if self.reward != "none" and self.eta and bool(needed.any()):
            assert self.epsilon is not None, "`prepare` measures epsilon first"
            first = target_logits[:, :: self.group]
            tokens, along = target.greedy(batch, places, first, caches, needed)
            best = token_log_probs(along, tokens).sum(-1)
            gap = best.repeat_interleave(self.group, 1) - log_p_drafted.sum(-1)
        # 5. the reward: speed, and proximity where nothing was accepted
        near = is_none & (gap < (self.epsilon or 0.0))
        rewards = self._speed_reward(accepted) + self.eta * near
        log_p = target_logits[..., vocabulary_ids(drafter)]
        log_p = log_p - target_logits.logsumexp(-1, keepdim=True)
        texts = (slots, drafted, columns, log_p, log_q_drafted)
        windows = Windows(*texts, accepted, rewards, usable, gap)
        measures = self._measures(windows, near) | {"hard_frac": hard_frac}
        return replace(batch, collected=(windows, measures))

    def _choose_places(self, drafter, target, batch: TokenBatch, generator):
        """(slots [B, places_per_row], usable, hard share), drawn among the places that fit."""
        fits = window_starts(batch, self.window)
        # 1. the curriculum: the share of hard places at this step
        share = batch.step / self.curriculum_steps
        rise = min(1.0, share) if self.curriculum == "gradual" else float(share >= 1)
        hard = self.hard_from + (self.hard_to - self.hard_from) * rise
        # 2. a mixture of a uniform choice and one by difficulty
        chance = fits / fits.sum(1, keepdim=True).clamp(min=1)
        if hard > 0 and bool(fits.any()):
            inside = F.pad(fits, (self.window - 1, 0)).unfold(1, self.window, 1).any(-1)
            scores, correct = divergence_along(drafter, target, batch, inside)
            # the mean over each window; zero counts past the end
            difficulty = F.pad(scores, (0, self.window - 1)).unfold(1, self.window, 1).mean(-1)
            if self.places == "errors":
                difficulty = ~correct
            weight = (difficulty * fits).double()
            total = weight.sum(1, keepdim=True)
            preferred = torch.where(total > 0, weight / total.clamp(min=1e-300), chance)
            chance = hard * preferred + (1 - hard) * chance
        # 3. a row in which no window fits draws its first slot, which does not count
        usable = fits.any(1)
        chance[~usable, 0] = 1.0
        count = self.places_per_row
        slots = torch.multinomial(chance.float(), count, replacement=True, generator=generator)
        return slots, usable[:, None].expand(-1, count), hard

    def _speed_reward(self, accepted: Tensor) -> Tensor:
        """The reward for so many accepted tokens [..]."""
        if self.reward == "cost_aware":
            return accepted / (accepted * self.gamma + 1)
        if self.reward == "measured":
            return accepted.new_tensor(self.speedups)[accepted.long()]
        return torch.zeros_like(accepted)

    def _measures(self, windows: Windows, near: Tensor) -> dict:
        """The values of a training curve, over the usable windows."""
        usable = windows.usable.repeat_interleave(self.group, 1)
        count = usable.sum().clamp(min=1)
        rewards = windows.rewards.unflatten(1, (-1, self.group))
        same = (rewards == rewards[..., :1]).all(-1) & windows.usable
        return {
            "reward": float((windows.rewards * usable).sum() / count),
            "accepted_tok": float((windows.accepted * usable).sum() / count),
            "proximity_frac": float((near & usable).sum() / count),
            "epsilon": self.epsilon or 0.0,
            "zero_variance_frac": float(same.sum() / windows.usable.sum().clamp(min=1)),
        }

    def __call__(self, drafter, target: FrozenTarget, batch: TokenBatch) -> tuple[Tensor, dict]:
        windows, measures = batch.collected
        # 1. the windows once more, now with gradients
        log_q = window_log_probs(drafter, target, batch)
        # 2. the divergence from the target at every drafted token
        usable = windows.usable.repeat_interleave(self.group, 1)
        counted = usable[..., None].expand(-1, -1, self.window)
        count = counted.sum().clamp(min=1)
        distance = divergence(self.divergence, log_q, windows.log_p)
        kl = (distance * usable[..., None]).sum() / count
        measures = {**measures, "kl": float(kl.detach())}
        if self.reward == "none":
            return self.beta * kl, measures
        # 3. the clipped gain of each token, by its window's advantage in its group
        advantages = group_advantages(windows.rewards, self.group, self.delta)[..., None]
        log_ratio = at_columns(log_q, windows.columns) - windows.log_q
        gain = clipped_gain(log_ratio, advantages, self.clip)
        if not self.after_rejection:
            steps = torch.arange(self.window, device=gain.device)
            counted = counted & (steps <= windows.accepted[..., None])
        return self.beta * kl - (gain * counted).sum() / count, measures


@dataclass(frozen=True)
class Windows:
    """Windows drafted from A = places * group slots, and their results.

    log_p: the target along them, without its mass outside the draft vocabulary. log_q: of the
    drafted tokens when they were drafted.
    """

    slots: Tensor  # [B, A]
    drafted: Tensor  # [B, A, K] ids of the target
    columns: Tensor  # [B, A, K] of the head
    log_p: Tensor  # [B, A, K, Vd]
    log_q: Tensor  # [B, A, K]
    accepted: Tensor  # [B, A]
    rewards: Tensor  # [B, A]
    usable: Tensor  # [B, places]
    gap: Tensor  # [B, A] nats by which the target prefers its greedy window, inf: not computed


def group_advantages(rewards: Tensor, group: int, delta: float) -> Tensor:
    """(R - mean) / (standard deviation + delta) within each `group` of neighbours. [.., A]"""
    grouped = rewards.unflatten(-1, (-1, group))
    centred = grouped - grouped.mean(-1, keepdim=True)
    # the rounded mean of equal rewards may differ from them
    centred = centred.masked_fill((grouped == grouped[..., :1]).all(-1, keepdim=True), 0.0)
    return (centred / (centred.square().mean(-1, keepdim=True).sqrt() + delta)).flatten(-2)


def clipped_gain(log_ratio: Tensor, advantages: Tensor, clip: float) -> Tensor:
    """min(r A, clip(r, 1 - clip, 1 + clip) A)."""
    ratio = log_ratio.exp()
    return torch.minimum(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages)


def divergence(name: str, log_q: Tensor, log_p: Tensor) -> Tensor:
    """The drafter's divergence from the target at every token. [.., Vd], [.., Vd] -> [..]

    log_p: the target's over the draft vocabulary; the missing mass is outside.
    """
    if name == "reverse_kl":
        return (log_q.exp() * (log_q - log_p)).sum(-1)
    inside = torch.log_softmax(log_p, -1)
    return (inside.exp() * (inside - log_q)).sum(-1)


def window_starts(batch: TokenBatch, window: int) -> Tensor:
    """[B, S] bool: slots whose window is inside one answer, together with the token before it."""
    slots = batch.ids.shape[1]
    if window + 2 > slots:
        why = f"a window of {window} tokens does not fit into rows of {slots}"
        raise SpecdecError(f"{why}; lower window or raise length.")
    # answer tokens before each position
    inside = F.pad(batch.loss_mask.long(), (1, window + 1)).cumsum(1)
    fits = inside[:, window + 2 : window + 2 + slots] - inside[:, 1 : slots + 1] == window + 1
    if batch.documents is not None:
        ends = F.pad(batch.documents[:, window + 1 :], (0, window + 1), value=-2)
        fits = fits & (ends == batch.documents)
    return fits


@torch.no_grad()
def roll_out(
    network, embedding: Tensor, batch: TokenBatch, slots: Tensor, window: int, choose: Callable
) -> tuple[Tensor, Tensor]:
    """Windows from `slots` [B, A]: (drafted [B, A, K] as target ids, logits [B, A, K, Vd]).

    batch: with the target's `output`. choose(logits [B, A, Vd]) -> columns [B, A].
    """
    ids = vocabulary_ids(network)
    # the unrolling reads `drafted` when a step begins, so that it may be filled on the way
    drafted = torch.zeros((*slots.shape, window), dtype=torch.long, device=slots.device)
    logits = []
    features = batch.output.features.to(embedding.dtype)
    states = unroll(network, embedding, features, batch, window, slots, drafted)
    for step, hidden in enumerate(states):
        logits.append(wide(network.head(hidden, step)))
        drafted[..., step] = ids[choose(logits[-1])]
    return drafted, torch.stack(logits, 2)


def window_log_probs(network, target: FrozenTarget, batch: TokenBatch) -> Tensor:
    """The drafter's log-probabilities [B, A, K, Vd] along the windows that `batch` collected."""
    windows, _ = batch.collected
    features = batch.output.features.to(target.embedding.dtype)
    places = windows.drafted.shape[-1], windows.slots, windows.drafted
    states = unroll(network, target.embedding, features, batch, *places)
    logits = [wide(network.head(hidden, step)) for step, hidden in enumerate(states)]
    return torch.log_softmax(torch.stack(logits, 2), -1)


def at_columns(values: Tensor, columns: Tensor) -> Tensor:
    """values [.., Vd] at the head's columns [..]."""
    return values.gather(-1, columns[..., None]).squeeze(-1)


def token_log_probs(logits: Tensor, tokens: Tensor) -> Tensor:
    """log softmax(logits) [.., V] at `tokens` [..]."""
    return logits.gather(-1, tokens[..., None]).squeeze(-1) - logits.logsumexp(-1)


@torch.no_grad()
def divergence_along(network, target: FrozenTarget, batch: TokenBatch, positions: Tensor):
    """(v [B, S], first_right [B, S]) at stream positions `positions` [B, S], 0 and True elsewhere.

        v = (1 - H(P) / log V) * KL(P || Q)

    At position p the target (P) and the drafter's first step (Q) predict token p + 2. KL is over
    the draft vocabulary, P renormalised there. first_right: the likeliest tokens are equal.
    """
    rows, columns = positions.nonzero(as_tuple=True)
    ids = vocabulary_ids(network)
    features = batch.output.features.to(target.dtype)
    states = next(unroll(network, target.embedding, features, batch, 1))[rows, columns]
    scores = torch.zeros_like(positions, dtype=torch.float32)
    correct = torch.ones_like(positions)
    for part in torch.arange(len(rows), device=rows.device).split(ROWS):
        row = rows[part]
        column = columns[part]
        logits, best, log_sum = batch.output.at(row, column + 1)
        log_q = torch.log_softmax(wide(network.head(states[part])), -1)
        scores[row, column] = criticality(logits - log_sum[:, None], log_q, ids).float()
        correct[row, column] = ids[log_q.argmax(-1)] == best
    return scores, correct


def criticality(log_p: Tensor, log_q: Tensor, ids: Tensor) -> Tensor:
    """v of `divergence_along` from log P [.., V], and log Q [.., Vd] of the tokens `ids`."""
    entropy = -(log_p.exp() * log_p).nan_to_num(0.0).sum(-1)
    inside = torch.log_softmax(log_p[..., ids], -1)
    distance = (inside.exp() * (inside - log_q)).nan_to_num(0.0).sum(-1)
    return (1 - entropy / math.log(log_p.shape[-1])) * distance
