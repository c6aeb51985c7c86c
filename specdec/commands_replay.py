"""Commands of recording and calibration: `record` and `calibrate`, what a controller is trained and judged on.

Built like those of `commands`. Knows nothing about the parser as a whole or how errors are shown.
"""

from __future__ import annotations

import sys

from specdec.commands import at_least, load, pair_options
from specdec.config import SpecdecError

SUITES = [f"laptop/{name}" for name in "mt_bench humaneval gsm8k alpaca cnn_dm nq mbpp xsum wmt14".split()]


def record_options(parser) -> None:
    pair_options(parser)
    parser.add_argument("--suites", nargs="+", default=SUITES, metavar="SUITE", help="names such as laptop/gsm8k")
    parser.add_argument("--folder", help="folder of JSONL files for suites that are not embedded")
    parser.add_argument("--limit", type=int, default=40, help="prompts per suite, over all parts; 0 for all")
    parser.add_argument("--depth", type=int, default=12, help="expansions of the deepest tree")
    parser.add_argument(
        "--top-ks", type=int, nargs="*", default=[], help="beam widths whose ranks are recorded as well"
    )
    parser.add_argument("--trees", type=int, nargs="*", default=[10], help="beam widths whose whole trees are kept")
    parser.add_argument("--most-nodes", type=int, default=240, help="largest verify_nodes that can be judged")
    parser.add_argument("--lengths", type=int, default=0, help="positions per turn with RADAR's exact distributions")
    parser.add_argument("--name", default="record", help="of the run directory")
    parser.add_argument("--estimate", action="store_true", help="say what it would take, and stop")


def record(given) -> int:
    from specdec import recording, runs
    from specdec.recording_estimate import estimate_record

    at_least("--limit", given.limit, 0)
    pair = load(given)
    names = (
        "max_new_tokens",
        "depth",
        "top_ks",
        "trees",
        "most_nodes",
        "lengths",
        "temperature",
        "seed",
        "folder",
        "name",
    )
    settings = {name: getattr(given, name) for name in names} | {"limit": given.limit or None}
    needed = estimate_record(pair, given.suites, **settings)
    print(needed.sentence, file=sys.stderr)
    if given.estimate:
        return 0
    if not needed.fits:
        raise SpecdecError(needed.sentence)
    found = recording.record(pair, given.suites, **settings)
    print(f"{found!r}", file=sys.stderr)
    print(next(run.directory for run in runs.find(given.name) if run.key == found.header["key"]))
    return 0


def calibrate_options(parser) -> None:
    parser.add_argument("--pair", default="small", help="a preset such as tiny, small or llama-3.1-8b")
    parser.add_argument("--dtype", default="auto", help="auto, float32, bfloat16 or float16")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--seconds", type=float, default=45.0, help="of measuring")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cpu-time", action="store_true", help="count processor time (one thread, busy machines)")
    parser.add_argument("--out", required=True, help="JSON file for the cost model")


def calibrate(given) -> int:
    import time

    from specdec.calibration import calibrate as measure

    pair = load(given)
    now = time.process_time if given.cpu_time else None
    print(measure(pair, seconds=given.seconds, seed=given.seed, now=now).save(given.out))
    return 0
