"""Draft-and-verify cycles as plain data for display: the tree, questions and answers, the result
and the time.

    recording, turn, policy ──▶ Lane of Snapshots ◀── engine of a live turn

Recorded trees are pruned again in milliseconds, by the cycle that also decodes.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from specdec import runs
from specdec.core.cycle import run_cycle
from specdec.core.pair import Pair
from specdec.core.policy import Chain, Policy, Static
from specdec.core.records import EXTEND, PLAN, SIZE, Cycle, Question
from specdec.core.tree_config import Plan, TreeConfig, pool_size
from specdec.costs.model import CostModel
from specdec.data.suites import gather
from specdec.errors import SpecdecError
from specdec.policies.base import Learned
from specdec.policies.value import ValuePolicy
from specdec.replays.oracle import clairvoyant
from specdec.replays.replay import ReplayEngine
from specdec.replays.static_trees import beam_of
from specdec.replays.trace import Trace, open_trace, save_trace
from specdec.stored import TextsFile, read_json

SCHEMA = 1
# of many actions only the likeliest are listed, of values the best
MOST_CHOICES = 8
MOST_VALUES = 12
# the parts of a cycle's time
PARTS = ("draft", "policy", "verify", "rest")
CLAIRVOYANT = "clairvoyant"


@dataclass(frozen=True)
class Asked:
    """A question and its answer. Answers in nodes exclude the root, unlike total_tokens."""

    kind: str
    expansions: int
    answer: str
    # the choices that are listed, and their probabilities or predicted values in tokens
    labels: tuple[str, ...] = ()
    values: tuple[float, ...] = ()
    # of the values; "" for a rule, which has no network
    unit: str = "probability"
    # index of the chosen one; -1 if the network was not asked or its choice is not listed
    chosen: int = -1


@dataclass(frozen=True)
class Snapshot:
    """One cycle. Nodes are in creation order, the root first."""

    # index of the root among the new tokens
    position: int
    context_tok: int
    # total_tokens, depth and k as drafted and verified
    tree: tuple[int, int, int]
    # of each drafted node: text, parent (-1 for the root), draft log-probability from the root
    token: tuple[str, ...]
    parent: tuple[int, ...]
    score: tuple[float, ...]
    # whether each node was sent to the target
    verified: tuple[bool, ...]
    # nodes of the accepted path, the root first
    accepted: tuple[int, ...]
    # the target's own next token, and the likeliest node rejected for it
    bonus: str | None
    refused: str | None
    asked: tuple[Asked, ...]
    # milliseconds by PARTS
    times: dict[str, float]
    # new tokens that count
    kept_tok: int
    note: str = ""

    @property
    def total_ms(self) -> float:
        return sum(self.times.values())

    @property
    def accepted_tok(self) -> int:
        return len(self.accepted) - 1


@dataclass
class Lane:
    """One policy on one text. tokens: the text, token by token, as far as known.

    plain_ms: predicted time of plain decoding up to each position, if known.
    """

    name: str
    tokens: list[str]
    cycles: list[Snapshot] = field(default_factory=list)
    plain_ms: list[float] = field(default_factory=list)

    def at(self, position: int) -> int:
        """Index of the cycle that writes the token after `position`."""
        return max(0, sum(cycle.position <= position for cycle in self.cycles) - 1)

    def elapsed_ms(self, cycle: int) -> float:
        """Time up to the end of a cycle, without the prompt's own forward."""
        return sum(one.total_ms for one in self.cycles[: cycle + 1])

    def tokens_per_s(self, cycle: int) -> float:
        """Average speed up to the end of a cycle."""
        written = sum(one.kept_tok for one in self.cycles[: cycle + 1])
        return 1e3 * written / max(self.elapsed_ms(cycle), 1e-9)

    def speedup(self, cycle: int) -> float | None:
        """Speed-up over plain decoding of the same tokens, None if its time is unknown."""
        end = self.cycles[cycle].position + self.cycles[cycle].kept_tok
        return self.plain_ms[end] / self.elapsed_ms(cycle) if end < len(self.plain_ms) else None


