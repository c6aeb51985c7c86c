"""What `costs` refuses: tables and machines that are none, calibrations that measure nothing."""

from fakes.traces import round_costs

from refusals import row
from specdec.core.pair import Pair
from specdec.costs.calibrate import calibrate
from specdec.costs.profiles import profile, roofline
from specdec.models.ngrams import NgramDrafter

FLAT = dict(bandwidth_gb_per_s=1e3, tflop_per_s=100, layers=2, hidden=64)
SMALL = dict(
    top_ks=(1, 2, 4),
    nodes=(0, 2, 5, 9, 20),
    depth=4,
    contexts=(10, 60, 150),
    progress=False,
    seconds=0.1,
)


def tables(**fields):
    return lambda given: round_costs(**fields)


def machine(parameters=1e9, **fields):
    return lambda given: roofline(parameters, 1e8, **FLAT | fields)


def measured(**options):
    return lambda given: calibrate(given.bigrams, **SMALL | options)


def of_drafter(make):
    return lambda given: calibrate(Pair(given.bigrams.target, make(given.bigrams.target)), **SMALL)


ROWS = [
    row("verification that falls", tables(verify=(10.0, 9.0, 35.0)), "never fall"),
    row("slopes that fall", tables(verify_per_tok=(0.2, 0.1, 0.1)), "never fall"),
    row("a table that is too short", tables(verify=(10.0, 15.0)), "per grid point"),
    row("a time that is no number", tables(root=(1.0, float("nan"))), "at least 0 ms"),
    row("a time below 0", tables(expand=(-1.0, 2.0)), "at least 0 ms"),
    row("nodes that descend", tables(nodes=(0, 30, 10)), "ascending"),
    row("nodes without 0", tables(nodes=(1, 10, 30)), "nodes at 0"),
    row("widths from 0", tables(widths=(0, 4)), "widths start at 1"),
    row("a step below 0", tables(step=-1.0), "at least 0 ms"),
    row("no kind of model", tables(kind="guessed"), "'guessed'"),
    row("a batch of nothing", lambda given: given.costs.batched(0), "texts"),
    row("no such profile", lambda given: profile("ltd-a100"), "'ltd-a100-vicuna-13b'"),
    row("a memory that stands still", machine(bandwidth_gb_per_s=0), "above 0"),
    row("fewer than no weights", machine(parameters=-1), "above 0"),
    row("no seconds", measured(seconds=0), "seconds must be"),
    row("seconds that are no number", measured(seconds=float("nan")), "seconds"),
    row("one context", measured(contexts=(10,)), "two or more contexts"),
    row("contexts beyond the target's", measured(contexts=(10, 5000)), "two or more contexts"),
    row("too shallow trees", measured(depth=2), "depth of at least 3"),
    row("nodes to measure without 0", measured(nodes=(3, 7)), "nodes from 0"),
    row("a width of 0", measured(top_ks=(0, 4)), "top_ks must lie"),
    row("a width beyond the vocabulary", measured(top_ks=(4, 100)), "top_ks must lie"),
    row("a pair without drafter", of_drafter(lambda target: None), "has forwards"),
    row("a drafter that only copies", of_drafter(NgramDrafter), "has forwards"),
]
