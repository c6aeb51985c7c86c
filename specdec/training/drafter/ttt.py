"""EAGLE-3's training-time test: during training the drafter runs several steps on its own states.

Notation for a row of tokens t_0 .. t_{S-1}. Slot i at step s = 0 .. steps-1 is at stream position p
= i + s:

       it reads        the embedding of t_{p+1}, and its own state of the previous step
                    (at step 0 the fused features of position i)
    is rotated as   position p
       learns          the target's distribution of t_{p+2}, which is the target's output at p + 1

(EAGLE-3 section 3.2; sheet section 8.) Norms exist twice: `eager`, differentiated by autograd, and
`fused`, with a hand-written backward pass. The results are the same; on a CPU, where autograd's
intermediate tensors cost more time than the small matrix products, `fused` is faster. Other
objectives on the given text (`Supervised`: hard labels, HASS, EAGLE-1's features, GRIFFIN) are this
test with other labels, weights and gradients. In HASS the states of earlier steps carry no
gradient, and the target's likeliest tokens count more. The released HASS code multiplies attention
scores by a mask of 0 and 1 before the softmax, so that masked keys still get weight; here they are
masked, as in decoding. GRIFFIN is HASS with its own network and token alignment (`LossRules`); its
stages, each continuing from the previous one's weights, are one run here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specdec.errors import SpecdecError, check_name
from specdec.models.eagle_network import (
    EagleNetwork,
    RMSNorm,
    rotary_tables,
    rotate,
    vocabulary_ids,
)
from specdec.models.heads import HeadsNetwork
from specdec.models.small_lm import LMNetwork
from specdec.training.drafter.objective import (
    FrozenTarget,
    Objective,
    TargetOutput,
    TokenBatch,
    documents_of,
    packed_positions,
)
from specdec.training.loop import seeded

LABELS = ("soft", "hard")


@dataclass(frozen=True)
class LossRules:
    """Which slots count, and how much. `RULES` holds the presets.

    steps, decay: step s weighs decay**s; EAGLE-3 unrolls 7 steps at 0.8.
    divide_by: "all" divides each step's sum by every one of the B * S slots, padding included
    (official). "counted"
        divides by the slots that count, so that the scale does not depend on padding.
    positions: "early" counts stream position p if loss_mask[p] is 1, up to two tokens before the
    taught token, and
        teaches a uniform distribution where the stream runs out of teacher (official). "taught"
        counts p where the
            token read and the token taught both have loss_mask 1: the situation of drafting inside
            an answer.
    aligned_top: a slot counts at a step only if at each earlier step the text's token was among its
    top so many
            (GRIFFIN's token alignment, 3): a path that drafting would not follow teaches nothing.
            0: always. GRIFFIN's code checks the neighbouring slot for the earlier steps; here it is
            the slot itself.
    """

    steps: int = 7
    decay: float = 0.8
    divide_by: str = "counted"
    positions: str = "taught"
    aligned_top: int = 0

    def __post_init__(self):
        if self.steps < 1 or not 0 < self.decay <= 1:
            raise SpecdecError(
                f"steps must be at least 1 and decay in (0, 1], got {self.steps} and {self.decay}."
            )
        for name, allowed in (
            ("divide_by", ("all", "counted")),
            ("positions", ("early", "taught")),
        ):
            check_name(name, getattr(self, name), allowed)


RULES = {"official": LossRules(divide_by="all", positions="early"), "ours": LossRules()}


@dataclass(frozen=True)
class TrainingTimeTest(Objective):
    """EAGLE-3's objective.

    backward: "eager" leaves the norms' gradient to autograd, "fused" uses the hand-written one;
    "auto" is fused on a CPU and eager elsewhere.
    """

    rules: LossRules = RULES["ours"]
    backward: str = "auto"

    def __post_init__(self):
        check_name("backward", self.backward, ("auto", "eager", "fused"))

    def fused(self, device: torch.device) -> bool:
        return self.backward == "fused" or self.backward == "auto" and device.type == "cpu"

    def prepare(self, drafter: EagleNetwork, target: FrozenTarget) -> None:
        if self.fused(target.embedding.device):
            fuse_norms(drafter)

    def __call__(
        self, drafter: EagleNetwork, target: FrozenTarget, batch: TokenBatch
    ) -> tuple[Tensor, dict]:
        loss = ttt_loss(drafter, batch, target(batch), target.embedding, self.rules)
        return loss.total, loss.measures()


@dataclass(frozen=True)
class Teacher:
    """The target's distributions over the draft vocabulary, for the R stream positions that may
    count.

    row [B, S]: the row of stream position p, or -1 if p does not count.
    masked_tok [steps]: loss-mask tokens still in the stream at each step (the official accuracies'
    denominators).
    missing_mass_frac: mean target probability outside the draft vocabulary, before renormalising.
    """

    probs: Tensor
    best: Tensor
    row: Tensor
    masked_tok: Tensor
    missing_mass_frac: float


def draft_vocabulary(token_counts: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """The `size` most frequent tokens, in ascending order of id, as (d2t offsets [Vd], t2d
    membership [V]).

    token_counts [V] counts tokens of the answers. Ties go to the smaller id, so that unseen tokens
    fill the rest in a fixed order. target_id = draft_id + d2t[draft_id]. Raises SpecdecError when
    size does not fit the vocabulary.
    """
    if not 1 <= size <= len(token_counts):
        raise SpecdecError(
            f"a draft vocabulary of {size} does not fit a target vocabulary of {len(token_counts)}."
        )
    order = torch.sort(token_counts, descending=True, stable=True).indices[:size]
    ids = order.sort().values
    membership = torch.zeros(len(token_counts), dtype=torch.bool)
    membership[ids] = True
    return ids - torch.arange(size), membership


def teach(
    network: EagleNetwork, output: TargetOutput, batch: TokenBatch, rules: LossRules
) -> Teacher:
    """The teacher from the target's output.

    Only rows that may count are read, and their softmax is computed once for all steps (at step s
    the same distributions apply s slots further left).
    """
    mask = batch.loss_mask.bool()
    size, slots = batch.ids.shape
    if rules.positions == "taught":
        mask = _ahead(mask, 1) & _ahead(mask, 2)
    if batch.documents is not None:
        mask = mask & (_ahead(batch.documents, 2, fill=-1) == batch.documents)
    rows, columns = mask.nonzero(as_tuple=True)
    # the official stream is filled with zero logits there
    ended = columns == slots - 1
    vocabulary_ids = network.t2d.nonzero().squeeze(1)
    part, best, log_sum = output.logits.at(rows, (columns + 1).clamp(max=slots - 1), vocabulary_ids)
    part = part.masked_fill(ended[:, None], 0.0)
    best = best.masked_fill(ended, 0)
    inside = network.t2d[best]
    mass = (part.logsumexp(-1) - log_sum).exp()[~ended]
    probs = torch.softmax(part, -1)
    row = torch.full((size, slots), -1, dtype=torch.long, device=batch.ids.device)
    row[rows, columns] = torch.where(inside, torch.arange(len(rows), device=rows.device), -1)
    # [S + steps] masked tokens at stream positions >= p
    remaining = F.pad(mask.sum(0).flip(0).cumsum(0).flip(0), (0, rules.steps))
    missing = 1.0 - float(mass.mean()) if len(mass) else 0.0
    return Teacher(probs, probs.argmax(-1), row, remaining[: rules.steps], missing)


@dataclass(frozen=True)
class Loss:
    """total (scalar with gradient) = sum_s decay**s * losses[s]; hits over counted slots; all per
    step are [steps].
    """

    total: Tensor
    losses: Tensor
    accuracies: Tensor
    counted_tok: Tensor
    missing_mass_frac: float

    def measures(self) -> dict:
        """The values for a training curve."""
        measures = {
            "counted_tok": int(self.counted_tok[0]),
            "missing_mass_frac": self.missing_mass_frac,
        }
        for step, (value, accuracy) in enumerate(
            zip(self.losses.tolist(), self.accuracies.tolist(), strict=True)
        ):
            measures |= {f"loss_{step}": value, f"accuracy_{step}": accuracy}
        return measures


def ttt_loss(
    network: EagleNetwork,
    batch: TokenBatch,
    output: TargetOutput,
    embedding: Tensor,
    rules: LossRules = RULES["ours"],
) -> Loss:
    """The training-time-test loss of one batch.

        L_s = -sum p log q over the slots that count,      total = sum_s decay**s L_s

    output: the target's output for the batch. embedding [V, H]. p is the target renormalised over
    the draft vocabulary. A slot counts when its position does (`LossRules.positions`) and the
    target's arg-max over the whole vocabulary is in the draft vocabulary.
    """
    with torch.no_grad():
        teacher = teach(network, output, batch, rules)
    followed = UnrollPlan(slots_to_unroll(teacher.row, rules.steps))
    states = unroll(network, embedding, output.features, batch, rules.steps, followed)

    def loss(drafted: Tensor, counted: Counted) -> Tensor:
        return soft_cross_entropy(drafted, teacher.probs[counted.index])

    return stepped_loss(network, batch, teacher, rules, followed.slots, states, loss)


class Counted(NamedTuple):
    """The slots that count at a step: rows of the teacher, states [N, H], batch places."""

    index: Tensor
    hidden: Tensor
    rows: Tensor
    places: Tensor


def stepped_loss(
    network,
    batch: TokenBatch,
    teacher: Teacher,
    rules: LossRules,
    slots: Tensor,
    states: Iterator[Tensor],
    loss_of,
) -> Loss:
    """The weighted sum over the steps of `unroll`.

    loss_of(logits [N, Vd], `Counted`): the sum over a step's slots.
    """
    length = batch.ids.shape[1]
    losses = []
    hits = []
    counts = []
    aligned = torch.ones_like(slots, dtype=torch.bool)
    for step, hidden in enumerate(states):
        # 1. slot i reads stream position i + step; it counts if the teacher has a row for that
        place = (slots + step).clamp(max=length - 1)
        row = teacher.row.gather(1, place)
        counted = (row >= 0) & (slots + step < length) & aligned
        if batch.documents is not None:
            same = batch.documents.gather(1, place) == batch.documents.gather(1, slots)
            counted = counted & same
        index = row[counted]
        states_counted = hidden[counted]
        # 2. the loss and the accuracy of these slots
        drafted = network.head(states_counted, step)  # [counted, Vd]
        rows = counted.nonzero(as_tuple=True)[0]
        slots_counted = Counted(index, states_counted, rows, place[counted])
        losses.append(loss_of(drafted, slots_counted))
        scores = drafted.detach()
        taught = scores.gather(1, teacher.best[index, None]).squeeze(1)
        # an arg-max costs ten times as much in bfloat16
        hits.append((taught >= scores.amax(-1)).sum())
        counts.append(counted.sum())
        # 3. token alignment: only paths that drafting would follow are taught further
        if rules.aligned_top:
            likeliest = scores.topk(min(rules.aligned_top, scores.shape[1])).indices
            tokens = batch.ids[rows, (slots_counted.places + 2).clamp(max=length - 1)]
            among_top = (likeliest + network.d2t[likeliest] == tokens[:, None]).any(1)
            aligned = torch.zeros_like(counted).masked_scatter_(counted, among_top)
    # 4. the sums per slot, weighted by step
    hits = torch.stack(hits)
    counts = torch.stack(counts)
    if rules.divide_by == "counted":
        measured = counts
        divisor = counts.clamp(min=1)
    else:
        measured = teacher.masked_tok
        divisor = torch.full_like(counts, batch.ids.numel())
    losses = torch.stack(losses) / divisor
    weights = rules.decay ** torch.arange(rules.steps, device=losses.device)
    accuracies = hits / (measured + 1e-6)
    total = (losses * weights).sum()
    return Loss(total, losses.detach(), accuracies, counts, teacher.missing_mass_frac)


@dataclass(frozen=True)
class UnrollPlan:
    """What to unroll. slots [B, A]: the slots to follow, default all; repetitions are allowed.

    drafted [B, A, steps]: slots read drafted[..., s - 1] at step s > 0 in place of the text's
    token. It is read when step s begins, so that the caller may draft while iterating. detach: no
    gradient from a step to the previous one.
    """

    slots: Tensor | None = None
    drafted: Tensor | None = None
    detach: bool = False


def unroll(
    network: EagleNetwork | HeadsNetwork | LMNetwork,
    embedding: Tensor,
    features: Tensor,
    batch: TokenBatch,
    steps: int,
    followed: UnrollPlan = UnrollPlan(),
) -> Iterator[Tensor]:
    """Yield the drafter's states [B, A, H] (before the final norm) of step 0, 1, ... steps - 1;
    gradients flow through.

    embedding [V, H]: the target's frozen table. features [B, S, 3 * Ht]. Slot i at step s attends,
    in one softmax, to the step-0 keys of slots j <= i (of its own document) and to its own keys of
    steps 1 .. s; all keys and values keep their gradients. Of other slots only the step-0 key is
    needed.

    Heads on the target's state (`HeadsNetwork`) also have a state at each step, of the head for
    that step; there are at most as many steps as heads.
    """
    slots = followed.slots
    if slots is None:
        slots = torch.arange(batch.ids.shape[1], device=batch.ids.device).expand_as(batch.ids)
    if isinstance(network, LMNetwork):
        return _unroll_model(network, batch, steps, slots, followed)
    kind = _unroll_heads if isinstance(network, HeadsNetwork) else _unroll_layer
    return kind(network, embedding, features, batch, steps, slots, followed)


def _tokens_read(stream: Tensor, at: Tensor, step: int, followed: UnrollPlan) -> Tensor:
    """The token that each slot reads at a step: the text's next one, or the one it drafted."""
    if step and followed.drafted is not None:
        return followed.drafted[..., step - 1]
    return stream.gather(1, at + step + 1)


def _unroll_heads(network, embedding, features, batch, steps, slots, followed) -> Iterator[Tensor]:
    if network.config.path == "layer":
        prefix = _unroll_layer(network.prefix, embedding, features, batch, 1, slots, UnrollPlan())
        path = next(prefix)
    else:
        path = _take(features, slots)
    stream = F.pad(batch.ids, (0, steps + 1))
    for step in range(min(steps, network.config.num_heads)):
        tokens = _tokens_read(stream, slots, step, followed)
        path = network.extend(path, F.embedding(tokens, embedding))
        yield network.state(path, step)


def _unroll_model(network, batch, steps, slots, followed) -> Iterator[Tensor]:
    """A language model reads only tokens: a slot's state is that after the token it reads then."""
    if followed.drafted is not None:
        why = "a language model learns only from the given text here"
        raise SpecdecError(f"{why}; choose an objective such as 'lm'.")
    positions = packed_positions(documents_of(batch))
    states = F.pad(network.states(batch.ids, positions), (0, 0, 0, steps))
    for step in range(steps):
        yield _take(states, slots + step + 1)


def _unroll_layer(network, embedding, features, batch, steps, slots, followed) -> Iterator[Tensor]:
    """Step by step: embed, attend to the text's keys and to those of the own steps, feed back."""
    config = network.config
    length = batch.ids.shape[1]
    stream = F.pad(batch.ids, (0, steps))  # ends in id 0
    layers = [network.midlayer, *getattr(network, "layers", {}).values()]
    memories: list[list[Tensor]] = [[] for _ in layers]
    hidden = network.fuse(features)
    bias = _causal_bias(batch).to(hidden.dtype)  # [B or 1, S, S]
    cos, sin = rotary_tables(config.head_dim, config.rope_theta, length + steps, stream.device)
    cos = cos.to(hidden.dtype)
    sin = sin.to(hidden.dtype)
    # at step 0 every slot gives a key; later steps only follow `slots`
    at = torch.arange(length, device=stream.device).expand_as(batch.ids)
    if config.block:
        steps = min(steps, config.block)
        masked_tokens, masked_states = network.masked(*slots.shape)
    for step in range(steps):
        # 1. the token and the state that each slot reads; a block's rows read no drafted token
        if step and config.block:
            tokens = masked_tokens[..., step - 1]
            hidden = masked_states[..., step - 1, :]
        else:
            tokens = _tokens_read(stream, at, step, followed)
        x, hidden = network.attention_input(F.embedding(tokens, embedding), hidden)
        for number, (layer, memory) in enumerate(zip(layers, memories, strict=True)):
            if number:
                x = layer.input_layernorm(hidden)
            # 2. keys of this step, rotated to their stream positions; [B, heads or kv, S or A, D]
            q, k, v = (part.transpose(1, 2) for part in layer.self_attn.project(x))
            places = (at + step)[:, None]
            memory += [rotate(k, cos[places], sin[places]), v.contiguous()]
            # 3. after the last layer's keys of step 0 only the followed slots are needed
            if step == 0 and number == len(layers) - 1:
                q = _take(q, slots[:, None])
                hidden = _take(hidden, slots)
                bias = _take(bias.expand(len(batch.ids), -1, -1), slots)
                at = slots
            # 4. one softmax over the text's keys and the own ones
            places = (at + step)[:, None]
            q = rotate(q, cos[places], sin[places]).unflatten(1, (config.num_key_value_heads, -1))
            attended = step_attention(q, bias, *memory)  # [B, kv, heads / kv, S or A, D]
            attended = attended.permute(0, 3, 1, 2, 4).flatten(2)
            hidden = (layer if number else network).finish(attended, hidden)
        yield hidden
        hidden = network.feed_back(hidden.detach() if followed.detach else hidden)


def _take(values: Tensor, slots: Tensor) -> Tensor:
    """Rows `slots` [..., A] of values [..., S, X]; dimensions of size 1 in slots are shared. ->
    [..., A, X].
    """
    index = slots[..., None].expand(*values.shape[:-2], slots.shape[-1], values.shape[-1])
    return values.gather(-2, index)


def columns_of(network: EagleNetwork, tokens: Tensor) -> Tensor:
    """The head's column of each token, -1 for one that cannot be drafted."""
    columns = torch.full((len(network.t2d),), -1, dtype=torch.long, device=tokens.device)
    ids = vocabulary_ids(network)
    columns[ids] = torch.arange(len(ids), device=ids.device)
    return columns[tokens]


def slots_to_unroll(row: Tensor, steps: int) -> Tensor:
    """The slots that count at some step, in order, padded with others. row [B, S] -> [B, A]."""
    counted = F.pad((row >= 0).long(), (1, steps)).cumsum(1)
    length = row.shape[1]
    needed = counted[:, steps : steps + length] > counted[:, :length]
    most = max(1, int(needed.sum(1).max()))
    return torch.sort(needed.long(), dim=1, descending=True, stable=True).indices[:, :most]


def _ahead(values: Tensor, places: int, fill=0) -> Tensor:
    """values[:, places:] moved to the front, the end filled. [B, S] -> [B, S]."""
    return F.pad(values[:, places:], (0, min(places, values.shape[1])), value=fill)


def _causal_bias(batch: TokenBatch) -> Tensor:
    """0 where slot i sees the step-0 key of slot j (j <= i, a real token, same document), else
    -inf. [B or 1, S, S].
    """
    slots, device = batch.ids.shape[1], batch.ids.device
    allowed = torch.ones(slots, slots, dtype=torch.bool, device=device).tril()[None]
    if batch.attention_mask is not None:
        allowed = allowed & batch.attention_mask.bool()[:, None, :]
    if batch.documents is not None:
        allowed = allowed & (batch.documents[:, :, None] == batch.documents[:, None, :])
    allowed = allowed | torch.eye(
        slots, dtype=torch.bool, device=device
    )  # a padded row must not be empty
    return torch.zeros(allowed.shape, device=device).masked_fill_(~allowed, float("-inf"))


def step_attention(q: Tensor, bias: Tensor, *memory: Tensor) -> Tensor:
    """softmax([q k0' + bias, q . k_1, .., q . k_m]) [v0, v_1, .., v_m]: slot i sees k0 of all
    slots, k_j of its own.

    q [B, kv, G, A, D], bias [B or 1, A, S], then k0, v0 [B, kv, S, D] and k_1, v_1, .. [B, kv, A,
    D]; scores are divided by sqrt(D). Returns [B, kv, G, A, D].
    """
    first, first_value = memory[:2]
    step_keys = memory[2::2]
    step_values = memory[3::2]
    q = q * q.shape[-1] ** -0.5
    scores = [_rows(q, first.transpose(-1, -2)) + bias[:, None, None]]
    scores += [(q * keys[:, :, None]).sum(-1, keepdim=True) for keys in step_keys]
    causal, *single = torch.softmax(torch.cat(scores, -1), -1).split(
        [first.shape[2], *[1] * len(step_keys)], -1
    )
    out = _rows(causal, first_value)
    for weight, values in zip(single, step_values, strict=True):
        out = out + weight * values[:, :, None]
    return out


def soft_cross_entropy(logits: Tensor, probs: Tensor) -> Tensor:
    """-sum_v p_v log softmax(z)_v, summed over rows. [N, Vd], [N, Vd] -> scalar."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return -(probs * torch.log_softmax(wide, -1)).sum()


def _rows(left: Tensor, right: Tensor) -> Tensor:
    """left [B, kv, G, S, X] times right [B, kv, X, Y], broadcast over the groups. -> [B, kv, G, S,
    Y].
    """
    if left.shape[2] == 1:
        return (left[:, :, 0] @ right)[:, :, None]
    return (left.flatten(2, 3) @ right).unflatten(2, left.shape[2:4])


class NormFunction(torch.autograd.Function):
    """RMSNorm of x [..., H].

    y  = x r w   with   r = 1 / sqrt(mean x^2 + eps)
    dx = r (g w - x r^2 mean(g w x))
    """

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        squares = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=wide).square_()
        inverse = squares.div_(x.shape[-1]).add_(eps).rsqrt_().to(x.dtype)
        normed = x * inverse
        ctx.save_for_backward(normed, inverse, weight)
        return normed * weight

    @staticmethod
    def backward(ctx, gradient: Tensor):
        normed, inverse, weight = ctx.saved_tensors
        product = gradient * normed
        d_weight = product.flatten(0, -2).sum(0)
        shared = (product @ weight)[..., None] / normed.shape[-1]
        d_x = (gradient * weight).addcmul_(normed, shared, value=-1).mul_(inverse)
        return d_x, d_weight, None


class FusedNorm(RMSNorm):
    """RMSNorm whose backward pass is NormFunction's; same weight, same name in the state dict."""

    def forward(self, x: Tensor) -> Tensor:  # [..., H] -> [..., H]
        return NormFunction.apply(x, self.weight, self.eps)


def fuse_norms(network: nn.Module) -> nn.Module:
    """Replace every RMSNorm of `network` by a FusedNorm, in place; returns the network."""
    for module in network.modules():
        if type(module) is RMSNorm:
            module.__class__ = FusedNorm
    return network


@dataclass(frozen=True)
class Supervised(Objective):
    """Cross-entropy along the text over unrolled steps. The comment after each default gives its
    source.

    rules: steps and counted positions. labels: the target's distribution ("soft") or the text's own
    token ("hard").
    soft_weight: of that cross-entropy. top_k, top_weight: of the same over only the target's top_k
    likeliest tokens.
    feature_weight: of the smooth L1 distance of each state from the target's last hidden state;
    EAGLE-1 networks only.
    noise: of uniform noise on the features, 512 / length times as wide. detach: no gradient from a
    step to the previous one.
    errors_only: count the cross-entropy only where the drafter's likeliest token is not the
    target's (OSD's rule).
    network: the default kind of network.
    """

    rules: LossRules = LossRules()
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
            raise SpecdecError(
                'only positions "taught" have a label of the text; set them in the rules.'
            )

    def prepare(self, drafter: EagleNetwork, target: FrozenTarget) -> None:
        if self.feature_weight and drafter.config.generation != 1:
            raise SpecdecError(
                "this drafter's states are no features of the target; set feature_weight to 0."
            )
        heads = getattr(drafter.config, "num_heads", 0) or getattr(drafter.config, "block", 0)
        if heads and self.rules.steps > heads:
            why = f"a drafter of {heads} heads cannot be taught {self.rules.steps} steps"
            raise SpecdecError(f"{why}; lower rules.steps.")

    def __call__(
        self, drafter: EagleNetwork, target: FrozenTarget, batch: TokenBatch
    ) -> tuple[Tensor, dict]:
        output = target(batch)
        with torch.no_grad():
            teacher = self._weighted(drafter, teach(drafter, output, batch, self.rules), batch)
        followed = UnrollPlan(slots_to_unroll(teacher.row, self.rules.steps), detach=self.detach)
        features = self._noisy(output, batch)
        states = unroll(drafter, target.embedding, features, batch, self.rules.steps, followed)

        def loss(drafted: Tensor, counted: Counted) -> Tensor:
            probs = teacher.probs[counted.index]
            logits = drafted
            if self.errors_only:
                wrong = drafted.detach().argmax(-1) != teacher.best[counted.index]
                probs = probs[wrong]
                logits = drafted[wrong]
            total = soft_cross_entropy(logits, probs)
            if self.feature_weight:  # the slot at position p predicts the feature of p + 1
                feature = output.features[counted.rows, counted.places + 1]
                fed_back = drafter.feed_back(counted.hidden)
                distance = F.smooth_l1_loss(fed_back.float(), feature.float(), reduction="none")
                total = total + self.feature_weight * distance.mean(-1).sum()
            return total

        result = stepped_loss(drafter, batch, teacher, self.rules, followed.slots, states, loss)
        return result.total, result.measures()

    def _weighted(self, drafter: EagleNetwork, teacher: Teacher, batch: TokenBatch) -> Teacher:
        """The teacher with this objective's labels and weights in place of the target's
        distribution.
        """
        probs = teacher.probs
        row = teacher.row
        if self.labels == "hard":
            rows, places = (row >= 0).nonzero(as_tuple=True)
            columns = columns_of(drafter, batch.ids[rows, places + 2])
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