@dataclass(frozen=True)
class Recording:
    """A trace with what its display needs: the text of every token, the prompts, the costs."""

    trace: Trace
    costs: CostModel
    texts: dict[int, str]
    prompts: tuple[str, ...]

    @property
    def name(self) -> str:
        return str(self.trace.header["pair"])

    @property
    def titles(self) -> list[str]:
        """Display names of the turns."""
        turns = enumerate(zip(self.trace.turns["suite"], self.prompts, strict=True), 1)
        return [
            f"{number}. {suite}: {' '.join(prompt.split())[:60]}"
            for number, (suite, prompt) in turns
        ]

    @property
    def top_ks(self) -> list[int]:
        """Widths whose whole trees were recorded, so that they can be drawn."""
        return sorted(self.trace.header["trees"])

    def text(self, token: int) -> str:
        return self.texts.get(int(token), f"#{int(token)}")

    def tokens(self, turn: int) -> list[str]:
        """The token texts of a turn."""
        row = self.trace.turns.iloc[turn]
        rows = self.trace.text[int(row["first"]) : int(row["first"] + row["positions"])]
        return [self.text(token) for token in (*rows[:, 0], rows[-1, 1])]

    def save(self, folder: Path) -> Path:
        """Write everything into `folder`, for `open_recording`."""
        save_trace(self.trace, folder)
        self.costs.save(Path(folder) / "costs.json")
        texts = {"schema": SCHEMA, "texts": self.texts, "prompts": self.prompts}
        runs.write_json(Path(folder) / "texts.json", texts, ())
        return Path(folder)


def recording_of(trace: Trace, pair: Pair, costs: CostModel) -> Recording:
    """A recording for display, from a trace and its pair. Turns without a position are left out."""
    recorded_pair = trace.header["pair"]
    if recorded_pair != pair.name:
        raise SpecdecError(f"this recording was made with {recorded_pair!r}, not {pair.name!r}.")
    _require_trees(trace)
    trace = trace.select(trace.turns["positions"].to_numpy() > 0)
    tokens = [trace.text.ravel()]
    for top_k in trace.header["trees"]:
        tokens.append(trace.trees(top_k).tokens.ravel())
    ids = np.unique(np.concatenate(tokens)).tolist()
    return Recording(trace, costs, token_texts(pair, ids), tuple(_prompts(trace)))


def _require_trees(trace: Trace) -> None:
    if not trace.header.get("trees"):
        why = "the recording keeps no whole trees"
        raise SpecdecError(f"{why}; record with trees=(10,) to display them.")


def open_recording(
    folder: Path, pair: Pair | None = None, costs: CostModel | None = None
) -> Recording:
    """Open what `Recording.save` wrote; other recordings need their pair and a cost model."""
    trace = open_trace(folder)
    path = Path(folder) / "texts.json"
    if not path.is_file():
        if pair is None or costs is None:
            why = f"{folder} holds no texts.json"
            raise SpecdecError(f"{why}; give its pair and a cost model as well.")
        return recording_of(trace, pair, costs)
    _require_trees(trace)
    stored = read_json(path, TextsFile, "write it again", SCHEMA)
    if len(stored["prompts"]) != len(trace.turns):
        raise SpecdecError(f"{path} belongs to another recording; write it again.")
    texts = {int(token): text for token, text in stored["texts"].items()}
    costs = costs or CostModel.load(Path(folder) / "costs.json")
    return Recording(trace, costs, texts, tuple(stored["prompts"]))


def token_texts(pair: Pair, ids: Iterable[int]) -> dict[int, str]:
    """The text of each token id within a text, including its space; special tokens by their names.

    Numbers if there is no tokenizer.
    """
    tokenizer: Any = pair.tokenizer
    if tokenizer is None:
        return {token: f"#{token}" for token in ids}
    special = set(tokenizer.all_special_ids)
    # some tokenizers drop a text's first space, so a plain token goes before
    before = [token for token in tokenizer.encode("a") if token not in special][-1:]
    head = tokenizer.decode(before) if before else ""
    texts: dict[int, str] = {}
    for token in ids:
        text = tokenizer.decode([*before, token])
        if token in special:
            texts[token] = tokenizer.convert_ids_to_tokens(token)
        elif text.startswith(head):
            texts[token] = text[len(head) :]
        else:
            texts[token] = tokenizer.decode([token])
    return texts


