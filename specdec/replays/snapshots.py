"""Draft-and-verify cycles as plain data for display: the tree, questions and answers, the result
and the time.

    recording, turn, policy ──▶ Lane of Snapshots ◀── engine of a live turn

Recorded trees are pruned again in milliseconds, by the cycle that also decodes. Knows nothing about
drawing or browsers.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from specdec import runs
from specdec.core.cycle import answer_of, run_cycle
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
MOST_CHOICES, MOST_VALUES = (
    8,
    12,
)  # of many actions only the likeliest are listed, of values the best
PARTS = ("draft", "policy", "verify", "rest")  # parts of a cycle's time
CLAIRVOYANT = "clairvoyant"


@dataclass(frozen=True)
class Asked:
    """A question and its answer. values: probabilities, or predicted values in tokens, of the
    choices `labels`.

    unit: of the values; "" for a rule, which has no network. Answers in nodes exclude the root,
    unlike total_tokens.

    chosen: index of the chosen one; -1 if the network was not asked or its choice is not listed.
    """

    kind: str
    expansions: int
    answer: str
    labels: tuple[str, ...] = ()
    values: tuple[float, ...] = ()
    unit: str = "probability"
    chosen: int = -1


@dataclass(frozen=True)
class Snapshot:
    """One cycle. Nodes are in creation order, the root first.

    position: index of the root among the new tokens. tree: "total_tokens / depth / k" as drafted
    and verified.
    token, parent, score: text, parent (-1 for the root) and cumulative draft log-probability of
    each drafted node.
    verified: whether it was sent to the target. accepted: nodes of the accepted path, the root
    first.
    bonus: the target's own next token; refused: the likeliest node rejected for it. None if there
    is none.
    times: milliseconds by PARTS. kept_tok: new tokens that count.
    """

    position: int
    context_tok: int
    tree: tuple[int, int, int]
    token: tuple[str, ...]
    parent: tuple[int, ...]
    score: tuple[float, ...]
    verified: tuple[bool, ...]
    accepted: tuple[int, ...]
    bonus: str | None
    refused: str | None
    asked: tuple[Asked, ...]
    times: dict[str, float]
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
    if trace.header["pair"] != pair.name:
        raise SpecdecError(
            f"this recording was made with the pair {trace.header['pair']!r}, not {pair.name!r}."
        )
    trace = trace.select(trace.turns["positions"].to_numpy() > 0)
    parts = [with_text(trace), *(trace.trees(top_k).tokens for top_k in trace.header["trees"])]
    ids = np.unique(np.concatenate([part.ravel() for part in parts])).tolist()
    return Recording(trace, costs, token_texts(pair, ids), tuple(_prompts(trace)))


def with_text(trace: Trace) -> np.ndarray:
    """The recorded text; SpecdecError if an older version left it out, or no whole tree was
    recorded.
    """
    if not trace.header.get("trees"):
        raise SpecdecError(
            "the recording keeps no whole trees; record with trees=(10,) to display them."
        )
    try:
        return trace.text
    except SpecdecError:
        raise SpecdecError(
            "this recording is of an earlier version and holds no text; record again."
        ) from None


def open_recording(
    folder: Path, pair: Pair | None = None, costs: CostModel | None = None
) -> Recording:
    """Open what `Recording.save` wrote; other recordings need their pair and a cost model."""
    trace = open_trace(folder)
    path = Path(folder) / "texts.json"
    if not path.is_file():
        if pair is None or costs is None:
            raise SpecdecError(
                f"{folder} holds no texts.json; give its pair and a cost model as well."
            )
        return recording_of(trace, pair, costs)
    stored = read_json(path, TextsFile, "write it again", SCHEMA)
    with_text(trace)
    if len(stored["prompts"]) != len(trace.turns) or not all(
        token.isdecimal() for token in stored["texts"]
    ):
        raise SpecdecError(
            f"{path} does not belong to the turns and tokens of {folder}; write it again."
        )
    texts = {int(token): text for token, text in stored["texts"].items()}
    return Recording(
        trace, costs or CostModel.load(Path(folder) / "costs.json"), texts, tuple(stored["prompts"])
    )


def token_texts(pair: Pair, ids: Iterable[int]) -> dict[int, str]:
    """The text of each token id within a text, including its space; special tokens by their names.

    Numbers if there is no tokenizer.
    """
    tokenizer: Any = pair.tokenizer
    if tokenizer is None:
        return {token: f"#{token}" for token in ids}
    special = set(tokenizer.all_special_ids)
    # some drop a text's first space
    before = [token for token in tokenizer.encode("a") if token not in special][-1:]
    head = tokenizer.decode(before) if before else ""

    def inside(token: int) -> str:
        whole: str = tokenizer.decode([*before, token])
        return whole[len(head) :] if whole.startswith(head) else str(tokenizer.decode([token]))

    return {
        token: tokenizer.convert_ids_to_tokens(token) if token in special else inside(token)
        for token in ids
    }


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

    def answer(self, question: Question) -> Any:
        part = next(one for one in self.policy.policies if question.kind in one.asks)
        before = part.outputs
        answer = answer_of(self.policy, question)
        outputs = part.outputs
        if outputs is before and not (
            question.kind == SIZE and outputs is not None and outputs.ndim == 2
        ):
            outputs = None  # answered without its network
        if question.kind == PLAN:
            self.planned = answer
        self.asked.append(asked_of(part, question, answer, outputs))
        return answer

    def begin(self) -> Watched:
        """Start a cycle."""
        self.asked: list[Asked] = []
        self.plan = self.planned = self.policy.plan
        return self


def asked_of(policy: Policy, question: Question, answer: Any, outputs: np.ndarray | None) -> Asked:
    """A question, its answer and the network's outputs in words and numbers."""
    kind = question.kind
    now = question.expansions
    told = Asked(
        kind,
        now,
        _in_words(kind, answer),
        unit="probability" if isinstance(policy, Learned) else "",
    )
    if outputs is None or not isinstance(policy, Learned):
        return told
    if isinstance(policy, ValuePolicy):  # predicted values of every possible stop
        if kind == SIZE:
            labels = [_in_words(SIZE, size) for size in policy.sizes]
            values = outputs[0]
        else:
            sizes = outputs.argmax(axis=1)
            labels = [
                f"depth {now + n}, {_in_words(SIZE, policy.sizes[size])}"
                for n, size in enumerate(sizes)
            ]
            values = outputs.max(axis=1)
        known = np.where(np.isfinite(values), values, -np.inf)
        best = np.sort(
            np.argsort(-known, kind="stable")[: min(MOST_VALUES, np.isfinite(values).sum())]
        )
        numbers = tuple(values[best].astype(float).tolist())
        chosen = int(np.flatnonzero(best == known.argmax())[0])
        shown = tuple(labels[i] for i in best)
        return dataclasses.replace(told, unit="value", labels=shown, values=numbers, chosen=chosen)
    labels = [_in_words(kind, choice) for choice in policy.choices]
    if outputs.ndim != 1 or len(labels) != len(outputs):
        return told
    scaled = outputs.astype(float) / (policy.temperature or 1.0)
    chances = np.exp(scaled - scaled.max())
    chosen = labels.index(told.answer) if told.answer in labels else -1
    return _among(told, labels, chances / chances.sum(), chosen)


