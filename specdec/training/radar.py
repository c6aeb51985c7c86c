"""RADAR's controller: its offline dataset, and its training, sampled (paper) or exact (ours).

A policy's only choice in a cycle is to stop after a = 0..7 expansions, and the data give the result
of each: L(a) tokens in l(a) milliseconds. So the expectation over these eight outcomes is
computable, and sampling (as in the paper) is optional.

    sum over a of P(stop = a) (L(a) - rate * l(a))

is ours; the paper rewards beta * L / l and -alpha per continue (RADAR section 2.2, Eqs. 4-7).
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

from specdec import runs
from specdec.core.tree_config import TREES, TreeConfig, pool_size
from specdec.costs.model import CostModel
from specdec.errors import SpecdecError, warn
from specdec.policies import radar as controller
from specdec.policies.base import chose, named
from specdec.policies.radar import CONTINUE, DECISIONS, HIDDEN, STATE, STOP, RadarConfig
from specdec.replays.trace import Trace
from specdec.training.loop import Best, TrainingRun, descend, seeded, undisturbed

STOPS = DECISIONS + 1  # expansions when drafting stops: 0 to 7
LENGTHS = STOPS + 1  # accepted draft tokens: 0 to 8
TREE = TREES["eagle3"]  # RADAR's
HELD_OUT_FRAC = 0.2  # of prompts or cycles (sheet 3)
BETA_FACTOR = 10.0  # beta is so many times T_d + T_p (sheet 1)
LAST_RATE = 1e-6  # of the cosine decay, as CLIP and DROPOUT from the code (sheet 1 [C])
CLIP = 1.0
DROPOUT = 0.1


@dataclass
class RadarData:
    """Q positions: the controller's input after each draft call, and how much is then accepted.

    distributions: (a, j) is P(j draft tokens are accepted | a expansions).
    """

    scores: np.ndarray  # float32 [Q, 8, 10]: s_1..s_8, cumulative log-probabilities, descending
    distributions: np.ndarray  # float32 [Q, 8, 9]
    prompts: np.ndarray  # int32 [Q]: each row's prompt, for splits
    context_tok: np.ndarray  # int32 [Q]: committed tokens before the root
    header: dict = field(default_factory=dict)  # the rows' source

    def __post_init__(self):
        # half precision has rounding errors
        distributions = np.ascontiguousarray(self.distributions, dtype=np.float32)
        # a tree of a expansions accepts at most a + 1 tokens
        beyond = np.arange(LENGTHS) > np.arange(STOPS)[:, None] + 1
        clipped = np.where(beyond, 0, distributions.clip(min=0))
        self.distributions = clipped / clipped.sum(-1, keepdims=True)

    def __len__(self) -> int:
        return len(self.scores)

    @property
    def expected(self) -> np.ndarray:
        """float32 [Q, 8]: the expected accepted draft tokens, without the bonus token."""
        return self.distributions @ np.arange(LENGTHS, dtype=np.float32)

    def split(self, by: str = "prompt", seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """Row numbers for training and held out (HELD_OUT_FRAC of the prompts or cycles).

        by="prompt" keeps a prompt's rows together, "cycle" does not (RADAR).
        """
        unit = self.prompts if by == "prompt" else np.arange(len(self))
        units = np.unique(unit)
        count = round(HELD_OUT_FRAC * len(units))
        if not 0 < count < len(units):
            why = f"holding out {HELD_OUT_FRAC} of {len(units)} {by}s leaves one side empty"
            raise SpecdecError(f"{why}; record more prompts.")
        held = np.isin(unit, np.random.default_rng(seed).permutation(units)[:count])
        return np.flatnonzero(~held), np.flatnonzero(held)


def training_turns(trace: Trace, prompts: tuple[str, ...]) -> Trace:
    """Part "train" of the suites called `prompts` (toy/gsm8k is gsm8k); () or none there: all."""
    train = trace.select(part="train")
    meant = train.turns["suite"].str.rpartition("/")[2].isin(prompts).to_numpy()
    if meant.any():
        return train.select(meant)
    if prompts:
        why = f"no training prompt of {prompts} was recorded"
        warn(f"{why}, so all recorded suites are learned from.")
    return train


def rows_for(config: RadarConfig, trace: Trace) -> RadarData:
    """The training rows of `trace` for `config`: part "train" of its suites."""
    turns = training_turns(trace, config.prompts)
    return from_trace(turns, exact=config.exact, flat_nodes=config.flat_nodes, tree=config.tree)


def from_trace(trace: Trace, *, exact=None, flat_nodes=None, tree: TreeConfig = TREE) -> RadarData:
    """The data set of a recording of trees of k = 10 and depth >= 7, or of trees like `tree`.

    exact: False takes every position, with the accepted length in place of the distribution.
    None takes those with recorded distributions (T = 1) if there are any. flat_nodes: 59 as in
    RADAR, where a single draft call yields a flat tree of so many tokens, or None for the
    engine's 10 children, whose distribution is derived from the deeper trees.
    """
    shape = (tree.top_k, tree.beam)
    depth = trace.depth_of(*shape)
    if depth < DECISIONS:
        why = f"RADAR's data need trees of depth {DECISIONS}, not {depth}"
        raise SpecdecError(f"{why}; record deeper ones.")
    # 1. the positions and their distributions
    recorded = distributions_of(trace, exact, tree)
    if recorded is None:
        rows = np.arange(len(trace))
        accepted = []
        for a, nodes in enumerate(_nodes(tree)):
            accepted.append(trace.accepted_tok(rows, tree.top_k, a, nodes, tree.beam))
        if flat_nodes:
            accepted[0] = trace.column("root_rank")[rows] < flat_nodes
        lengths = np.stack(accepted, axis=1).astype(np.int64)
        distributions = (lengths[..., None] == np.arange(LENGTHS)).astype(np.float32)
    else:
        rows = np.asarray(recorded[0])
        distributions = recorded[1].copy()
        if not flat_nodes:
            # the root's ten children, derived from the deeper trees
            outside = distributions[:, 1:, 0].min(-1)
            distributions[:, 0] = 0
            distributions[:, 0, :2] = np.stack((outside, 1 - outside), axis=1)
    # 2. the scores of each level
    scores = trace.column("scores", *shape)[rows]
    ends = [pool_size(n, *shape) for n in range(STOPS)]
    levels = np.split(scores[:, : ends[-1]], ends[:-1], axis=1)
    states = np.stack([controller.best_scores(level, tree=tree) for level in levels], axis=1)
    # 3. where they come from
    prompt = trace.turns.groupby(["suite", "prompt"], sort=False).ngroup().to_numpy()
    prompts = np.repeat(prompt, trace.turns["positions"].to_numpy())[rows].astype(np.int32)
    names = ("key", "pair", "pair_key", "dtype", "temperature", "seed")
    header = {name: trace.header.get(name) for name in names}
    header |= {"flat_nodes": flat_nodes, "exact": recorded is not None}
    return RadarData(states, distributions, prompts, trace.context_tok[rows], header)


def distributions_of(trace: Trace, exact: bool | None = None, tree: TreeConfig = TREE):
    """`trace.acceptance_distributions`, or None: of another tree, or with exact=False."""
    recorded = trace.acceptance_distributions
    if exact is False or recorded is None or not len(recorded[0]) or tree != TREE:
        return None
    return recorded


def _nodes(tree: TreeConfig) -> list[int]:
    """Verified nodes after 0..7 expansions."""
    pools = [pool_size(a, tree.top_k, tree.beam) for a in range(STOPS)]
    return [min(tree.verify_nodes, pool) for pool in pools]


def latency_ms(costs: CostModel, context_tok, flat_nodes=None, tree: TreeConfig = TREE):
    """l(a), float64 [Q, 8]: a cycle with a expansions, and the questions up to there.

    A question costs costs.question_ms plus costs.policy_ms of "radar" (0 if missing).
    """
    a = np.arange(STOPS)
    context_tok = np.asarray(context_tok)[:, None]
    nodes = np.array(_nodes(tree))
    if flat_nodes:
        nodes[0] = flat_nodes
    cycles = costs.draft_ms(tree.top_k, a[None], context_tok, tree.beam) + costs.rest_ms
    cycles = cycles + costs.verify_ms(nodes[None], context_tok)
    question_ms = costs.question_ms + costs.policy_ms.get("radar", 0.0)
    return cycles + np.minimum(a + 1, DECISIONS) * question_ms


class RadarNetwork(nn.Module):
    """LSTM(10 -> 128) and a head on [its output, the state]: scores [B, T, 10] -> [B, T, 2]."""

    def __init__(self, continue_bias: float = 0.0):
        super().__init__()
        self.lstm = nn.LSTM(STATE, HIDDEN, batch_first=True)
        first = nn.Linear(HIDDEN + STATE, HIDDEN)
        last = nn.Linear(HIDDEN, controller.ACTIONS)
        self.mlp = nn.Sequential(first, nn.ReLU(), nn.Dropout(DROPOUT), last)
        with torch.no_grad():
            last.bias[CONTINUE] += continue_bias

    def forward(self, scores: Tensor) -> Tensor:
        return self.mlp(torch.cat((self.lstm(scores)[0], scores), dim=-1))


def stop_log_probs(logits: Tensor) -> Tensor:
    """Logits [B, 7, 2] -> log-probability [B, 8] of stopping after a = 0..7 expansions."""
    log_probs = logits.log_softmax(-1)
    continued = nn.functional.pad(log_probs[..., CONTINUE].cumsum(1), (1, 0))
    return continued + nn.functional.pad(log_probs[..., STOP], (0, 1))


def discounted(steps: Tensor, gamma: float) -> Tensor:
    """1 + gamma + ... + gamma ** (steps - 1)."""
    return steps if gamma == 1 else (1 - gamma**steps) / (1 - gamma)


def returns_to_go(stops: Tensor, final: Tensor, alpha: float, gamma: float) -> Tensor:
    """G [B, 7] of Eq. 7: discounted reward from decision j on, zero after the stop.

    -alpha per continue, `final` [B] at stop `stops` [B] (7: one step after the last decision).
    """
    to_go = stops[:, None] - torch.arange(DECISIONS)
    ahead = to_go.clamp(min=0).to(final.dtype)
    returns = gamma**ahead * final[:, None] - alpha * discounted(ahead, gamma)
    return torch.where(to_go >= 0, returns, 0.0)


class Rows(NamedTuple):
    """Some rows as float32 tensors."""

    scores: Tensor  # [B, 7, 10]
    distributions: Tensor  # [B, 8, 9]
    expected: Tensor  # [B, 8]
    latency_ms: Tensor  # [B, 8]

    def at(self, rows: Tensor) -> Rows:
        return Rows(*(tensor[rows] for tensor in self))


def rows_of(data: RadarData, latency: np.ndarray) -> Rows:
    arrays = (data.scores[:, :DECISIONS], data.distributions, data.expected, latency)
    return Rows(*(torch.from_numpy(np.array(array, dtype=np.float32)) for array in arrays))


def loss_of(config: RadarConfig, logits: Tensor, batch: Rows, rate: float, step_ms: float):
    """The loss for logits [B, 7, 2]: minus the expected return, or REINFORCE's surrogate.

    rate: tokens per ms. step_ms: T_d + T_p, the time of one more expansion and question.
    """

    def final_rewards(lengths: Tensor, latency: Tensor) -> Tensor:
        if config.count_bonus:
            lengths = lengths + 1
        if config.objective == "lagrangian":
            return lengths - rate * latency
        return BETA_FACTOR * step_ms * lengths / latency

    log_probs = logits.log_softmax(-1)
    # 1. every stop
    if config.gradient != "sampled":
        a = torch.arange(STOPS, dtype=logits.dtype)
        final = final_rewards(batch.expected, batch.latency_ms)
        returns = config.gamma**a * final - config.alpha * discounted(a, config.gamma)
        if config.gradient == "advantage":
            return advantage_loss(logits, returns)
        return -(stop_log_probs(logits).exp() * returns).sum(1).mean()
    # 2. one drawn stop and one drawn length; CONTINUE is 1
    actions = torch.bernoulli(log_probs[..., CONTINUE].detach().exp()).long()
    stops = actions.cumprod(1).sum(1)
    rows = torch.arange(len(stops))
    lengths = torch.multinomial(batch.distributions[rows, stops], 1)[:, 0].to(logits.dtype)
    final = final_rewards(lengths, batch.latency_ms[rows, stops])
    returns = returns_to_go(stops, final, config.alpha, config.gamma)
    return -(log_probs.gather(-1, actions[..., None])[..., 0] * returns).mean()


def advantage_loss(logits: Tensor, returns: Tensor) -> Tensor:
    """|advantage of continuing| times the better side's log-loss. returns [B, 8] of each stop.

    The value of continuing is that of the current policy (arg-max).
    """
    # a decision that is wrong and certain still moves; the exact gradient vanishes there
    margin = logits[..., CONTINUE] - logits[..., STOP]
    gains = []
    with torch.no_grad():
        value = returns[:, -1]
        for j in range(DECISIONS - 1, -1, -1):
            gains.append(value - returns[:, j])
            value = torch.where(margin[:, j] > 0, value, returns[:, j])
        gain = torch.stack(gains[::-1], dim=1)
    return (gain.abs() * nn.functional.softplus(-gain.sign() * margin)).sum(1).mean()


@torch.no_grad()
def stop_probs(network: nn.Module, batch: Rows, greedy: bool) -> Tensor:
    """P(stop = a) [Q, 8] of sampled actions or, greedy, of the likelier ones (ties: stop)."""
    network.eval()
    logits = torch.cat([network(part) for part in batch.scores.split(4096)])
    network.train()
    if not greedy:
        return stop_log_probs(logits).exp()
    continues = (logits[..., CONTINUE] > logits[..., STOP]).long()
    return nn.functional.one_hot(continues.cumprod(1).sum(1), STOPS).to(logits.dtype)


def throughput(probs: Tensor, batch: Rows) -> float:
    """E[L + 1] / E[l], bonus token included: tokens per millisecond."""
    probs = probs.double()
    new_tok = (probs * (batch.expected.double() + 1)).sum(1)
    return float(new_tok.sum() / (probs * batch.latency_ms.double()).sum(1).sum())


def constant_rates(batch: Rows) -> Tensor:
    """Float64 [8]: the throughput of always stopping after a expansions."""
    return (batch.expected.double() + 1).sum(0) / batch.latency_ms.double().sum(0)


def clairvoyant_rate(batch: Rows) -> float:
    """The best throughput given every row's expected lengths: Dinkelbach's iteration."""
    rate = 0.0
    faster = float(constant_rates(batch).max())
    while faster > rate * (1 + 1e-12):
        rate = faster
        best = (batch.expected.double() + 1 - rate * batch.latency_ms.double()).argmax(1)
        faster = throughput(nn.functional.one_hot(best, STOPS), batch)
    return rate


class Trained(NamedTuple):
    """policy: the kept epoch. curve: one row per epoch. results: tokens per ms, held out."""

    policy: controller.RadarPolicy
    curve: pd.DataFrame
    results: dict


@undisturbed()
def train_radar(
    data, costs, config="ours", *, out_dir: Path, seed=0, trained_for=None, resume=True
) -> Trained:
    """Train one controller and write it to out_dir/policy; the same call continues a stopped run.

    data: a recording, whose part "train" is used, or rows made by `from_trace`. costs: a cost
    model, or l(a) as [8] or [Q, 8]. config: a RadarConfig or a name of CONFIGS. trained_for:
    further facts to store in the policy.
    """
    config = named(config, controller.CONFIGS, "RADAR")
    facts = trained_for or {}
    # 1. rows and their times
    if isinstance(data, Trace):
        facts = {"pair": data.header["pair"], "costs": getattr(costs, "name", None), **facts}
        data = rows_for(config, data)
    flat_nodes = data.header.get("flat_nodes")
    if isinstance(costs, CostModel):
        costs = latency_ms(costs, data.context_tok, flat_nodes, config.tree)
    latency = np.broadcast_to(np.asarray(costs, dtype=np.float64), (len(data), STOPS))
    if latency.min() <= 0 or (np.diff(latency, axis=-1) <= 0).any():
        why = "latency_ms must be above 0 and grow with every expansion"
        raise SpecdecError(f"{why}; look at the cost model.")
    # 2. epochs
    arrays = (data.scores, data.distributions, data.prompts, data.context_tok, latency)
    content = b"".join(array.tobytes() for array in arrays)
    settings = {"training": config, "seed": seed, "steps": config.epochs}
    settings["data"] = hashlib.sha256(content).hexdigest()
    run = TrainingRun(Path(out_dir), settings, resume)
    learned, held = data.split(config.split_by)
    rows = rows_of(data, latency)
    trainer = _Trainer(config, rows.at(learned), rows.at(held), seed)
    run.track({"network": trainer.network, "best": trainer.best}, [trainer.optimizer])
    run.run(trainer.epoch, f"radar, seed {seed}", trainer.rate_factor, all_or_nothing=True)
    # 3. the policy of the kept epoch
    policy = config.policy(seed=seed, flat_nodes=flat_nodes)
    weights = {name: value.numpy() for name, value in trainer.best.weights.items()}
    policy.network = policy.build_network(weights)
    counts = {"rows": len(learned), "questions": len(np.unique(data.prompts[learned]))}
    counts["lengths"] = "exact distributions" if data.header.get("exact") else "one length each"
    policy.trained_for = {"seed": seed, "data": data.header, "training": runs.plain(config)}
    deviations = [line.format_map(counts) for line in config.deviations]
    policy.trained_for |= {**facts, "deviations": deviations}
    chose(policy, "weights and epoch", "train", f"recipe {config.name!r}, chosen before")
    policy.save(Path(out_dir) / "policy")
    # 4. what it reaches
    results = trainer.judge()
    run.finish(**results)
    return Trained(policy, run.table(), results)


class _Trainer:
    """Rows, network and optimiser of a run, and one epoch."""

    def __init__(self, config: RadarConfig, train: Rows, held_out: Rows, seed: int):
        self.config = config
        self.train = train
        self.held_out = held_out
        self.seed = seed
        with seeded(seed, -1):
            self.network = RadarNetwork(config.continue_bias)
        self.best = Best(self.network)
        rates = {"lr": config.learning_rate, "weight_decay": config.weight_decay}
        self.optimizer = torch.optim.Adam(self.network.parameters(), **rates)
        self.optimizer.param_groups[0]["peak"] = config.learning_rate
        # T_d + T_p: the average cost of one more expansion and question
        self.step_ms = float((train.latency_ms[:, 6] - train.latency_ms[:, 0]).mean() / 6)
        rates = constant_rates(train)
        self.constant = int(rates.argmax())
        self.constant_rate = float(rates.max())

    def rate_factor(self, epoch: int, last_epoch: int) -> float:
        """The learning rate as a fraction of the first: cosine down to LAST_RATE."""
        low = min(1.0, LAST_RATE / self.config.learning_rate)
        return low + (1 - low) * (1 + math.cos(math.pi * epoch / last_epoch)) / 2

    def epoch(self, number: int, _) -> dict:
        """One pass over the training rows, then an evaluation; returns the curve's row."""
        config = self.config
        # 1. the value of time: tokens per ms that a constant can reach, or the policy has
        rate = self.constant_rate
        if config.objective == "lagrangian":
            likelier = stop_probs(self.network, self.train, greedy=True)
            rate = max(rate, throughput(likelier, self.train))
        # 2. steps
        losses = []
        with seeded(self.seed, number):
            for rows in torch.randperm(len(self.train.scores)).split(config.batch):
                batch = self.train.at(rows)
                loss = loss_of(config, self.network(batch.scores), batch, rate, self.step_ms)
                losses.append(descend(self.optimizer, loss, CLIP))
            held_out_loss = self._held_out_loss(rate)
        # 3. the best epoch is kept
        score = -held_out_loss
        if config.select_by == "throughput":
            probs = stop_probs(self.network, self.held_out, config.temperature is None)
            score = throughput(probs, self.held_out)
        self.best.consider(self.network.state_dict(), score, number)
        likelier = stop_probs(self.network, self.held_out, greedy=True)
        return {
            "loss": float(np.mean(losses)),
            "rate_per_ms": rate,
            "held_out_loss": held_out_loss,
            "tok_per_ms": throughput(likelier, self.held_out),
            "draft_calls": float((likelier @ torch.arange(1.0, STOPS + 1)).mean()),
        }

    @torch.no_grad()
    def _held_out_loss(self, rate: float) -> float:
        self.network.eval()
        loss = 0.0
        count = len(self.held_out.scores)
        for rows in torch.arange(count).split(4096):
            part = self.held_out.at(rows)
            logits = self.network(part.scores)
            loss += loss_of(self.config, logits, part, rate, self.step_ms).item() * len(rows)
        return loss / count

    def judge(self) -> dict:
        """The kept epoch on held-out rows, beside the constant that was best in training."""
        held = self.held_out
        self.best.load_into(self.network)
        probs = stop_probs(self.network, held, self.config.temperature is None)
        shares = probs.mean(0)
        rate = throughput(probs, held)
        constant = float(constant_rates(held)[self.constant])
        return {
            "tok_per_ms": rate,
            "constant_tok_per_ms": constant,
            "gain_frac": rate / constant - 1,
            "known_lengths_tok_per_ms": clairvoyant_rate(held),
            "draft_calls": float((shares * torch.arange(1, STOPS + 1)).sum()),
            "most_common_frac": float(shares.max()),
        }
