"""PPOW and related objectives: a drafter learns from its own windows and how far the target accepts them (arXiv 2605.14978).

At each window place, G windows of K tokens are drafted, verified, rewarded and compared with each other:

    J = mean over windows and tokens of  min(r A, clip(r, 1 - e, 1 + e) A) - beta D(drafter, target)
    A = (R - mean of the group) / (its standard deviation + delta)            0 where all G are equal
    R = k / (k gamma + 1) + eta [k = 0] [Delta < epsilon]

One config selects windows, places, rewards and the divergence from the target. Without a reward it is
distillation on the drafter's own text, or on the target's.

A window at slot i follows the tokens up to i + 1: its state is that of slot i in `ttt.unroll`, which reads the target's
features of positions up to i and the tokens up to i + 1, as in a decoding cycle. It drafts stream positions
i + 2 .. i + 1 + K, and at step s > 0 reads its own drafts. Knows nothing about the trainer, files or optimisers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec import ranks
from specdec.errors import SpecdecError, check_name
from specdec.models.eagle_network import EagleNetwork, vocabulary_ids
from specdec.training.drafter.objective import FrozenTarget, Objective, TokenBatch
from specdec.training.drafter.ttt import UnrollPlan, columns_of, fuse_norms, unroll
from specdec.training.loop import mixed_seed

ROWS = 256  # full logits computed at once
CHOICES = {
    "places": ("adaptive", "errors"),
    "curriculum": ("gradual", "switched"),
    "rollout": ("drafter", "text", "mixed"),
    "verify": ("sampled", "greedy", "expected"),
    "reward": ("cost_aware", "raw", "ratio", "measured", "none"),
    "divergence": ("reverse_kl", "forward_kl", "jsd", "tv", "k3"),
}


@dataclass(frozen=True)
class Ppow(Objective):
    """PPOW and its ablations. The comment after each default gives its source.

    window (K), group (G), places_per_row: windows' length, windows per place, places in each row of the batch.
    places: where the hard windows are. "adaptive": with probability proportional to the window's mean criticality
        (`divergence_along`). "errors": where the drafter's first choice is not the target's.
    hard_from, hard_to, curriculum, curriculum_steps: the hard share of all places; the others are uniform. It rises
            linearly over so many steps ("gradual"), or jumps after them ("switched").
    rollout: the author of the windows: the drafter, the text, or one of both, at even odds per window.
    verify: the number of accepted tokens: rejection "sampled" once, "greedy" matches, or the "expected" number.
    reward: "cost_aware" k / (k gamma + 1); "raw" k; "ratio" (k + 1) / (K gamma + 1); "measured": speedups[k]; "none".
    gamma: cost of a drafted token over one of the target; None counts parameters.
    eta, epsilon: proximity reward, paid if k = 0 and the target finds the window less than epsilon nats worse than its
            own greedy one. eta 0 disables it. epsilon None: measured before the first step, so that
            `paid_frac` of the windows with k = 0 are paid.
    clip, delta, updates: of the clipped objective; `updates` optimiser steps share one set of windows.
    after_rejection: also reinforce tokens behind the first rejected one.
    beta, divergence: weight and kind of the divergence from the target at every drafted token. Forward KL renormalises the
            target over the draft vocabulary; "k3" estimates the reverse KL from the drafted token alone.
    temperature: of drafter and target alike. detach: no gradient through the states inside a window.
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
    gamma: float | None = 0.12  # the paper's
    speedups: tuple[float, ...] = ()  # ours: measured per accepted length 0 .. K
    eta: float = 0.5  # ours: below the reward of one accepted token
    epsilon: float | None = 2.0  # ours, as a constant; over six tokens it pays 0.03 to 1 % of all windows
    paid_frac: float = 0.2  # ours
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
        if self.reward != "none" and self.group < 2:
            raise SpecdecError(f"a group of {self.group} leaves nothing to compare with; set group to 2 or more.")
        for name in ("window", "group", "places_per_row", "updates", "curriculum_steps"):
            if getattr(self, name) < 1:
                raise SpecdecError(f"{name} must be at least 1, got {getattr(self, name)}.")
        if self.reward != "none" and self.rollout != "drafter":
            raise SpecdecError("only windows that the drafter drafts can be rewarded; set rollout to drafter.")
        if self.reward == "measured" and len(self.speedups) != self.window + 1:
            why = f"the measured reward needs speedups for 0 to {self.window} tokens"
            raise SpecdecError(f"{why}, got {self.speedups}.")
        fracs = self.hard_from, self.hard_to, self.paid_frac
        if not (self.temperature > 0 and 0 <= min(fracs) and max(fracs) <= 1):
            raise SpecdecError("temperature must be above 0, hard_from, hard_to and paid_frac from 0 to 1.")

    def prepare(self, drafter: EagleNetwork, target: FrozenTarget) -> None:
        if drafter.config.generation != 3:
            raise SpecdecError("windows are drafted by EAGLE-3 drafters; this one has no vocabulary of its own.")
        if target.embedding.device.type == "cpu":
            fuse_norms(drafter)

    def measured(self, drafter: EagleNetwork, target: FrozenTarget, batches: Iterable[TokenBatch]) -> Ppow:
        """With epsilon, if None, set so that `paid_frac` of the windows with k = 0 in these batches are below it."""
        if self.epsilon is not None or self.reward == "none" or not self.eta:
            return self
        unpaid, gaps = replace(self, epsilon=0.0), []
        for batch in batches:
            found, _ = unpaid.collect(drafter, target, batch).collected
            usable = found.usable.repeat_interleave(self.group, 1)
            gaps.append(found.gap[usable & (found.accepted < 1)].cpu())
        far = torch.cat(gaps).double()
        epsilon = float(far.quantile(self.paid_frac)) if len(far) else 0.0
        return replace(self, epsilon=ranks.broadcast(epsilon))

    def collect(self, drafter: EagleNetwork, target: FrozenTarget, batch: TokenBatch) -> TokenBatch:
        """The batch with its `Windows`: drafted, verified and rewarded with the current weights."""
        batch, generator = replace(batch, output=target(batch)), torch.Generator(batch.ids.device)
        generator.manual_seed(mixed_seed(self.seed, batch.step))
        places, usable, hard_frac = self._choose_places(drafter, target, batch, generator)
        slots = places.repeat_interleave(self.group, 1)
        given = self._given(text_windows(batch, slots, self.window), generator)

        def draw(logits: Tensor) -> Tensor:
            probs = torch.softmax(logits / self.temperature, -1)
            return torch.multinomial(probs.flatten(0, -2), 1, generator=generator).view(probs.shape[:-1])

        drafted, logits = roll_out(drafter, target.embedding, batch, slots, given, draw)
        logits = logits / self.temperature
        compared = self.reward != "none" and self.eta > 0  # with the target's own windows
        assert self.epsilon is not None or not compared, "epsilon is to be `measured` first"
        caches: list | None = [] if compared else None
        says = target.continued(batch, slots, drafted, caches)
        said, ids = says / self.temperature, vocabulary_ids(drafter)
        log_q, columns = torch.log_softmax(logits, -1), columns_of(drafter, drafted)
        log_p_drafted = token_log_probs(said, drafted)
        log_q_drafted = log_q.gather(-1, columns.clamp(min=0)[..., None]).squeeze(-1)
        accepted, none_frac = self._verify(said, drafted, log_p_drafted, log_q_drafted, generator)
        gap = torch.full_like(none_frac, float("inf"))
        needed = (none_frac > 0).unflatten(1, (-1, self.group)).any(-1) & usable
        if compared and bool(needed.any()):
            own, along = greedy_windows(target, batch, places, says[:, :: self.group], caches, needed)
            best = token_log_probs(along / self.temperature, own).sum(-1)
            gap = best.repeat_interleave(self.group, 1) - log_p_drafted.sum(-1)
        near = self.eta * none_frac * (gap < (self.epsilon or 0.0))
        rewards = self._speed_reward(accepted, self._gamma(drafter, target)) + near
        log_p = said[..., ids] - said.logsumexp(-1, keepdim=True)
        found = Windows(slots, drafted, columns, log_p, log_q_drafted, accepted, rewards, usable, gap)
        measures = self._measures(found, none_frac, near, hard_frac)
        return replace(batch, collected=(found, measures))

    def _choose_places(self, drafter, target, batch: TokenBatch, generator):
        """(slots [B, places_per_row], usable, intended share of hard ones): drawn with replacement among those that fit."""
        fits = window_starts(batch, self.window)
        share = batch.step / self.curriculum_steps
        rise = min(1.0, share) if self.curriculum == "gradual" else float(share >= 1)
        hard = self.hard_from + (self.hard_to - self.hard_from) * rise
        chance = fits / fits.sum(1, keepdim=True).clamp(min=1)
        if hard > 0 and bool(fits.any()):
            wanted = F.pad(fits, (self.window - 1, 0)).unfold(1, self.window, 1).any(-1)
            scores, right = divergence_along(drafter, target, batch, wanted)
            found = ~right if self.places == "errors" else window_means(scores, self.window)
            weight = (found * fits).double()
            total = weight.sum(1, keepdim=True)
            preferred = torch.where(total > 0, weight / total.clamp(min=1e-300), chance)
            chance = hard * preferred + (1 - hard) * chance
        usable = fits.any(1)
        chance[~usable, 0] = 1.0
        slots = torch.multinomial(chance.float(), self.places_per_row, replacement=True, generator=generator)
        return slots, usable[:, None].expand(-1, self.places_per_row), hard

    def _given(self, text: Tensor, generator) -> Tensor:
        """The text's tokens in windows written by the text, -1 in the drafter's."""
        odds = {"drafter": 0.0, "text": 1.0, "mixed": 0.5}[self.rollout]
        from_text = torch.rand(text.shape[:2], generator=generator, device=text.device) < odds
        return torch.where(from_text[..., None], text, -1)

    def _verify(self, said, drafted, log_p, log_q, generator) -> tuple[Tensor, Tensor]:
        """(number of accepted tokens [B, A], probability of none [B, A])."""
        if self.verify == "greedy":
            chance = (said.argmax(-1) == drafted).float()
        else:
            chance = (log_p - log_q).clamp(max=0).exp()
        if self.verify == "sampled":
            chance = (torch.rand(chance.shape, generator=generator, device=chance.device) < chance).float()
        return chance.cumprod(-1).sum(-1), 1 - chance[..., 0]

    def _gamma(self, drafter: EagleNetwork, target: FrozenTarget) -> float:
        if self.gamma is not None:
            return self.gamma
        weights = {id(weight): weight.numel() for weight in target.model.parameters()}
        embedding = target.model.get_input_embeddings().weight
        tied = target.head.weight is embedding
        return sum(w.numel() for w in drafter.parameters()) / (sum(weights.values()) - (not tied) * embedding.numel())

    def _speed_reward(self, accepted: Tensor, gamma: float) -> Tensor:
        """The reward for so many accepted tokens [..]."""
        if self.reward == "cost_aware":
            return accepted / (accepted * gamma + 1)
        if self.reward == "ratio":
            return (accepted + 1) / (self.window * gamma + 1)
        if self.reward == "measured":  # linear between integers
            table = torch.tensor((*self.speedups, self.speedups[-1]), dtype=accepted.dtype, device=accepted.device)
            below = accepted.long()
            return torch.lerp(table[below], table[below + 1], accepted - below)
        return accepted * (self.reward == "raw")

    def _measures(self, found: Windows, none_frac: Tensor, near: Tensor, hard_frac: float) -> dict:
        usable = found.usable.repeat_interleave(self.group, 1)
        count = usable.sum().clamp(min=1)
        mean = lambda values: float((values * usable).sum() / count)  # noqa: E731
        rewards = found.rewards.unflatten(1, (-1, self.group))
        same = ((rewards == rewards[..., :1]).all(-1) & found.usable).sum() / found.usable.sum().clamp(min=1)
        mass = found.log_p.logsumexp(-1).exp().mean(-1)
        return {
            "reward": mean(found.rewards),
            "accepted_tok": mean(found.accepted),
            "none_frac": mean(none_frac),
            "proximity_frac": mean((near > 0).float()),
            "paid_frac": mean((near > 0).float()) / max(mean(none_frac), 1e-9),
            "epsilon": self.epsilon or 0.0,
            "zero_variance_frac": float(same),
            "missing_mass_frac": 1 - mean(mass),
            "hard_frac": hard_frac,
            "windows": int(usable.sum()),
        }

    def __call__(self, drafter: EagleNetwork, target: FrozenTarget, batch: TokenBatch) -> tuple[Tensor, dict]:
        if batch.collected is None:
            batch = self.collect(drafter, target, batch)
        found, measures = batch.collected
        followed = UnrollPlan(found.slots, found.drafted, self.detach)
        features = batch.output.features.to(target.embedding.dtype)
        states = unroll(drafter, target.embedding, features, batch, self.window, followed)
        logits = torch.stack([_wide(drafter.head(hidden, step)) for step, hidden in enumerate(states)], 2)
        log_q = torch.log_softmax(logits / self.temperature, -1)
        drafted = log_q.gather(-1, found.columns.clamp(min=0)[..., None]).squeeze(-1)
        held = divergence(self.divergence, log_q, found.log_p, found.columns)
        usable = found.usable.repeat_interleave(self.group, 1)
        count = ranks.all_reduce(usable.sum()).clamp(min=1) * self.window / ranks.world()
        kl = (held * usable[..., None]).sum() / count
        if self.reward == "none":
            return self.beta * kl, measures | {"kl": float(kl.detach())}
        advantages = group_advantages(found.rewards, self.group, self.delta)[..., None]
        gain, clipped = clipped_gain(drafted - found.log_q, advantages, self.clip)
        counted = usable[..., None].expand(-1, -1, self.window)
        if not self.after_rejection:
            counted = counted & (torch.arange(self.window, device=counted.device) <= found.accepted[..., None])
        policy = (gain * counted).sum() / count
        clip_frac = float((clipped & counted).sum() / counted.sum().clamp(min=1))
        return self.beta * kl - policy, measures | {"kl": float(kl.detach()), "clip_frac": clip_frac}


