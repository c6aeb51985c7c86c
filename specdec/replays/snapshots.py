"""Draft-and-verify cycles as plain data for display: the tree, questions and answers, the result
and the time.

    recording, turn, policy ──▶ Lane of Snapshots ◀── engine of a live turn

Recorded trees are pruned again in milliseconds, by the cycle that also decodes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from specdec.core.cycle import run_cycle
from specdec.core.pair import Pair
from specdec.core.policy import Chain, Policy, Static
from specdec.core.records import EXTEND, PLAN, SIZE, Cycle, Question
from specdec.core.tree_config import TreeConfig, pool_size
from specdec.costs.model import CostModel
from specdec.data.suites import SUITES, gather
from specdec.errors import SpecdecError
from specdec.policies.base import Learned
from specdec.policies.value import ValuePolicy
from specdec.replays.oracle import clairvoyant
from specdec.replays.replay import ReplayEngine
from specdec.replays.static_trees import beam_of, beam_text
from specdec.replays.trace import Trace, open_trace, parents
from specdec.stored import read_json

MOST_LISTED = 8  # of many actions or values, the best
# the parts of a cycle's time
PARTS = ("draft", "policy", "verify", "rest")
CLAIRVOYANT = "clairvoyant"
Nodes = tuple[np.ndarray, np.ndarray, np.ndarray]  # ids, parents and scores, the root first
Text = Callable[[int], str]  # of a token


@dataclass(frozen=True)
class Asked:
    """A question and its answer. Answers in nodes exclude the root, unlike total_tokens."""

    kind: str
    expansions: int
    answer: str
    # the choices that are listed, and their probabilities or predicted values in tokens
    labels: tuple[str, ...] = ()
    values: tuple[float, ...] = ()
    unit: str = ""  # probability or value
    chosen: int = -1  # index of the chosen one; -1 if it is not listed


@dataclass(frozen=True)
class Snapshot:
    """One cycle. Nodes are in creation order, the root first."""

    position: int  # index of the root among the new tokens
    tree: tuple[int, int, int]  # total_tokens, depth and k as drafted and verified
    # of each drafted node: text, parent (-1 for the root), draft log-probability from the root
    token: tuple[str, ...]
    parent: tuple[int, ...]
    score: tuple[float, ...]
    verified: tuple[bool, ...]  # whether each node was sent to the target
    accepted: tuple[int, ...]  # nodes of the accepted path, the root first
    bonus: str | None  # the target's own next token
    asked: tuple[Asked, ...]
    times: dict[str, float]  # milliseconds by PARTS
    kept_tok: int  # new tokens that count
    note: str = ""

    @property
    def total_ms(self) -> float:
        return sum(self.times.values())

    @property
    def accepted_tok(self) -> int:
        return len(self.accepted) - 1


@dataclass
class Lane:
    """One policy on one text. plain_ms: time of plain decoding up to each position, if known."""

    name: str
    tokens: list[str]
    cycles: list[Snapshot] = field(default_factory=list)
    plain_ms: list[float] = field(default_factory=list)

    def elapsed_ms(self, cycle: int) -> float:
        """Time up to the end of a cycle, without the prompt's own forward."""
        return sum(snapshot.total_ms for snapshot in self.cycles[: cycle + 1])

    def tokens_per_s(self, cycle: int) -> float:
        """Average speed up to the end of a cycle."""
        last = self.cycles[cycle]
        return 1e3 * (last.position + last.kept_tok) / max(self.elapsed_ms(cycle), 1e-9)

    def speedup(self, cycle: int) -> float | None:
        """Speed-up over plain decoding of the same tokens, None if its time is unknown."""
        end = self.cycles[cycle].position + self.cycles[cycle].kept_tok
        return self.plain_ms[end] / self.elapsed_ms(cycle) if self.plain_ms else None


@dataclass(frozen=True)
class Recording:
    """A trace with what its display needs: the text of every token, the prompts, the costs."""

    trace: Trace
    costs: CostModel
    texts: dict[int, str]
    prompts: tuple[str, ...]

    @property
    def top_ks(self) -> list[int]:
        """Widths whose whole trees were recorded, so that they can be drawn."""
        return sorted(self.trace.header["trees"])

    def text(self, token: int) -> str:
        return self.texts.get(int(token), f"#{int(token)}")