def _in_words(kind: str, answer: Any) -> str:
    if kind == EXTEND:
        return "continue" if answer else "stop"
    if kind == SIZE:
        return f"{answer} node{'s' * (answer != 1)}"
    beam = " beam " + "/".join(map(str, answer.beam)) if answer.beam else ""
    return f"{answer.total_tokens} / {answer.depth} / {answer.top_k}{beam}"


def _among(
    told: Asked, labels: list[str], values: np.ndarray, chosen: int, most: int = MOST_CHOICES
) -> Asked:
    """All choices in order or, if too many, the largest and the chosen one."""
    keep = np.arange(len(labels))
    if len(labels) > most:
        keep = np.argsort(-values, kind="stable")[:most]
        if chosen >= 0 and chosen not in keep:
            keep[-1] = chosen
    place = np.flatnonzero(keep == chosen)
    rest = len(labels) - len(keep)
    shown = [labels[i] for i in keep] + ([f"{rest} others"] if rest else [])
    numbers = [float(values[i]) for i in keep] + (
        [float(values.sum() - values[keep].sum())] if rest else []
    )
    chosen = int(place[0]) if len(place) else -1
    return dataclasses.replace(told, labels=tuple(shown), values=tuple(numbers), chosen=chosen)


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
    """A tree of so many expansions and nodes; one wider than its root's children stops without a
    second question.
    """

    def __init__(self, top_k: int, expansions: int, verify_nodes: int, beam: str, depth: int):
        widths = beam_of(beam)
        flat = verify_nodes if top_k and verify_nodes > pool_size(expansions, top_k, widths) else 0
        tree = TreeConfig(verify_nodes + 1, depth if flat else expansions, top_k or 1, flat, widths)
        super().__init__(shape=tree)
        self.asks = frozenset({EXTEND} if flat else ())

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
    *nodes, note = _pool(recording, row, done, watched.planned)
    verified = _best(nodes[2], done.verify_nodes)
    accepted = walk(nodes[0], nodes[1], verified, path[1 : 1 + done.accepted_tok])
    bonus = recording.text(path[1 + done.accepted_tok])
    snapshot = _snapshot(done, watched, position, nodes, verified, accepted, bonus, recording.text)
    return dataclasses.replace(snapshot, note=note)