@dataclass(frozen=True)
class Windows:
    """Windows drafted from A = places * group slots, and their results.

    slots [B, A]; drafted [B, A, K] target ids; columns: the same as columns of the head, -1 for a token of the text that
    cannot be drafted. log_p [B, A, K, Vd]: the target along it, over the draft vocabulary, without its mass outside.
    log_q [B, A, K]: of the drafted tokens when they were drafted. accepted, rewards [B, A]. usable [B, places].
    gap [B, A]: nats by which the target prefers its own greedy window, infinite if not computed.
    """

    slots: Tensor
    drafted: Tensor
    columns: Tensor
    log_p: Tensor
    log_q: Tensor
    accepted: Tensor
    rewards: Tensor
    usable: Tensor
    gap: Tensor


def group_advantages(rewards: Tensor, group: int, delta: float) -> Tensor:
    """(R - mean) / (standard deviation + delta) within each `group` of neighbours; exactly 0 where all are equal. [.., A]"""
    grouped = rewards.unflatten(-1, (-1, group))
    centred = grouped - grouped.mean(-1, keepdim=True)
    centred = centred.masked_fill((grouped == grouped[..., :1]).all(-1, keepdim=True), 0.0)
    return (centred / (centred.square().mean(-1, keepdim=True).sqrt() + delta)).flatten(-2)


