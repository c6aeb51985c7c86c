"""Fits the classifiers among the heuristics, Disco, SpecDec++ and C2T, to recordings of EAGLE-3.

Balanced samples and AdamW at 1e-4, as in LTD's appendix A.1. `*_arrays` compute inputs and labels
from a trace, `fit` trains on arrays and writes the policy.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from specdec.core.policy import Policy
from specdec.core.tree_config import pool_size
from specdec.errors import SpecdecError
from specdec.policies import heuristics
from specdec.policies.base import Network
from specdec.replays.trace import Trace
from specdec.training.loop import TrainingRun, descend, seeded

KINDS = {"Disco": heuristics.Disco, "C2T": heuristics.C2T, "SpecDec++": heuristics.SpecDecPlus}
EPOCHS = {"Disco": 50, "C2T": 50, "SpecDec++": 5}  # LTD's appendix A.1, and SpecDec++'s own
HIDDEN = {"Disco": 128, "C2T": 64, "SpecDec++": 1024}


def disco_arrays(trace: Trace, *, max_depth=12, verify_nodes=60, top_k=10) -> tuple:
    """(inputs float32 [M, top_k + 2], labels bool [M]): every question that Disco could get.

    Label after n expansions: whether the tree holds the target's token at depth n + 1.
    """
    scores, ranks = trace.column("scores", top_k), trace.ranks[top_k]
    inputs, labels, parents = [], [], np.zeros((len(trace), 1), dtype=np.float32)
    start = 0
    for n in range(min(max_depth, trace.depth + 1)):
        end = pool_size(n, top_k)
        newest = scores[:, start:end]
        groups = newest.reshape(len(trace), -1, top_k)
        inputs.append(heuristics.disco_inputs(groups, parents, n, top_k))
        labels.append(ranks[:, n, n] < verify_nodes)
        # the next level is drafted from the likeliest nodes of this one
        parents = np.sort(newest, axis=-1)[:, : -top_k - 1 : -1]
        start = end
    return np.concatenate(inputs), np.concatenate(labels)


def specdec_plus_arrays(trace: Trace, *, max_depth=12, verify_nodes=60, top_k=10) -> tuple:
    """(features float16 [R, F], labels int8 [R, max_depth + 1]).

    1 if a level of the deepest tree holds the target's token, 0 at the first that does not, -1
    below it.
    """
    if trace.features is None:
        why = "SpecDec++ learns from the target's features"
        raise SpecdecError(f"{why}; record with features=True.")
    deepest = min(max_depth, trace.depth)
    accepted = trace.accepted_tok(np.arange(len(trace)), top_k, deepest, verify_nodes)[:, None]
    level = np.arange(max_depth + 1)
    labels = np.where(level < accepted, 1, np.where(level == accepted, 0, -1))
    labels[:, deepest + 1 :] = -1  # not recorded
    return trace.features, labels.astype(np.int8)


def c2t_arrays(trace: Trace, *, max_depth=8, top_k=10, seed=0) -> tuple:
    """(inputs float32 [M, 2], labels bool [M]).

    All nodes on the target's path, and as many others of the same pools.
    """
    depth, random = min(max_depth, trace.depth), np.random.default_rng(seed)
    count = pool_size(depth, top_k)
    scores = trace.column("scores", top_k)[:, :count]
    ranks = trace.ranks[top_k][:, depth, : depth + 1]
    depths = heuristics.node_depths(count, top_k)
    inputs, labels = [], []
    for row_scores, row_ranks in zip(scores, ranks, strict=True):
        path = row_ranks[row_ranks < count]
        if not len(path):
            continue
        order = np.argsort(-row_scores, kind="stable")  # ties to the earlier node, as in the tree
        rest = np.delete(order, path)  # a chain may be entirely on the path
        others = random.choice(rest, size=min(len(path), len(rest)), replace=False)
        nodes = np.concatenate((order[path], others))
        inputs.append(np.stack((row_scores[nodes], depths[nodes] / 10), axis=-1))
        labels.append(np.arange(len(nodes)) < len(path))
    if not inputs:
        raise SpecdecError("no target path enters any of these trees; record more positions.")
    return np.concatenate(inputs).astype(np.float32), np.concatenate(labels)


def fitted(name: str, trace: Trace, out_dir: Path, *, seed: int = 0, policy: dict) -> Policy:
    """The classifier of this name (a key of KINDS), fitted to a recording. policy: its settings."""
    arrays = {"Disco": disco_arrays, "C2T": c2t_arrays, "SpecDec++": specdec_plus_arrays}[name]
    tree = dict(policy)
    if name == "C2T":
        tree.pop("verify_nodes", None)
    return fit(name, *arrays(trace, **tree), Path(out_dir), seed=seed, policy=policy)[0]


class _Residual(nn.Module):
    """head(silu(gate(x)) + skip(x)): [B, F] -> [B, levels]."""

    def __init__(self, features: int, hidden: int, levels: int):
        super().__init__()
        self.gate, self.skip = nn.Linear(features, hidden), nn.Linear(features, hidden)
        self.head = nn.Linear(hidden, levels)

    def forward(self, features: Tensor) -> Tensor:
        return self.head(nn.functional.silu(self.gate(features)) + self.skip(features))


def exported(module: nn.Module) -> Network | heuristics.ResidualNetwork:
    """The trained module in numpy."""
    arrays = {name: value.numpy() for name, value in module.state_dict().items()}
    # policies run without torch
    if isinstance(module, _Residual):
        return heuristics.ResidualNetwork(arrays)
    weights = [arrays["0.weight"], arrays["2.weight"]]
    return Network(weights, [arrays["0.bias"], arrays["2.bias"]], "relu")


def _fresh(name: str, features: int, levels: int, seed: int) -> nn.Module:
    """The classifier's network with weights drawn from `seed`."""
    hidden = HIDDEN[name]
    module: nn.Module
    if name == "SpecDec++":
        module = _Residual(features, hidden, levels)
    else:
        module = nn.Sequential(nn.Linear(features, hidden), nn.ReLU(), nn.Linear(hidden, 1))
    with seeded(seed, -1):
        for layer in module.modules():
            if isinstance(layer, nn.Linear):
                layer.reset_parameters()
    return module


