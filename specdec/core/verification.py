"""From logits to tokens: one verification rule for every temperature.

At every position T the target picks

    token = argmax(warp(logits) + noise(seed, T)),     noise 0 at temperature 0, Gumbel above it.

The noise depends on the text's seed and the position alone, and that seed on `decode`'s and the
prompt (`text_seed`), so texts of different prompts are independent. A walk down a tree, while a
child carries the picked token, yields exactly the text of plain sampling with that seed, whatever
the tree. Warping is transformers' own.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Container, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.generation import logits_process as hf

from specdec.core.tree import DraftTree
from specdec.errors import SpecdecError, check_integer, check_name, check_number

WARPERS = ("top_k", "top_p", "min_p", "repetition_penalty")


def make_warpers(
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
) -> hf.LogitsProcessorList:
    """transformers' processors in its order: penalty, temperature, top-k, top-p, min-p.

    At temperature 0 only the penalty matters. SpecdecError for bad values.
    """
    check_number("temperature", temperature)
    # a smaller one would make the logits overflow
    if 0 < temperature < 1e-12:
        raise SpecdecError(f"temperature must be 0 or at least 1e-12, got {temperature!r}.")
    check_number("top_p", top_p, high=1.0)
    check_number("min_p", min_p, high=1.0)
    check_number("repetition_penalty", repetition_penalty, low=1e-6)
    check_integer("top_k", top_k, 0)
    warpers = hf.LogitsProcessorList()
    if repetition_penalty != 1.0:
        warpers.append(hf.RepetitionPenaltyLogitsProcessor(penalty=float(repetition_penalty)))
    if temperature not in (0, 1):
        warpers.append(hf.TemperatureLogitsWarper(float(temperature)))
    if temperature and top_k:
        warpers.append(hf.TopKLogitsWarper(top_k=top_k))
    if temperature and top_p < 1.0:
        warpers.append(hf.TopPLogitsWarper(top_p=float(top_p)))
    if temperature and min_p > 0.0:
        warpers.append(hf.MinPLogitsWarper(min_p=float(min_p)))
    return warpers


def mixed_seed(seed: int, number: int) -> int:
    """A seed that depends on both."""
    digest = hashlib.blake2b(struct.pack("<qq", seed, number), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def text_seed(seed: int, prompt: Sequence[int], visit: int = 0) -> int:
    """The seed of one text's noise: of these prompt ids, decoded for the k-th time (`visit`)."""
    key = struct.pack(f"<qq{len(prompt)}q", seed, visit, *prompt)
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 1


def gumbel_noise(
    seed: int, position: int, vocab_size: int, device: torch.device | None = None
) -> Tensor:
    """Gumbel noise [V] of (seed, position) alone: -log(E) of a standard exponential E.

    float64, so that even the rarest token keeps its probability.
    """
    generator = torch.Generator(device=device or "cpu").manual_seed(mixed_seed(seed, position))
    exponential = torch.empty(vocab_size, dtype=torch.float64, device=device)
    return exponential.exponential_(generator=generator).log_().neg_()


# processors whose rows do not depend on the order of their ids
BY_ROW = {
    hf.RepetitionPenaltyLogitsProcessor,
    hf.TemperatureLogitsWarper,
    hf.TopKLogitsWarper,
    hf.TopPLogitsWarper,
    hf.MinPLogitsWarper,
}