def _prompts(trace: Trace) -> list[str]:
    """The text of every turn's prompt; its name if the prompt is from no suite."""
    known: dict[str, Any] = {}
    for suite in dict.fromkeys(trace.turns["suite"]):
        with contextlib.suppress(SpecdecError):
            known |= {item.id: item.turns for item in gather([suite])}
    turns = trace.turns[["prompt", "turn"]].itertuples(index=False)
    return [str(known[prompt][turn]) if prompt in known else prompt for prompt, turn in turns]


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
        values_of_stops = outputs is not None and outputs.ndim == 2
        if outputs is before and not (question.kind == SIZE and values_of_stops):
            outputs = None
        # 2. the question for display
        if question.kind == PLAN:
            self.planned = answer
        self.asked.append(asked_of(part, question, answer, outputs))
        return answer


def asked_of(policy: Policy, question: Question, answer: Any, outputs: np.ndarray | None) -> Asked:
    """A question, its answer and the network's outputs in words and numbers."""
    words = _in_words(question.kind, answer)
    unit = "probability" if isinstance(policy, Learned) else ""
    asked = Asked(question.kind, question.expansions, words, unit=unit)
    if outputs is None or not isinstance(policy, Learned):
        return asked
    if isinstance(policy, ValuePolicy):
        return _with_values(asked, policy, outputs)
    labels = [_in_words(question.kind, choice) for choice in policy.choices]
    if outputs.ndim != 1 or len(labels) != len(outputs):
        return asked
    scaled = outputs.astype(float) / (policy.temperature or 1.0)
    chances = np.exp(scaled - scaled.max())
    chosen = labels.index(words) if words in labels else -1
    return _among(asked, labels, chances / chances.sum(), chosen)


def _with_values(asked: Asked, policy: ValuePolicy, outputs: np.ndarray) -> Asked:
    """The best of the predicted values of every possible stop. outputs: [levels, sizes]."""
    labels = [_in_words(SIZE, size) for size in policy.sizes]
    values = outputs[0]
    if asked.kind != SIZE:
        best_sizes = outputs.argmax(axis=1)
        labels = [f"depth {asked.expansions + n}, {labels[s]}" for n, s in enumerate(best_sizes)]
        values = outputs.max(axis=1)
    finite = np.isfinite(values)
    ranked = np.argsort(-np.where(finite, values, -np.inf), kind="stable")
    listed = np.sort(ranked[: min(MOST_VALUES, finite.sum())])
    return dataclasses.replace(
        asked,
        unit="value",
        labels=tuple(labels[place] for place in listed),
        values=tuple(values[listed].astype(float).tolist()),
        chosen=int(np.flatnonzero(listed == ranked[0])[0]),
    )


def _in_words(kind: str, answer: Any) -> str:
    if kind == EXTEND:
        return "continue" if answer else "stop"
    if kind == SIZE:
        return "1 node" if answer == 1 else f"{answer} nodes"
    shape = f"{answer.total_tokens} / {answer.depth} / {answer.top_k}"
    if not answer.beam:
        return shape
    return f"{shape} beam {'/'.join(map(str, answer.beam))}"


def _among(
    asked: Asked, labels: list[str], values: np.ndarray, chosen: int, most: int = MOST_CHOICES
) -> Asked:
    """All choices in order or, if too many, the largest and the chosen one."""
    listed = np.arange(len(labels))
    if len(labels) > most:
        listed = np.argsort(-values, kind="stable")[:most]
        if chosen >= 0 and chosen not in listed:
            listed[-1] = chosen
    shown_labels = [labels[place] for place in listed]
    shown_values = [float(values[place]) for place in listed]
    rest = len(labels) - len(listed)
    if rest:
        shown_labels.append(f"{rest} others")
        shown_values.append(float(values.sum() - values[listed].sum()))
    place = np.flatnonzero(listed == chosen)
    chosen = int(place[0]) if len(place) else -1
    return dataclasses.replace(
        asked, labels=tuple(shown_labels), values=tuple(shown_values), chosen=chosen
    )


def replayed(recording: Recording, turn: int, policy: Policy, name: str) -> Lane:
    """Every cycle of a policy on one recorded text, with the recording's costs."""
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
    snapshot = _fixed(recording, turn, position, Static.of(tree))
    return dataclasses.replace(snapshot, note=snapshot.note or "your own tree: no policy was asked")