def recording_of(trace: Trace, pair: Pair, costs: CostModel) -> Recording:
    """A recording for display, from a trace and its pair."""
    recorded_pair = trace.header["pair"]
    if recorded_pair != pair.name:
        raise SpecdecError(f"this recording is of {recorded_pair!r}, not {pair.name!r}.")
    if not trace.header.get("trees"):
        raise SpecdecError("the recording keeps no whole trees; record with trees=(10,).")
    trace = trace.select(trace.turns["positions"].to_numpy() > 0)
    # 1. the text of every token of the texts and trees
    tokens = set(trace.text.ravel().tolist())
    for top_k in trace.header["trees"]:
        tokens.update(trace.trees(top_k).tokens.ravel().tolist())
    texts = token_texts(pair, sorted(tokens))
    # 2. the prompts; those that are from no suite have a name only
    texts_of: dict[tuple[str, int], str] = {}
    for suite in set(trace.turns["suite"]) & set(SUITES):
        for item in gather([suite]):
            texts_of |= {(item.id, turn): str(text) for turn, text in enumerate(item.turns)}
    keys = zip(trace.turns["prompt"], trace.turns["turn"], strict=True)
    prompts = [texts_of.get(key, key[0]) for key in keys]
    return Recording(trace, costs, texts, tuple(prompts))


def open_recording(folder: Path, costs: CostModel | None = None) -> Recording:
    """Open a recording that ships: a trace beside texts.json and, if not given, costs.json."""
    trace = open_trace(folder)
    stored = read_json(folder / "texts.json", advice="take the shipped one")
    texts = {int(token): text for token, text in stored["texts"].items()}
    costs = costs or CostModel.load(folder / "costs.json")
    return Recording(trace, costs, texts, tuple(stored["prompts"]))


def token_texts(pair: Pair, ids: Iterable[int]) -> dict[int, str]:
    """The text of each token id within a text, with its space; numbers without a tokenizer."""
    tokenizer: Any = pair.tokenizer
    if tokenizer is None:
        return {token: f"#{token}" for token in ids}
    # some tokenizers drop a text's first space, so a plain token goes before
    before = tokenizer.encode("a", add_special_tokens=False)[-1:]
    head = tokenizer.decode(before)
    texts: dict[int, str] = {}
    for token in ids:
        text = tokenizer.decode([*before, token])
        alone = token in tokenizer.all_special_ids or not text.startswith(head)
        texts[token] = tokenizer.decode([token]) if alone else text[len(head) :]
    return texts


# Questions and answers


class Watched(Chain):
    """`policy` with its questions in this cycle, its answers, and its network's outputs."""

    def __init__(self, policy: Policy):
        super().__init__(policy)
        self.policy = policy
        self.limits = policy.limits
        self.begin()

    def begin(self) -> Watched:
        """Start a cycle."""
        self.asked: list[Asked] = []
        self.plan = self.planned = self.policy.plan
        return self

    def answer(self, question: Question) -> Any:
        # 1. the part of a chain that answers, and whether its network is used for it
        part = next(part for part in self.policy.policies if question.kind in part.asks)
        before = part.outputs
        answer = self.policy.answer(question)
        outputs = part.outputs
        of_stops = question.kind == SIZE and isinstance(part, ValuePolicy)
        if outputs is before and not of_stops:
            outputs = None
        # 2. the question for display
        if question.kind == PLAN:
            self.planned = answer
        self.asked.append(asked_of(part, question, answer, outputs))
        return answer


