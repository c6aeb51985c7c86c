"""PPOW (arXiv 2605.14978): a drafter learns from its own windows and how far they are accepted.

At each window place, G windows of K tokens are drafted, verified, rewarded and compared with each
other, as in GRPO:

    J = mean over windows and tokens of  min(r A, clip(r, 1 - e, 1 + e) A) - beta D(drafter, target)
    A = (R - mean of the group) / (its standard deviation + delta)            0 where all are equal
    R = k / (k gamma + 1) + eta [k = 0] [Delta < epsilon]

Without a reward it is distillation on the drafter's own text, or on the target's.

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
    "rollout": ("drafter", "text", "mixed"),
    "verify": ("sampled", "greedy", "expected"),
    "reward": ("cost_aware", "raw", "measured", "none"),
    "divergence": ("reverse_kl", "forward_kl", "jsd", "tv"),
}


@dataclass(frozen=True)
class Ppow(Objective):
    """PPOW and its ablations. The comment behind each default gives its source.

    window (K), group (G), places_per_row: windows' length, windows per place, places in each row.
    places: where the hard windows are. "adaptive": with probability proportional to the window's
        mean criticality (`divergence_along`). "errors": where the drafter's first choice is not
        the target's.
    hard_from, hard_to, curriculum, curriculum_steps: the hard share of all places; the others are
        uniform. It rises linearly over so many steps ("gradual"), or jumps after them ("switched").
    rollout: the author of the windows: the drafter, the text, or one of both, at even odds.
    verify: the number of accepted tokens: rejection "sampled" once, "greedy" matches, or the
        "expected" number.
    reward: "cost_aware" k / (k gamma + 1), gamma the cost of a drafted token over one of the
        target; "raw" k; "measured" speedups[k]; "none".
    eta, epsilon: proximity reward, paid if k = 0 and the target finds the window less than epsilon
        nats worse than its own greedy one. eta 0 disables it. epsilon None: measured before the
        first step.
    clip, delta, updates: of the clipped objective; `updates` optimiser steps share the windows.
    after_rejection: also reinforce tokens behind the first rejected one.
    beta, divergence: weight and kind of the divergence from the target at every drafted token.
        Forward KL renormalises the target over the draft vocabulary.
    temperature: of drafter and target alike. detach: no gradient through states inside a window.
    """

    window: int = 10  # the paper's
    group: int = 8  # the paper's
    places_per_row: int = 4  # ours; the paper's algorithm has one per prefix
    places: str = "adaptive"  # the paper's
    hard_from: float = 0.2  # ours: the paper says "a smaller proportion"
    hard_to: float = 0.8  # ours
    curriculum: str = "gradual"  # the paper's; its Figure 4 shows "switched"
    curriculum_steps: int = 1000  # ours; 44,000 in Figure 4
    rollout: str = "drafter"  # the paper's
    verify: str = "sampled"  # the paper's
    reward: str = "cost_aware"  # the paper's
    gamma: float = 0.12  # the paper's
    speedups: tuple[float, ...] = ()  # ours: measured per accepted length 0 .. K
    eta: float = 0.5  # ours: below the reward of one accepted token
    # ours, as a constant; over six tokens it pays 0.03 to 1 % of all windows
    epsilon: float | None = 2.0
    clip: float = 0.2  # ours
    delta: float = 1e-6  # ours
    updates: int = 1  # ours
    after_rejection: bool = True  # the paper's
    beta: float = 0.04  # ours
    divergence: str = "reverse_kl"  # the paper's
    temperature: float = 1.0  # ours
    detach: bool = False  # ours
    seed: int = 0

    def __post_init__(self):
        for name, allowed in CHOICES.items():
            check_name(name, getattr(self, name), allowed)
        for name in ("window", "group", "places_per_row", "updates", "curriculum_steps"):
            check_integer(name, getattr(self, name), 1)
        if self.reward == "none":
            return
        if self.group < 2:
            raise SpecdecError("a group of 1 leaves nothing to compare with; raise group.")
        if self.rollout != "drafter":
            raise SpecdecError("only drafted windows can be rewarded; set rollout to drafter.")
        if self.reward == "measured" and len(self.speedups) != self.window + 1:
            raise SpecdecError(f"the measured reward needs speedups for 0 to {self.window} tokens.")

    def prepare(self, drafter, target: FrozenTarget) -> None:
        if drafter.config.generation != 3:
            raise SpecdecError("windows are drafted by EAGLE-3 drafters; this is another kind.")
        if target.embedding.device.type == "cpu":
            fuse_norms(drafter)

    def measured(self, drafter, target: FrozenTarget, batches: Iterable[TokenBatch]) -> Ppow:
        """With epsilon, if None, set so that PAID_FRAC of the windows with k = 0 are below it."""
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
        # the text's tokens in windows written by the text, -1 in the drafter's
        odds = {"drafter": 0.0, "text": 1.0, "mixed": 0.5}[self.rollout]
        draws = torch.rand(slots.shape, generator=generator, device=slots.device)
        text = text_windows(batch, slots, self.window)
        fixed = torch.where((draws < odds)[..., None], text, -1)

        def draw(logits: Tensor) -> Tensor:
            probs = torch.softmax(logits / self.temperature, -1)
            flat = torch.multinomial(probs.flatten(0, -2), 1, generator=generator)
            return flat.view(probs.shape[:-1])

        # 2. the drafter drafts them, and the target reads all of them in one forward per row
        drafted, logits = roll_out(drafter, target.embedding, batch, slots, fixed, draw)
        compared = self.reward != "none" and self.eta > 0
        assert self.epsilon is not None or not compared, "epsilon is to be `measured` first"
        caches: list | None = [] if compared else None
        target_logits = target.continued(batch, slots, drafted, caches)
        tempered = target_logits / self.temperature
        columns = columns_of(drafter, drafted)
        log_p_drafted = token_log_probs(tempered, drafted)
        log_q = torch.log_softmax(logits / self.temperature, -1)
        log_q_drafted = at_columns(log_q, columns)
        # 3. how many tokens are accepted
        log_probs = log_p_drafted, log_q_drafted
        accepted, none_frac = self._verify(tempered, drafted, *log_probs, generator)
        # 4. how far a window without any is from the target's own greedy one
        gap = torch.full_like(none_frac, float("inf"))
        needed = (none_frac > 0).unflatten(1, (-1, self.group)).any(-1) & usable
        if compared and bool(needed.any()):
            first = target_logits[:, :: self.group]
            tokens, along = target.greedy(batch, places, first, caches, needed)
            best = token_log_probs(along / self.temperature, tokens).sum(-1)
            gap = best.repeat_interleave(self.group, 1) - log_p_drafted.sum(-1)
        # 5. the reward: speed, and proximity where nothing was accepted
        near = self.eta * none_frac * (gap < (self.epsilon or 0.0))
        rewards = self._speed_reward(accepted) + near
        log_p = tempered[..., vocabulary_ids(drafter)] - tempered.logsumexp(-1, keepdim=True)
        windows = Windows(
            slots, drafted, columns, log_p, log_q_drafted, accepted, rewards, usable, gap
        )
        measures = self._measures(windows, none_frac, near, hard_frac)
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

    def _verify(self, logits, drafted, log_p, log_q, generator) -> tuple[Tensor, Tensor]:
        """(number of accepted tokens [B, A], probability of none [B, A])."""
        if self.verify == "greedy":
            chance = (logits.argmax(-1) == drafted).float()
        else:
            chance = (log_p - log_q).clamp(max=0).exp()
        if self.verify == "sampled":
            draws = torch.rand(chance.shape, generator=generator, device=chance.device)
            chance = (draws < chance).float()
        return chance.cumprod(-1).sum(-1), 1 - chance[..., 0]

    def _speed_reward(self, accepted: Tensor) -> Tensor:
        """The reward for so many accepted tokens [..]."""
        if self.reward == "cost_aware":
            return accepted / (accepted * self.gamma + 1)
        if self.reward == "raw":
            return accepted
        if self.reward == "none":
            return torch.zeros_like(accepted)
        # measured: linear between integers
        table = accepted.new_tensor((*self.speedups, self.speedups[-1]))
        below = accepted.long()
        return torch.lerp(table[below], table[below + 1], accepted - below)

    def _measures(self, windows: Windows, none_frac: Tensor, near: Tensor, hard_frac: float):
        """The values of a training curve, over the usable windows."""
        usable = windows.usable.repeat_interleave(self.group, 1)
        count = usable.sum().clamp(min=1)

        def mean(values: Tensor) -> float:
            return float((values * usable).sum() / count)

        rewards = windows.rewards.unflatten(1, (-1, self.group))
        same = (rewards == rewards[..., :1]).all(-1) & windows.usable
        mass = windows.log_p.logsumexp(-1).exp().mean(-1)
        return {
            "reward": mean(windows.rewards),
            "accepted_tok": mean(windows.accepted),
            "none_frac": mean(none_frac),
            "proximity_frac": mean((near > 0).float()),
            "paid_frac": mean((near > 0).float()) / max(mean(none_frac), 1e-9),
            "epsilon": self.epsilon or 0.0,
            "zero_variance_frac": float(same.sum() / windows.usable.sum().clamp(min=1)),
            "missing_mass_frac": 1 - mean(mass),
            "hard_frac": hard_frac,
            "windows": int(usable.sum()),
        }

    def __call__(self, drafter, target: FrozenTarget, batch: TokenBatch) -> tuple[Tensor, dict]:
        windows, measures = batch.collected
        # 1. the windows once more, now with gradients
        features = batch.output.features.to(target.embedding.dtype)
        places = windows.slots, windows.drafted, self.detach
        states = unroll(drafter, target.embedding, features, batch, self.window, *places)
        logits = [wide(drafter.head(hidden, step)) for step, hidden in enumerate(states)]
        log_q = torch.log_softmax(torch.stack(logits, 2) / self.temperature, -1)
        # 2. the divergence from the target at every drafted token
        usable = windows.usable.repeat_interleave(self.group, 1)
        count = usable.sum().clamp(min=1) * self.window
        distance = divergence(self.divergence, log_q, windows.log_p)
        kl = (distance * usable[..., None]).sum() / count
        measures = {**measures, "kl": float(kl.detach())}
        if self.reward == "none":
            return self.beta * kl, measures
        # 3. the clipped gain of each token, by its window's advantage in its group
        advantages = group_advantages(windows.rewards, self.group, self.delta)[..., None]
        log_ratio = at_columns(log_q, windows.columns) - windows.log_q
        gain, clipped = clipped_gain(log_ratio, advantages, self.clip)
        counted = usable[..., None].expand(-1, -1, self.window)
        if not self.after_rejection:
            steps = torch.arange(self.window, device=counted.device)
            counted = counted & (steps <= windows.accepted[..., None])
        policy = (gain * counted).sum() / count
        measures["clip_frac"] = float((clipped & counted).sum() / counted.sum().clamp(min=1))
        return self.beta * kl - policy, measures


@dataclass(frozen=True)
class Windows:
    """Windows drafted from A = places * group slots, and their results.

    log_p: the target along them, without its mass outside the draft vocabulary. log_q: of the
    drafted tokens when they were drafted.
    """

    slots: Tensor  # [B, A]
    drafted: Tensor  # [B, A, K] ids of the target
    columns: Tensor  # [B, A, K] of the head, -1 for a token that cannot be drafted
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


def clipped_gain(log_ratio: Tensor, advantages: Tensor, clip: float) -> tuple[Tensor, Tensor]:
    """(min(r A, clip(r) A), whether the clip took effect)."""
    ratio = log_ratio.exp()
    plain = ratio * advantages
    bounded = ratio.clamp(1 - clip, 1 + clip) * advantages
    return torch.minimum(plain, bounded), bounded < plain


def divergence(name: str, log_q: Tensor, log_p: Tensor) -> Tensor:
    """The drafter's divergence from the target at every token. [.., Vd], [.., Vd] -> [..]

    log_p: the target's over the draft vocabulary; the missing mass is outside.
    """
    q = log_q.exp()
    p = log_p.exp()
    if name == "reverse_kl":
        return (q * (log_q - log_p)).sum(-1)
    if name == "forward_kl":
        inside = torch.log_softmax(log_p, -1)
        return (inside.exp() * (inside - log_q)).sum(-1)
    if name == "tv":
        return 1 - torch.minimum(p, q).sum(-1)
    # Jensen-Shannon: outside the draft vocabulary the mixture is half of P
    log_2 = torch.log(log_p.new_tensor(2.0))
    middle = torch.logaddexp(log_p, log_q) - log_2
    outside = (1 - p.sum(-1)).clamp(min=0) * log_2
    return 0.5 * ((q * (log_q - middle)).sum(-1) + (p * (log_p - middle)).sum(-1) + outside)


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
    network, embedding: Tensor, batch: TokenBatch, slots: Tensor, fixed: Tensor, choose: Callable
) -> tuple[Tensor, Tensor]:
    """Windows from `slots` [B, A]: (drafted [B, A, K] as target ids, logits [B, A, K, Vd]).

    batch: with the target's `output`. choose(logits [B, A, Vd]) -> columns [B, A]. fixed [B, A, K]:
    given tokens; below 0 the drafter chooses.
    """
    ids = vocabulary_ids(network)
    steps = fixed.shape[-1]
    # the unrolling reads `drafted` when a step begins, so that it may be filled on the way
    drafted = fixed.clone()
    logits = []
    features = batch.output.features.to(embedding.dtype)
    states = unroll(network, embedding, features, batch, steps, slots, drafted)
    for step, hidden in enumerate(states):
        logits.append(wide(network.head(hidden, step)))
        chosen = ids[choose(logits[-1])]
        drafted[..., step] = torch.where(fixed[..., step] < 0, chosen, fixed[..., step])
    return drafted, torch.stack(logits, 2)


def text_windows(batch: TokenBatch, slots: Tensor, window: int) -> Tensor:
    """The text's tokens in the windows, token 0 past the end. slots [B, A] -> [B, A, window]"""
    places = slots[..., None] + 2 + torch.arange(window, device=slots.device)
    padded = F.pad(batch.ids, (0, window + 2))
    return padded.gather(1, places.flatten(1)).view_as(places)


def at_columns(values: Tensor, columns: Tensor) -> Tensor:
    """values [.., Vd] at the head's columns [..]; those of -1 give that of column 0."""
    return values.gather(-1, columns.clamp(min=0)[..., None]).squeeze(-1)


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