def fit(name, inputs, labels, out_dir, *, policy: dict, epochs=None, rate=1e-4, batch=256, seed=0):
    """(classifier, curve) of binary cross-entropy over a balanced sample; resumed if interrupted.

    policy: its settings; it is saved in out_dir/policy. curve: loss and accuracy by epoch.
    """
    kind = KINDS[name]
    epochs = EPOCHS[name] if epochs is None else epochs
    # 1. the network; of SpecDec++ the outputs are levels, balanced over (position, level) pairs
    module = _fresh(name, inputs.shape[1], labels.shape[-1], seed)
    if name == "SpecDec++":
        row, column = np.nonzero(labels >= 0)
        labels = labels[row, column] == 1
        inputs = heuristics.unit_features(inputs)
    else:
        row, column = np.arange(len(labels)), np.zeros(len(labels), dtype=int)
    optimizer = torch.optim.AdamW(module.parameters(), rate)
    # 2. the sample
    sample = balanced(labels, seed)
    examples = torch.from_numpy(np.ascontiguousarray(inputs, dtype=np.float32))
    row, column = torch.from_numpy(row[sample]), torch.from_numpy(column[sample])
    truth = torch.from_numpy(labels[sample]).float()
    # 3. the training

    def epoch(number: int, _) -> dict:
        total = right = 0
        # an epoch has its own order, so that a resumed one has it again
        with seeded(seed, number):
            order = torch.randperm(len(truth)).split(batch)
        for part in order:
            logits = module(examples[row[part]]).gather(1, column[part, None])[:, 0]
            loss = nn.functional.binary_cross_entropy_with_logits(logits, truth[part])
            total += descend(optimizer, loss) * len(part)
            right += int(((logits > 0) == (truth[part] > 0)).sum())
        return {"loss": total / len(truth), "accuracy": right / len(truth)}

    plan = {"kind": kind.__name__, "batch": batch, "seed": seed, "rate": rate, "steps": epochs}
    plan["data"] = hashlib.sha256(examples.numpy().tobytes() + labels.tobytes()).hexdigest()
    plan["shape"] = [list(weight.shape) for weight in module.parameters()]
    run = TrainingRun(out_dir, plan)
    run.track({"network": module}, [optimizer])
    run.run(epoch, kind.__name__, all_or_nothing=True)
    # 4. the policy
    classifier = kind(**policy)
    classifier.network = exported(module)
    classifier.trained_for = {"examples": len(truth), "epochs": epochs}
    classifier.save(out_dir / "policy")
    table = run.table()
    run.finish(**table.iloc[-1][["loss", "accuracy"]].to_dict())
    return classifier, table


def balanced(labels: np.ndarray, seed: int = 0) -> np.ndarray:
    """Indices of equally many positives and negatives, all of the rarer kind."""
    positive, negative = np.flatnonzero(labels), np.flatnonzero(~labels)
    count = min(len(positive), len(negative))
    if not count:
        raise SpecdecError("all labels are equal, so nothing can be learned; record more.")
    random = np.random.default_rng(seed)
    chosen = random.choice(positive, count, replace=False)
    return np.concatenate([chosen, random.choice(negative, count, replace=False)])
