"""What `replays` refuses: recordings that cannot be made, and answers that a recording cannot
judge.
"""

import specdec
from refusals import row
from specdec import StaticShape
from specdec.core.pair import Pair
from specdec.core.policy import Static
from specdec.core.protocols import Drafter
from specdec.core.tree_config import CopiedTree
from specdec.evaluation.bench import evaluate
from specdec.models.ngrams import NgramConfig
from specdec.replays import trace
from specdec.replays.copies import copy_odds_of
from specdec.replays.oracle import headroom, kept_bound
from specdec.replays.record import RecordConfig, check, record
from specdec.replays.replay import replay
from specdec.replays.static_trees import static_grid


def settings(**fields):
    return lambda given: check(given.pair, RecordConfig(**fields))


def drafter(fields, **asked):
    def call(given):
        made = Drafter()
        vars(made).update(fields)
        check(Pair(given.pair.target, made), RecordConfig(**asked))

    return call


def replayed(policy, **options):
    return lambda given: replay(given.trace, policy, given.costs, **options)


def judged(*asked, **more):
    return lambda given: trace.check_recorded(given.trace, *asked, **more)


def grid(**fields):
    return lambda given: static_grid(given.trace, given.costs, **fields)


def kept(*asked):
    return lambda given: kept_bound(given.trace, given.costs, *asked)


def of_two_pairs(given):
    other = trace.Trace({**given.trace.header, "pair": "other"}, given.trace.turns, {})
    trace.joined([given.trace, other], 3)


OUTSIDE = "need top_k=10, depth >= 7 and a drafter that copies nothing"
FAMILY = "family is the most children"
WIDTH = "top_k must be an integer of at least 1"
LAST_IS_BAD = [[3, 4], [3, 10**9]]
BAD = "token id 1000000000"

ROWS = [
    row("a recording's last prompt", lambda given: record(given.pair, LAST_IS_BAD), BAD),
    row("no room", lambda given: record(given.pair, [[1, 2]], max_new_tokens=600), "context"),
    row("an audit's", lambda given: specdec.audit(given.pair, LAST_IS_BAD), f"prompt 1: {BAD}"),
    row("measuring's", lambda given: evaluate({"a": None}, LAST_IS_BAD, given.pair), BAD),
    row("a recorded width of 0", settings(top_ks=(2, 0)), WIDTH),
    row("no width at all", settings(top_ks=(), trees=()), f"{WIDTH}, got 0"),
    row("no depth", settings(depth=0), "depth must be an integer of at least 1"),
    row("no nodes", settings(most_nodes=0), "most_nodes must be an integer of at least 1"),
    row("lengths without width 10", settings(lengths=1, top_ks=(9,), trees=(), depth=7), OUTSIDE),
    row("lengths of shallow trees", settings(lengths=1, depth=6), OUTSIDE),
    row("a family without levels", settings(family=(3,)), FAMILY),
    row("a family of no nodes", settings(family=(3, 0)), FAMILY),
    row("no such part", settings(part="tset"), "'tset'", "did you mean 'test'"),
    row(
        "nothing that drafts",
        lambda given: check(Pair(given.pair.target), RecordConfig()),
        "no drafter to record",
    ),
    row("deeper than it drafts", drafter({"deepest": 3}, depth=4), "record it with depth=3"),
    row("n-grams of other cycles", drafter({"extra_rows": 1}), "on the cycles that went before"),
    row("a family of any drafter", drafter({}, family=(3, 2)), "EAGLE"),
    row("lengths of copies", drafter({"copied_levels": 5}, lengths=1), OUTSIDE),
    row("longer copies than trees", drafter({"copied_levels": 5}, depth=3), "depth 4 at least"),
    row("a width that was not recorded", replayed(Static(5, 2, 10)), "top_k=10"),
    row("deeper than recorded", replayed(Static(5, 6, 3)), "recorded to depth 4"),
    row("more nodes than recorded", replayed(Static(25, 4, 3)), "at most 20"),
    row("a fixed shape", replayed(Static(shape=StaticShape([(0,), (1,)]))), "TreeConfig only"),
    row("copies that nobody made", replayed(Static.of(CopiedTree(4))), "copies nothing"),
    row("an answer before it was asked", replayed(Static(5, 2, 3), policy_ms=-1.0), "policy_ms"),
    row("a depth of 5", judged(3, 5), "depth 5 was asked for"),
    row("a depth below 0", judged(3, -1), "depth -1 was asked for"),
    row("a beam", judged(3, beam=(1,)), "top_k=3 with beam=(1,) was not recorded, only (3,)"),
    row("one node too many", judged(3, 4, 21), "21 nodes were asked for", "at most 20"),
    row("a part without turns", lambda given: given.trace.select(part="tune"), "no recorded turn"),
    row("other widths", lambda given: given.trace.restrict({"top_k": (5, 9)}), "top_k 5 to 9"),
    row("no texts to count", lambda given: copy_odds_of(given.trace, NgramConfig()), "no texts"),
    row("two pairs", of_two_pairs, "different pairs cannot be joined"),
    row("no recording", lambda given: trace.open_trace(given.folder), "trace.json"),
    row("faster than the bound", lambda given: headroom(4, 10, 5), "below the clairvoyant bound"),
    row("no time", lambda given: headroom(float("nan"), 10, 5), "positive"),
    row("a tree kept for no cycle", kept(0, [1]), "cycles must be an integer of at least 1"),
    row("a grid beyond the depth", grid(depths=[-1, 5]), "depths", "from 0 to 4"),
    row("a grid without depths", grid(depths=[]), "depths", "from 0 to 4"),
    row("a grid of other widths", grid(top_ks=[3, 10]), "top_k=10", "only [3]"),
    row("a grid beyond the nodes", grid(total_tokens=[5, 22]), "from 1 to 21"),
    row("groups by no column", grid(by="siute"), "'siute'"),
]