def asked_of(policy: Policy, question: Question, answer: Any, outputs: np.ndarray | None) -> Asked:
    """A question, its answer and the best of the network's outputs, in words and numbers."""
    kind = question.kind
    asked = Asked(kind, question.expansions, _in_words(kind, answer))
    if outputs is None or not isinstance(policy, Learned):
        return asked
    # 1. predicted values of every possible stop [levels, sizes], or probabilities of the choices
    if isinstance(policy, ValuePolicy):
        labels = [_in_words(SIZE, size) for size in policy.sizes]
        values = outputs[0]
        if kind != SIZE:
            values = outputs.max(axis=1)
            deeper = enumerate(outputs.argmax(axis=1), question.expansions)
            labels = [f"depth {depth}, {labels[size]}" for depth, size in deeper]
        chosen = int(values.argmax())
    else:
        labels = [_in_words(kind, choice) for choice in policy.choices]
        scaled = outputs.astype(float) / (policy.temperature or 1.0)
        chances = np.exp(scaled - scaled.max())
        values = chances / chances.sum()
        chosen = labels.index(asked.answer)
    # 2. the best of them, in their order
    ranked = np.argsort(-np.where(np.isfinite(values), values, -np.inf), kind="stable")
    listed = np.sort(ranked[: min(MOST_LISTED, np.isfinite(values).sum())]).tolist()
    return dataclasses.replace(
        asked,
        labels=tuple(labels[number] for number in listed),
        values=tuple(values[listed].tolist()),
        unit="value" if isinstance(policy, ValuePolicy) else "probability",
        chosen=listed.index(chosen) if chosen in listed else -1,
    )


def _in_words(kind: str, answer: Any) -> str:
    if kind == EXTEND:
        return "continue" if answer else "stop"
    if kind == SIZE:
        return "1 node" if answer == 1 else f"{answer} nodes"
    shape = f"{answer.total_tokens} / {answer.depth} / {answer.top_k}"
    return f"{shape} beam {beam_text(answer.beam)}" if answer.beam else shape


# Recorded cycles


def replayed(recording: Recording, turn: int, policy: Policy, name: str) -> Lane:
    """Every cycle of a policy on one recorded text."""
    engine = ReplayEngine(recording.trace, recording.costs, policy.limits)
    engine.open(turn)
    watched = Watched(policy)
    lane = _lane(recording, turn, name)
    watched.reset()
    while not engine.finished:
        lane.cycles.append(_cycle(recording, engine, watched))
    return lane


def what_if(recording: Recording, turn: int, position: int, tree: TreeConfig) -> Snapshot:
    """The cycle that starts at `position`, with another tree."""
    return _free(recording, turn, position, Static.of(tree), "your own tree: no policy was asked")


def clairvoyant_lane(recording: Recording, turn: int) -> Lane:
    """The fastest way to write this text with the recorded trees, given the text in advance."""
    trace = recording.trace
    lane = _lane(recording, turn, CLAIRVOYANT)
    bound = clairvoyant(trace.select(np.arange(len(trace.turns)) == turn), recording.costs)
    note = "with the text known, this tree is the best here"
    for row in bound.answers.itertuples():
        # a flat tree has more nodes than the pool that it stops at, so the deepest tree is stopped
        top_k, beam = row.top_k or 1, beam_of(row.beam)
        flat_nodes = row.verify_nodes
        if flat_nodes <= pool_size(row.expansions, top_k, beam):
            flat_nodes = 0
        depth = max(0, trace.depth_of(top_k, beam))
        tree = TreeConfig(row.verify_nodes + 1, depth, top_k, flat_nodes, beam)
        policy = Stopped(tree, row.expansions)
        lane.cycles.append(_free(recording, turn, row.position, policy, note))
    return lane


class Stopped(Static):
    """A static tree that is stopped after so many expansions."""

    asks = frozenset({EXTEND})

    def __init__(self, tree: TreeConfig, expansions: int):
        self.expansions = expansions
        super().__init__(shape=tree)

    def answer(self, question: Question) -> bool:
        return question.expansions < self.expansions


def _free(recording: Recording, turn: int, position: int, policy: Policy, note: str) -> Snapshot:
    """One cycle of a policy whose questions cost nothing."""
    costs = dataclasses.replace(recording.costs, question_ms=0.0)
    engine = ReplayEngine(recording.trace, costs, policy.limits)
    engine.open(turn)
    engine.position = position
    snapshot = _cycle(recording, engine, Watched(policy))
    return dataclasses.replace(snapshot, asked=(), note=snapshot.note or note)


def _lane(recording: Recording, turn: int, name: str) -> Lane:
    """A lane without cycles: the text's tokens, and the time of plain decoding."""
    trace = recording.trace
    row = trace.turns.iloc[turn]
    texts = trace.text[int(row["first"]) : int(row["first"] + row["positions"])]
    tokens = list(map(recording.text, (*texts[:, 0], texts[-1, 1])))
    steps_ms = recording.costs.step_ms(int(row["prompt_tok"]) + np.arange(int(row["positions"])))
    return Lane(name, tokens, [], [0.0, *np.cumsum(steps_ms).tolist()])