def clairvoyant_lane(recording: Recording, turn: int) -> Lane:
    """The fastest way to write this text with the recorded trees, given the text in advance."""
    trace = recording.trace
    lane = _lane(recording, turn, CLAIRVOYANT)
    bound = clairvoyant(trace.select(np.arange(len(trace.turns)) == turn), recording.costs)
    for row in bound.answers.to_dict("records"):
        policy = Foreseen(
            row["top_k"], row["expansions"], row["verify_nodes"], row["beam"], trace.depth
        )
        snapshot = _fixed(recording, turn, row["position"], policy)
        note = snapshot.note or "with the text known, this tree is the best here"
        lane.cycles.append(dataclasses.replace(snapshot, note=note))
    return lane


class Foreseen(Static):
    """A tree of so many expansions and nodes, as the bound chose it.

    One wider than its root's children stops without a second question.
    """

    def __init__(self, top_k: int, expansions: int, verify_nodes: int, beam: str, depth: int):
        widths = beam_of(beam)
        total_tokens = verify_nodes + 1
        if top_k and verify_nodes > pool_size(expansions, top_k, widths):
            tree = TreeConfig(total_tokens, depth, top_k, verify_nodes, widths)
            asks = frozenset({EXTEND})
        else:
            tree = TreeConfig(total_tokens, expansions, top_k or 1, 0, widths)
            asks = frozenset()
        super().__init__(shape=tree)
        self.asks = asks

    def answer(self, question: Question) -> bool:
        return False


def _fixed(recording: Recording, turn: int, position: int, policy: Policy) -> Snapshot:
    """One cycle of a policy whose questions cost nothing."""
    costs = dataclasses.replace(recording.costs, question_ms=0.0)
    engine = ReplayEngine(recording.trace, costs, policy.limits)
    engine.open(turn)
    engine.position = position
    return dataclasses.replace(_cycle(recording, engine, Watched(policy)), asked=())


def _lane(recording: Recording, turn: int, name: str) -> Lane:
    row = recording.trace.turns.iloc[turn]
    steps = recording.costs.step_ms(int(row["prompt_tok"]) + np.arange(int(row["positions"])))
    return Lane(name, recording.tokens(turn), [], [0.0, *np.cumsum(steps).tolist()])


def _cycle(recording: Recording, engine: ReplayEngine, watched: Watched) -> Snapshot:
    """Run one cycle at the engine's position."""
    row = engine.row
    position = engine.position
    done = run_cycle(engine, watched.begin())
    path = recording.trace.text[row]
    nodes, note = _pool(recording, row, done, watched.planned)
    verified = _best(nodes.score, done.verify_nodes)
    accepted = walk(nodes.ids, nodes.parent, verified, path[1 : 1 + done.accepted_tok])
    bonus = recording.text(path[1 + done.accepted_tok])
    snapshot = _snapshot(done, watched, position, nodes, verified, accepted, bonus, recording.text)
    return dataclasses.replace(snapshot, note=note)


def _best(score: np.ndarray, verify_nodes: int) -> np.ndarray:
    """bool [N + 1]: the root and the nodes of the highest score, ties to the earlier one."""
    verified = np.zeros(len(score), dtype=bool)
    best = np.argsort(-score[1:], kind="stable")[:verify_nodes]
    verified[0] = True
    verified[best + 1] = True
    return verified


class _Nodes(NamedTuple):
    """All drafted nodes in creation order, the root first."""

    ids: np.ndarray
    parent: np.ndarray
    score: np.ndarray


def _snapshot(
    done: Cycle,
    watched: Watched,
    position: int,
    nodes: _Nodes,
    verified: np.ndarray,
    accepted: list[int],
    bonus: str | None,
    text: Callable[[int], str],
) -> Snapshot:
    """A finished cycle. text: id -> its text."""
    tokens = tuple(text(token) for token in nodes.ids.tolist())
    refused = None
    rivals = np.flatnonzero((nodes.parent == accepted[-1]) & verified)
    if len(rivals):
        refused = tokens[rivals[nodes.score[rivals].argmax()]]
    times = {
        "draft": done.draft_ms,
        "policy": done.policy_ms,
        "verify": done.verify_ms,
        "rest": done.commit_ms + done.host_ms,
    }
    return Snapshot(
        position=position,
        context_tok=done.context_tok,
        tree=(done.verify_nodes + 1, done.expansions, done.top_k),
        token=tokens,
        parent=tuple(nodes.parent.tolist()),
        score=tuple(nodes.score.tolist()),
        verified=tuple(verified.tolist()),
        accepted=tuple(accepted),
        bonus=bonus,
        refused=refused,
        asked=tuple(watched.asked),
        times=times,
        kept_tok=done.kept_tok,
    )


