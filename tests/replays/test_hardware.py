"""A recording cut to what a machine was measured at."""

import numpy as np
import pytest
from fakes.traces import round_costs, synthetic_trace

from specdec.core.tree_config import TreeConfig
from specdec.errors import SpecdecError
from specdec.replays.static_trees import static_turns


def test_nothing_is_cut_where_everything_was_measured():
    trace = synthetic_trace()
    assert trace.restrict({}) is trace
    assert trace.restrict({"verify_nodes": (0, 500), "top_k": (1, 32)}) is trace


@pytest.mark.filterwarnings("ignore:the cost model")
def test_what_is_left_is_judged_as_before():
    trace = synthetic_trace(top_ks=(2, 3), depth=4, most_nodes=20)
    costs = round_costs(ranges={"verify_nodes": (5, 12), "top_k": (3, 10), "expansions": (1, 3)})
    part = trace.restrict(costs.ranges)
    assert (part.top_ks, part.depth, part.most_nodes, len(part)) == ((3,), 3, 12, len(trace))
    whole, cut = trace.trees(3), part.trees(3)
    assert cut.scores.shape[1] == cut.tokens.shape[1] == 3 + 3 * 9 and cut.beams.shape[1] == 3
    np.testing.assert_array_equal(cut.scores, whole.scores[:, :30])
    tree = TreeConfig(10, 3, 3)
    assert static_turns(part, costs, tree).equals(static_turns(trace, costs, tree))
    assert static_turns(part.select(part="test"), costs, tree).equals(
        static_turns(trace.select(part="test"), costs, tree)
    )
    with pytest.raises(SpecdecError, match="from 0 to 3"):
        static_turns(part, costs, TreeConfig(10, 4, 3))


def test_a_width_that_was_not_recorded_is_refused():
    with pytest.raises(SpecdecError, match="measured at top_k 10 to 10, which was not recorded"):
        synthetic_trace().restrict({"top_k": (10, 10)})