def clipped_gain(log_ratio: Tensor, advantages: Tensor, clip: float) -> tuple[Tensor, Tensor]:
    """(min(r A, clip(r) A), whether the clip took effect)."""
    ratio = log_ratio.exp()
    plain, bounded = ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages
    return torch.minimum(plain, bounded), bounded < plain


def divergence(name: str, log_q: Tensor, log_p: Tensor, columns: Tensor) -> Tensor:
    """Divergence of the drafter's distributions from the target's, at every token. [.., Vd], [.., Vd] -> [..]

    log_p: the target's over the draft vocabulary; the missing mass is outside. columns [..]: drafted tokens.
    """
    if name == "k3":
        chosen = (log_p - log_q).gather(-1, columns.clamp(min=0)[..., None]).squeeze(-1)
        return (chosen.exp() - chosen - 1) * (columns >= 0)
    q, p = log_q.exp(), log_p.exp()
    if name == "reverse_kl":
        return (q * (log_q - log_p)).sum(-1)
    if name == "forward_kl":
        kept = torch.log_softmax(log_p, -1)
        return (kept.exp() * (kept - log_q)).sum(-1)
    if name == "tv":
        return 1 - torch.minimum(p, q).sum(-1)
    middle = torch.logaddexp(log_p, log_q) - torch.log(log_p.new_tensor(2.0))
    outside = (1 - p.sum(-1)).clamp(min=0) * torch.log(log_p.new_tensor(2.0))  # there the mixture is half of P
    return 0.5 * ((q * (log_q - middle)).sum(-1) + (p * (log_p - middle)).sum(-1) + outside)


