"""Recordings for tests: synthetic ones, and a cost model of round numbers."""

import numpy as np
import pandas as pd

from specdec.core.policy import RandomPolicy
from specdec.core.tree_config import CopiedTree, TreeConfig, pool_size
from specdec.costs.model import CostModel
from specdec.replays.trace import NEVER, SCHEMA, Column, Trace, path_ranks


def round_costs(**fields) -> CostModel:
    """A machine whose times are easily added up: milliseconds without slopes unless given."""
    values = dict(name="round numbers", kind="roofline", provenance="made up for tests")
    values |= dict(widths=(1, 32), root=(1.0, 1.0), root_per_tok=(0.0, 0.0))
    values |= dict(expand=(0.5, 0.5), expand_per_tok=(0.0, 0.0))
    values |= dict(nodes=(0, 10, 240), verify=(4.0, 5.0, 28.0), verify_per_tok=(0.0, 0.0, 0.0))
    values |= dict(step=4.0, rest_ms=0.25, question_ms=0.0)
    return CostModel(**{**values, **fields})


def synthetic_trace(
    turns=6,
    positions=40,
    depth=4,
    top_ks=(3,),
    most_nodes=20,
    seed=0,
    hit=0.7,
    features=8,
    trees=True,
) -> Trace:
    """A recording without a model: scores as a drafter would give them.

    hit: how likely the target's next token is among the drafted ones, on average.
    """
    random = np.random.default_rng(seed)
    columns = {}
    count = turns * positions
    easy = np.clip(random.normal(hit, 0.2, count), 0.05, 0.98)
    columns["features"] = random.normal(size=(count, features)).astype(np.float16)
    columns["features"][:, 0] = easy
    for top_k in top_ks:
        scores, tokens, beams, nodes = _forest(random, easy, depth, top_k)
        columns[Column("ranks", top_k)] = path_ranks(scores, nodes, top_k)
        if trees:
            columns |= {
                Column("scores", top_k): scores,
                Column("tokens", top_k): tokens,
                Column("beams", top_k): beams,
            }
    first = np.arange(turns) * positions
    table = pd.DataFrame(
        {
            "suite": [("easy", "hard")[turn % 2] for turn in range(turns)],
            "prompt": [f"p{turn}" for turn in range(turns)],
            "turn": 0,
            "part": [("train", "test")[turn % 4 // 2] for turn in range(turns)],
            "prompt_tok": 5 + first % 7,
            "kept_tok": positions + 1,
            "first": first,
            "positions": positions,
            "piece": first,
        }
    )
    contexts = table["prompt_tok"].to_numpy()[:, None] + np.arange(positions)
    columns["context_tok"] = contexts.reshape(-1).astype(np.int32)
    columns["root_rank"] = np.minimum(columns[Column("ranks", top_ks[0])][:, 0, 0], NEVER)
    header = dict(schema=SCHEMA, pair="synthetic", features=True, dtype="float32")
    return Trace(header | dict(depth=depth, top_ks=top_ks, most_nodes=most_nodes), table, columns)


def _forest(random, easy, depth, top_k):
    """Scores [R, C], tokens, beams and path nodes of random trees; `easy`: chance to continue."""
    count = len(easy)
    best = np.zeros((len(easy), 1))
    scores = []
    beams = []
    nodes = np.full((len(easy), depth + 1), -1)
    alive = np.ones(count, dtype=bool)
    row = np.zeros(count, dtype=int)
    start = 0
    for level in range(depth + 1):
        sharp = easy[:, None, None] * 6
        logits = -np.sort(random.exponential(1.0, (count, best.shape[1], top_k)) * sharp, axis=2)
        log_probs = logits - np.log(np.exp(logits).sum(2, keepdims=True) + 0.05)
        level_scores = (best[:, :, None] + log_probs).reshape(count, -1).astype(np.float32)
        child = np.minimum(random.geometric(0.6, count) - 1, top_k - 1)
        alive &= random.random(count) < easy
        flat = row * top_k + child
        nodes[alive, level] = start + flat[alive]
        chosen = np.argsort(-level_scores, axis=1, kind="stable")[:, :top_k]
        if level < depth:
            inside = chosen == flat[:, None]
            alive &= inside.any(1)
            row = inside.argmax(1)
            beams.append(chosen.astype(np.int16))
        scores.append(level_scores)
        start += level_scores.shape[1]
        best = np.take_along_axis(level_scores, chosen, 1)
    joined = np.concatenate(scores, axis=1)
    assert joined.shape[1] == pool_size(depth, top_k)
    tokens = np.tile(np.arange(joined.shape[1], dtype=np.int32), (count, 1))
    return joined, tokens, np.stack(beams, 1), nodes


class RandomRecorded(RandomPolicy):
    """Random answers of the recorded widths at every question; copies alone now and then."""

    top_ks = (2, 3, 5)
    copies_frac = 0.0

    def answer(self, question):
        answer = super().answer(question)
        if not isinstance(answer, TreeConfig):
            return answer
        top_k = self._random.choice(self.top_ks)
        most = min(self.limits.verify_nodes, top_k + answer.depth * top_k * top_k)
        total = self._random.randint(1, most + 1)
        copies = self._random.random() < self.copies_frac
        return CopiedTree(total) if copies else TreeConfig(total, answer.depth, top_k)


# What trainings of controllers are tested with.
COSTS = round_costs()
TREE = dict(depth=4, top_k=3)
GRID = dict(
    totals=(3, 8, 16), depths=(2, 3, 4), widths=(3,), starter=(8, 3, 3), hidden_size=4, layers=2
)
SMALL = dict(pi=(16,), vf=(16,), n_steps=64, batch_size=32, n_epochs=1)
# The same as changes of a config (`policies.base.changed`).
SMALL_PPO = {**SMALL, "total_steps": 64}
SMALL_RESPS = {**GRID, "per_layer": False, "select": False} | {
    f"ppo.{name}": SMALL_PPO[name] for name in SMALL_PPO
}
SMALL_LTD = {
    "select": False,
    "depth.total_tokens": 8,
    "size.sizes": (1, 4, 8, 20),
    "size.drafted": 4,
}
SMALL_LTD |= {f"{kind}.{name}": TREE[name] for kind in ("depth", "size") for name in TREE}
SMALL_LTD |= {
    f"{kind}.ppo.{name}": SMALL_PPO[name] for kind in ("depth", "size") for name in SMALL_PPO
}