class Picker:
    """The rule by which every method here turns the target's logits into tokens.

    warpers: a `LogitsProcessorList`, called with (ids so far [1, T], logits [1, V]) in float32.
    sample: False picks the arg-max of the processed logits, True samples with the seeded noise.
    """

    def __init__(
        self, warpers: hf.LogitsProcessorList | None = None, sample: bool = False, seed: int = 0
    ):
        self.warpers = warpers or hf.LogitsProcessorList()
        self.sample = bool(sample)
        self.seed = int(seed)
        if not -(1 << 63) <= self.seed < 1 << 63:
            raise SpecdecError(f"seed must fit into 64 bits, got {seed}.")

    @staticmethod
    def from_settings(temperature: float = 0.0, seed: int = 0, **settings: Any) -> Picker:
        """The picker of `decode`: temperature, seed, top_k, top_p, min_p, repetition_penalty."""
        for name in settings:
            check_name("setting", name, ("temperature", "seed", *WARPERS))
        return Picker(make_warpers(temperature, **settings), sample=temperature > 0, seed=seed)

    def of_text(self, prompt: Sequence[int], visit: int = 0) -> Picker:
        """The same rule with the noise of one text: of these prompt ids, for the k-th time."""
        return Picker(self.warpers, self.sample, text_seed(self.seed, prompt, visit))

    @staticmethod
    def whole_trees(device: torch.device) -> bool:
        """Whether sampling picks all tokens of a tree at once, so that nothing waits for a GPU."""
        return device.type != "cpu"

    def probabilities(self, logits: Tensor, ids: Tensor) -> Tensor:
        """The distribution [V] that `pick` draws from: a point mass when greedy."""
        warped: Tensor = self.warpers(ids[None], logits.float()[None])[0]
        if self.sample:
            return warped.softmax(-1)
        return torch.zeros_like(warped).index_fill_(0, warped.argmax(), 1.0)

    def scores(self, logits: Tensor, ids: Tensor) -> Tensor:
        """What `pick` takes the arg-max of, [V]: warped logits, and noise when sampling."""
        warped = self.warpers(ids[None], logits.float()[None])[0]
        if self.sample:
            noise = gumbel_noise(self.seed, ids.shape[0], warped.shape[0], warped.device)
            warped = warped.double() + noise
        return warped

    def pick(self, logits: Tensor, ids: Tensor) -> int:
        """The token that follows `ids` (int64 [T]), given the target's logits [V] after them."""
        return int(self.scores(logits, ids).argmax())

    def pick_tree(self, tree: DraftTree, logits: Tensor, committed: Tensor) -> Tensor | None:
        """The picks after all nodes, int64 [N]; None where node by node is better.

        Processors not known to accept rows of any history always see the node's own path.
        """
        if not self.sample and not self.warpers:
            return logits.max(-1).indices
        kinds = {type(warper) for warper in self.warpers}
        if not self.whole_trees(logits.device) or not kinds <= BY_ROW:
            return None
        # 1. what the processors see of each node's context: a penalty needs its whole path
        ids = committed[-1:].expand(len(tree), 1)
        if hf.RepetitionPenaltyLogitsProcessor in kinds:
            # padded with the root, which has been seen anyway
            drafted = tree.token[tree.lineage().clamp_(min=0)]
            ids = torch.cat((committed.expand(len(tree), -1), drafted), dim=1)
        scores: Tensor = self.warpers(ids, logits.float())
        # 2. nodes of one depth share the noise of their position
        if self.sample:
            positions = range(len(committed), len(committed) + tree.levels + 1)
            vocab_size = scores.shape[1]
            noise = [gumbel_noise(self.seed, p, vocab_size, scores.device) for p in positions]
            scores = scores.double() + torch.stack(noise)[tree.depth]
        return scores.max(-1).indices

    def walk(
        self, tree: DraftTree, logits: Tensor, committed: Tensor
    ) -> tuple[list[int], list[int]]:
        """The path through `tree` that the target takes, and its new tokens with the bonus.

        logits [N, V] from one forward over the tree; committed int64 [T]: all up to the root.
        """
        picks = self.pick_tree(tree, logits, committed)
        if picks is not None:
            # one read-back of all that the walk needs
            tokens, parents, picked = torch.stack((tree.token, tree.parent, picks)).tolist()
            return accept(tokens, parents, lambda node, path: picked[node])
        tokens, parents = torch.stack((tree.token, tree.parent)).tolist()

        def pick(node: int, path: list[int]) -> int:
            return self.pick(logits[node], torch.cat((committed, tree.token[path[1:]])))

        return accept(tokens, parents, pick)


def accept(
    tree_tokens: Sequence[int], tree_parents: Sequence[int], pick: Callable[[int, list[int]], int]
) -> tuple[list[int], list[int]]:
    """Walk from the root while a child carries the picked token.

    Returns (path, root first; the picks after each, the last one the bonus). pick(node, path): the
    target's choice. With several children of one token the earliest counts.
    """
    # copied and drafted candidates may give a node two children with one token
    child: dict[tuple[int, int], int] = {}
    for node in range(1, len(tree_tokens)):
        child.setdefault((tree_parents[node], tree_tokens[node]), node)
    path = [0]
    picked = [pick(0, path)]
    while (path[-1], picked[-1]) in child:
        path.append(child[path[-1], picked[-1]])
        picked.append(pick(path[-1], path))
    return path, picked


def acceptance_distribution(tree: DraftTree, target_probs: Tensor) -> Tensor:
    """Exact distribution of accepted_tok for a tree whose children are fixed. float64 [levels + 1].

    target_probs [N, V]: the target's (warped) distribution after each node. The walk ends at a node
    with the product of probabilities along its path times the mass outside its children. (RADAR,
    section 4.)
    """
    device = target_probs.device
    token_probs = torch.ones(len(tree), dtype=torch.float64, device=device)
    token_probs[1:] = target_probs.double()[tree.parent[1:], tree.token[1:]]
    reached = torch.where(tree.ancestors, token_probs.log()[None, :], 0.0).sum(1).exp()
    ended = reached.clone().index_add_(0, tree.parent[1:], -reached[1:])
    lengths = torch.zeros(tree.levels + 1, dtype=torch.float64, device=device)
    return lengths.index_add_(0, tree.depth, ended.clamp_(min=0.0))


def truncate(
    tokens: Sequence[int], stop_tokens: Container[int], max_new_tokens: int | None = None
) -> list[int]:
    """The tokens that count: at most `max_new_tokens`, ending with the first stop token."""
    counted = []
    for token in tokens[:max_new_tokens]:
        counted.append(token)
        if token in stop_tokens:
            break
    return counted