def _best(score: np.ndarray, verify_nodes: int) -> np.ndarray:
    """bool [N + 1]: the root and the `verify_nodes` nodes of the highest score, ties to the earlier
    one.
    """
    verified = np.zeros(len(score), dtype=bool)
    verified[[0, *(np.argsort(-score[1:], kind="stable")[:verify_nodes] + 1)]] = True
    return verified


def _snapshot(
    done: Cycle,
    watched: Watched,
    position: int,
    nodes: list[np.ndarray],
    verified: np.ndarray,
    accepted: list[int],
    bonus: str | None,
    text: Callable[[int], str],
) -> Snapshot:
    """A finished cycle.

    nodes: token ids, parents and scores of what was drafted. text: id -> its text.
    """
    ids, parent, score = nodes
    tokens = tuple(text(token) for token in ids.tolist())
    rivals = np.flatnonzero((parent == accepted[-1]) & verified)
    refused = tokens[rivals[score[rivals].argmax()]] if len(rivals) else None
    tree = done.verify_nodes + 1, done.expansions, done.top_k
    drafted = tokens, tuple(parent.tolist()), tuple(score.tolist())
    spent_ms = (done.draft_ms, done.policy_ms, done.verify_ms, done.commit_ms + done.host_ms)
    times = dict(zip(PARTS, spent_ms, strict=True))
    result: dict[str, Any] = dict(
        accepted=tuple(accepted), bonus=bonus, refused=refused, kept_tok=done.kept_tok
    )
    result |= dict(verified=tuple(verified.tolist()), asked=tuple(watched.asked), times=times)
    return Snapshot(position, done.context_tok, tree, *drafted, **result)


def _pool(
    recording: Recording, row: int, done: Cycle, plan: Plan
) -> tuple[np.ndarray, np.ndarray, np.ndarray, str]:
    """(token ids, parents, scores, note) of all drafted nodes; of the accepted path alone if no
    more is known.
    """
    trace = recording.trace
    top_k = done.top_k
    root = trace.text[row, :1].astype(np.int64)
    flat = plan.flat_nodes if done.expansions == 0 else 0
    if not top_k:
        return root, np.array([-1]), np.zeros(1, np.float32), "a plain step: nothing was drafted"
    if (
        flat and flat <= recording.top_ks[-1]
    ):  # the widest trees hold the root's best children of all
        trees = trace.trees(recording.top_ks[-1])
        ids = np.concatenate((root, trees.tokens[row, :flat]))
        scores = trees.scores[row, :flat]
        return ids, np.array([-1] + [0] * flat), np.concatenate(([np.float32(0)], scores)), ""
    if top_k not in recording.top_ks or plan.beam or flat:
        path = trace.text[row, : 1 + done.accepted_tok].astype(np.int64)
        what = (
            f"the root's {flat} best children" if flat else f"a tree of k = {top_k} and this beam"
        )
        note = f"{what}: not kept in the recording, only the accepted path is drawn"
        return path, np.arange(len(path)) - 1, np.zeros(len(path), np.float32), note
    trees = trace.trees(top_k)
    count = pool_size(done.expansions, top_k)
    parent = [np.array([-1]), np.zeros(top_k, np.int64)]
    start = 1
    for level in range(done.expansions):
        parent.append(np.repeat(start + trees.beams[row, level].astype(np.int64), top_k))
        start += top_k if level == 0 else top_k * top_k
    ids = np.concatenate((root, trees.tokens[row, :count]))
    return (
        ids,
        np.concatenate(parent),
        np.concatenate(([np.float32(0)], trees.scores[row, :count])),
        "",
    )


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
    flat = plan.flat_nodes if done.expansions == 0 else 0
    whole = (
        isinstance(plan, TreeConfig)
        and done.top_k
        and not flat
        and engine.growing.candidates == done.candidates
    )
    if whole:
        tree = engine.growing.whole()
    nodes = [part.cpu().numpy() for part in (tree.token, tree.parent, tree.score)]
    verified = _best(nodes[2], done.verify_nodes if whole else len(tree))
    accepted = walk(nodes[0], nodes[1], verified, engine.tree.token[engine.path[1:]].cpu().numpy())
    # by a stop token or the length: then no bonus follows the path
    ended = len(kept) < done.new_tok
    return _snapshot(
        done, watched, position, nodes, verified, accepted, None if ended else kept[-1], text
    )


def walk(ids: np.ndarray, parent: np.ndarray, verified: np.ndarray, path: np.ndarray) -> list[int]:
    """Nodes of the verified tree with the tokens of `path`, from the root down."""
    nodes = [0]
    for token in path:
        next_nodes = np.flatnonzero((parent == nodes[-1]) & verified & (ids == token))
        assert len(next_nodes) == 1, "an accepted token must be a verified node, once"
        nodes.append(int(next_nodes[0]))
    return nodes