def _cycle(recording: Recording, engine: ReplayEngine, watched: Watched) -> Snapshot:
    """Run one cycle at the engine's position."""
    # 1. the cycle
    trace = recording.trace
    row = engine.row
    position = engine.position
    cycle = run_cycle(engine, watched.begin())
    path = trace.text[row, : 2 + cycle.accepted_tok]
    # 2. the drafted nodes, or a chain where nothing more is known than the accepted path
    top_k = cycle.top_k
    flat = cycle.expansions == 0 and watched.planned.flat_nodes
    if top_k in recording.top_ks and not flat and not watched.planned.beam:
        note = ""
        trees = trace.trees(top_k)
        count = pool_size(cycle.expansions, top_k)
        ids = np.concatenate((path[:1], trees.tokens[row, :count]))
        score = np.concatenate((np.zeros(1, np.float32), trees.scores[row, :count]))
        nodes = ids, parents(trees.beams[row, : cycle.expansions], top_k), score
    else:
        note = "this tree is not kept in the recording, only the accepted path is drawn"
        if not top_k:
            note = "a plain step: nothing was drafted"
        count = 1 + cycle.accepted_tok
        nodes = path[:count], np.arange(count) - 1, np.zeros(count, np.float32)
    # 3. as data
    bonus = recording.text(path[-1])
    snapshot = _snapshot(cycle, watched, position, nodes, path[1:-1], bonus, recording.text)
    return dataclasses.replace(snapshot, note=note)


def live_cycle(
    engine: Any, watched: Watched, cycle: Cycle, position: int, kept: list[str], text: Text
) -> Snapshot:
    """The cycle that a live engine has just finished. kept: texts of the new tokens that count."""
    plan = watched.planned
    tree = engine.tree
    # 1. the whole pool is shown where it is still there, otherwise the verified nodes
    if isinstance(plan, TreeConfig) and cycle.top_k and (cycle.expansions or not plan.flat_nodes):
        if engine.growing.candidates == cycle.candidates:
            tree = engine.growing.whole()
    nodes = (tree.token.cpu().numpy(), tree.parent.cpu().numpy(), tree.score.cpu().numpy())
    path = engine.tree.token[engine.path[1:]].cpu().numpy()
    # 2. ended by a stop token or the length, no bonus follows the path
    bonus = kept[-1] if len(kept) == cycle.new_tok else None
    return _snapshot(cycle, watched, position, nodes, path, bonus, text)


def _snapshot(
    cycle: Cycle, watched: Watched, position: int, nodes: Nodes, path: Any, bonus: Any, text: Text
) -> Snapshot:
    """A finished cycle. nodes: all drafted ones in creation order. path: ids of the accepted
    tokens.
    """
    ids, parent, score = nodes
    tokens = tuple(map(text, ids.tolist()))
    # 1. verified are the root and the nodes of the highest score, ties to the earlier one
    verified = np.zeros(len(tokens), dtype=bool)
    verified[0] = True
    verified[np.argsort(-score[1:], kind="stable")[: cycle.verify_nodes] + 1] = True
    # 2. the accepted path, from the root down
    accepted = [0]
    for token in path:
        fits = (parent == accepted[-1]) & verified & (ids == token)
        assert fits.sum() == 1, "an accepted token must be a verified node, once"
        accepted.append(int(fits.argmax()))
    spent_ms = (cycle.draft_ms, cycle.policy_ms, cycle.verify_ms, cycle.commit_ms + cycle.host_ms)
    return Snapshot(
        position=position,
        tree=(cycle.verify_nodes + 1, cycle.expansions, cycle.top_k),
        token=tokens,
        parent=tuple(parent.tolist()),
        score=tuple(score.tolist()),
        verified=tuple(verified.tolist()),
        accepted=tuple(accepted),
        bonus=bonus,
        asked=tuple(watched.asked),
        times=dict(zip(PARTS, spent_ms, strict=True)),
        kept_tok=cycle.kept_tok,
    )