def window_starts(batch: TokenBatch, window: int) -> Tensor:
    """[B, S] bool: slots whose window is inside one answer, together with the token before it.

    SpecdecError if no row is long enough.
    """
    slots = batch.ids.shape[1]
    if window + 2 > slots:
        why = f"a window of {window} tokens and the two before it do not fit into rows of {slots} tokens"
        raise SpecdecError(f"{why}; lower the objective's window or raise the setting length.")
    answer = batch.loss_mask.bool()
    inside = F.pad(answer.long(), (1, window + 1)).cumsum(1)  # answer tokens before each position
    fits = inside[:, window + 2 : window + 2 + slots] - inside[:, 1 : slots + 1] == window + 1
    if batch.documents is not None:
        ends = F.pad(batch.documents[:, window + 1 :], (0, window + 1), value=-2)
        fits = fits & (ends == batch.documents)
    return fits


@torch.no_grad()
def roll_out(
    network, embedding, batch: TokenBatch, slots: Tensor, given: Tensor, choose: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """(drafted [B, A, K] as target ids, logits [B, A, K, Vd]): windows from `slots` [B, A], token by token.

    batch: with the target's `output`, as everywhere here. choose(logits [B, A, Vd]) -> columns [B, A]. given [B, A, K]: fixed
    tokens; below 0 the drafter chooses.
    """
    ids, drafted = vocabulary_ids(network), given.clone()
    steps = given.shape[-1]
    followed, logits = UnrollPlan(slots, drafted), []
    states = unroll(network, embedding, batch.output.features.to(embedding.dtype), batch, steps, followed)
    for step, hidden in enumerate(states):
        logits.append(_wide(network.head(hidden, step)))
        drafted[..., step] = torch.where(given[..., step] < 0, ids[choose(logits[-1])], given[..., step])
    return drafted, torch.stack(logits, 2)


def text_windows(batch: TokenBatch, slots: Tensor, window: int) -> Tensor:
    """The text's own tokens in the windows. slots [B, A] -> [B, A, window]; token 0 past the end of a row."""
    places = slots[..., None] + 2 + torch.arange(window, device=slots.device)
    padded = F.pad(batch.ids, (0, window + 2))
    return padded.gather(1, places.flatten(1)).view_as(places)


def greedy_windows(
    target: FrozenTarget, batch: TokenBatch, slots: Tensor, said: Tensor, caches: list, needed: Tensor
) -> tuple[Tensor, Tensor]:
    """The target's own greedy windows: (tokens [B, A, K], logits [B, A, K, V] along them), zeros where not `needed` [B, A].

    said [B, A, K, V] and caches: from `continued` for any windows from these slots, whose first logits are the same.
    """
    documents = torch.zeros_like(batch.ids) if batch.documents is None else batch.documents
    tokens, along = torch.zeros(said.shape[:-1], dtype=torch.long, device=slots.device), torch.zeros_like(said)
    places = list(zip(needed.nonzero()[:, 0].tolist(), (slots[needed] + 1).tolist(), strict=True))
    if places:
        found = target.greedy(documents, places, caches, said[needed][:, 0], said.shape[2])
        tokens[needed], along[needed] = found
    return tokens, along


def token_log_probs(logits: Tensor, tokens: Tensor) -> Tensor:
    """log softmax(logits) [.., V] at `tokens` [..]."""
    return logits.gather(-1, tokens[..., None]).squeeze(-1) - logits.logsumexp(-1)


@torch.no_grad()
def divergence_along(network, target: FrozenTarget, batch: TokenBatch, wanted: Tensor):
    """(v [B, S], first_right [B, S]) at stream positions `wanted` [B, S], 0 and True elsewhere.

        v = (1 - H(P) / log V) * KL(P || Q)

    At position p both predict token p + 2, given the text before it: P is the target's distribution, Q the drafter's at
    its first step. H over the whole vocabulary; KL over the draft vocabulary, P renormalised there. first_right: the
    drafter's likeliest token is the target's.
    """
    rows, columns = wanted.nonzero(as_tuple=True)
    ids, everything = vocabulary_ids(network), torch.arange(len(network.t2d), device=batch.ids.device)
    states = next(unroll(network, target.embedding, batch.output.features.to(target.dtype), batch, 1))[rows, columns]
    scores, right = torch.zeros_like(wanted, dtype=torch.float32), torch.ones_like(wanted)
    for part in torch.arange(len(rows), device=rows.device).split(ROWS):
        row, column = rows[part], columns[part]
        full, best, log_sum = batch.output.logits.at(row, column + 1, everything)
        log_q = torch.log_softmax(_wide(network.head(states[part])), -1)
        scores[row, column] = criticality(full - log_sum[:, None], log_q, ids).float()
        right[row, column] = ids[log_q.argmax(-1)] == best
    return scores, right


def criticality(log_p: Tensor, log_q: Tensor, ids: Tensor) -> Tensor:
    """v of `divergence_along` from log P [.., V] over the whole vocabulary and log Q [.., Vd] over the tokens `ids`."""
    entropy = -(log_p.exp() * log_p).nan_to_num(0.0).sum(-1)
    kept = torch.log_softmax(log_p[..., ids], -1)
    divergence = (kept.exp() * (kept - log_q)).nan_to_num(0.0).sum(-1)
    return (1 - entropy / math.log(log_p.shape[-1])) * divergence


def window_means(scores: Tensor, window: int) -> Tensor:
    """Mean of `scores` [B, S] over each window [i, i + window - 1]; zero counts past the end."""
    return F.pad(scores, (0, window - 1)).unfold(1, window, 1).mean(-1)


def _wide(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))