def _pool(recording: Recording, row: int, done: Cycle, plan: Plan) -> tuple[_Nodes, str]:
    """All drafted nodes, and a note; the accepted path alone if no more is known."""
    trace = recording.trace
    top_k = done.top_k
    root = trace.text[row, :1].astype(np.int64)
    root_score = np.zeros(1, np.float32)
    # 1. nothing was drafted
    if not top_k:
        note = "a plain step: nothing was drafted"
        return _Nodes(root, np.array([-1]), root_score), note
    # 2. a flat tree: the widest trees hold the root's best children of all
    flat = plan.flat_nodes if done.expansions == 0 else 0
    widest = recording.top_ks[-1]
    if flat and flat <= widest:
        trees = trace.trees(widest)
        ids = np.concatenate((root, trees.tokens[row, :flat]))
        score = np.concatenate((root_score, trees.scores[row, :flat]))
        return _Nodes(ids, np.array([-1] + [0] * flat), score), ""
    # 3. a tree that was not kept
    if top_k not in recording.top_ks or plan.beam or flat:
        path = trace.text[row, : 1 + done.accepted_tok].astype(np.int64)
        shape = f"a tree of k = {top_k} and this beam"
        if flat:
            shape = f"the root's {flat} best children"
        note = f"{shape}: not kept in the recording, only the accepted path is drawn"
        return _Nodes(path, np.arange(len(path)) - 1, np.zeros(len(path), np.float32)), note
    # 4. the first expansions of a recorded tree
    trees = trace.trees(top_k)
    count = pool_size(done.expansions, top_k)
    parent = [np.array([-1]), np.zeros(top_k, np.int64)]
    start = 1
    for level in range(done.expansions):
        parent.append(np.repeat(start + trees.beams[row, level].astype(np.int64), top_k))
        start = 1 + pool_size(level, top_k)
    ids = np.concatenate((root, trees.tokens[row, :count]))
    score = np.concatenate((root_score, trees.scores[row, :count]))
    return _Nodes(ids, np.concatenate(parent), score), ""


def live_cycle(
    engine: Any,
    watched: Watched,
    done: Cycle,
    position: int,
    kept: list[str],
    text: Callable[[int], str],
) -> Snapshot:
    """The cycle that a live engine has just finished.

    kept: texts of the new tokens that count. text: id -> its text.
    """
    plan = watched.planned
    tree = engine.tree
    verify_nodes = len(tree)
    # 1. the whole pool is shown where it is still there, otherwise the verified nodes
    flat = plan.flat_nodes if done.expansions == 0 else 0
    if isinstance(plan, TreeConfig) and done.top_k and not flat:
        if engine.growing.candidates == done.candidates:
            tree = engine.growing.whole()
            verify_nodes = done.verify_nodes
    nodes = _Nodes(*(part.cpu().numpy() for part in (tree.token, tree.parent, tree.score)))
    # 2. what was verified and accepted
    verified = _best(nodes.score, verify_nodes)
    path = engine.tree.token[engine.path[1:]].cpu().numpy()
    accepted = walk(nodes.ids, nodes.parent, verified, path)
    # 3. ended by a stop token or the length, no bonus follows the path
    bonus = kept[-1] if len(kept) == done.new_tok else None
    return _snapshot(done, watched, position, nodes, verified, accepted, bonus, text)


def walk(ids: np.ndarray, parent: np.ndarray, verified: np.ndarray, path: np.ndarray) -> list[int]:
    """Nodes of the verified tree with the tokens of `path`, from the root down."""
    nodes = [0]
    for token in path:
        next_nodes = np.flatnonzero((parent == nodes[-1]) & verified & (ids == token))
        assert len(next_nodes) == 1, "an accepted token must be a verified node, once"
        nodes.append(int(next_nodes[0]))
    return nodes
