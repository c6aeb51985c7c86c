"""Commands that take minutes: `evaluate`, `estimate`, `train`, `reproduce`; and what all commands share.

Each command is a function that adds its options to a parser and one that runs what was parsed and returns the status.
Heavy imports happen inside. Knows nothing about the parser as a whole or how errors are shown.

Commands of recording and calibration: `record` and `calibrate`, what a controller is trained and judged on.

Built like those of `commands`. Knows nothing about the parser as a whole or how errors are shown.

The command line: `specdec doctor | decode | audit | evaluate | estimate | record | calibrate | train | reproduce`.

Parses, calls the library, prints. Everything heavy is imported when a command needs it, so that `--help` is instant.
Bad input is one sentence and status 2, Ctrl-C one sentence and status 130; --debug shows where it happened instead.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

from specdec.errors import SpecdecError


def pair_options(parser) -> None:
    parser.add_argument("--pair", default="small", help="a preset such as tiny, small or llama-3.1-8b")
    parser.add_argument("--dtype", default="auto", help="auto, float32, bfloat16 or float16")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)


def quiet() -> None:
    """Without transformers' own progress bars: loading a shipped pair takes a moment."""
    from transformers.utils import logging

    logging.disable_progress_bar()


def load(given):
    from specdec.models.load import load_pair

    quiet()
    return load_pair(given.pair, dtype=given.dtype, device=given.device)


def at_least(name: str, value: int | None, low: int) -> None:
    if value is not None and value < low:
        raise SpecdecError(f"{name} must be at least {low}, got {value}.")


# --- evaluate and estimate --------------------------------------------------------------------------------------------

DEFAULT_SUITES = ["laptop/gsm8k", "laptop/humaneval", "laptop/mt_bench"]


def suite_options(parser) -> None:
    parser.add_argument(
        "--suites", nargs="+", default=DEFAULT_SUITES, metavar="SUITE", help="names such as laptop/gsm8k"
    )
    parser.add_argument("--folder", help="folder of JSONL files for suites that are not embedded")
    parser.add_argument("--limit", type=int, default=4, help="prompts per suite; 0 for all")
    parser.add_argument("--part", choices=["train", "tune", "test"], help="part of each suite (default: all of it)")
    parser.add_argument("--repeats", type=int, default=1)


def evaluate_options(parser) -> None:
    pair_options(parser)
    suite_options(parser)
    parser.add_argument(
        "--methods", nargs="+", default=["autoregressive", "eagle3", "eagle3-scripts"], metavar="METHOD"
    )
    parser.add_argument(
        "--tuned", action="store_true", help="add the static tree tuned on the suites' tune part; judge on test"
    )
    parser.add_argument("--name", default="evaluate", help="of the run directory")
    parser.add_argument("--force", action="store_true", help="start over instead of continuing or reusing a run")


def evaluate(given) -> int:
    from specdec.evaluation import bench
    from specdec.evaluation.methods import method_from
    from specdec.report import tables

    methods = {text: method_from(text) for text in given.methods}
    _refuse_or_print(_estimated(given, probe=False))
    pair, part = load(given), given.part
    options = dict(max_new_tokens=given.max_new_tokens, temperature=given.temperature, seed=given.seed)
    options |= dict(folder=given.folder)
    if given.tuned:
        methods["tuned"], part = _tuned(given, pair, options), "test"
    options |= dict(limit=given.limit or None, part=part, repeats=given.repeats, name=given.name, force=given.force)
    run = bench.evaluate(methods, given.suites, pair, **options)
    table = bench.summary(run)
    shown = ["suite", "method", "prompts", "speedup", "speedup_low", "speedup_high", "tau", "tok_per_s", "same_frac"]
    print(tables.markdown(table[[name for name in shown if name in table]]))
    print(f"\nEvery row is in {run.directory}.")
    return 0


def _tuned(given, pair, options: dict):
    """The tuned static tree; SpecdecError where the judgement was to be made on prompts it may have seen."""
    from specdec.evaluation.tuning import tune_static

    if given.part not in (None, "test"):
        raise SpecdecError(f"--tuned judges on the test part of the suites, not on --part {given.part}.")
    policy = tune_static(pair, given.suites, **options).policy
    print(f"The fastest static tree on the tuning prompts is {policy!r}.", file=sys.stderr)
    return policy


def estimate_options(parser) -> None:
    pair_options(parser)
    suite_options(parser)
    parser.add_argument("--prompt-tok", type=int, default=1024, help="longest prompt to reserve memory for")


def estimate(given) -> int:
    _refuse_or_print(_estimated(given, prompt_tok=given.prompt_tok))
    return 0


def _estimated(given, **options):
    from specdec.tools.estimate import estimate

    at_least("--limit", given.limit, 0)
    at_least("--repeats", given.repeats, 1)
    at_least("--max-new-tokens", given.max_new_tokens, 1)
    places = dict(dtype=given.dtype, device=given.device, max_new_tokens=given.max_new_tokens, folder=given.folder)
    wanted = dict(limit=given.limit or None, part=given.part, repeats=given.repeats)
    return estimate(given.pair, given.suites, **places, **wanted, **options)


def _refuse_or_print(needed) -> None:
    from specdec.tools.estimate import refusal

    sentence = refusal(needed)
    if sentence is not None:
        raise SpecdecError(sentence)
    print(needed.sentence, file=sys.stderr)


# --- train ------------------------------------------------------------------------------------------------------------


def train_options(parser) -> None:
    systems = parser.add_subparsers(dest="system", required=True, metavar="target|eagle3|resps|ltd|radar|ours")
    target = systems.add_parser("target", help="a target of the shipped kind, from the generated corpus")
    eagle3 = systems.add_parser("eagle3", help="an EAGLE-3 drafter for any target, by the training-time test")
    eagle3.add_argument("--target", required=True, help="folder or hub id of a causal LM with its tokenizer")
    eagle3.add_argument("--data", help="JSONL of conversations (ShareGPT or UltraChat style); default the corpus")
    for system in (target, eagle3):
        system.add_argument("--preset", default="small", help="tiny, mini or small (eagle3: paper as well)")
        system.add_argument("--out", required=True, help="folder for weights, curve and checkpoints")
        system.add_argument("--minutes", type=float, help="stop on time instead of on steps")
        system.add_argument("--steps", type=int)
        system.add_argument("--seed", type=int, default=0)
        system.add_argument("--threads", type=int)
        system.add_argument("--device", help="default: a GPU where there is one")
        system.add_argument("--restart", action="store_true", help="start over instead of continuing")
    for name in CONTROLLERS:
        _controller_options(systems.add_parser(name, help=f"{CONTROLLERS[name]} controller, on a recording"))


CONTROLLERS = {"resps": "Re-SpS's", "ltd": "LTD's", "radar": "RADAR's", "ours": "our"}


def _controller_options(system) -> None:
    system.add_argument("--pair", default="small", help="name of the pair that was recorded")
    system.add_argument("--preset", default="ours", choices=["paper", "official", "ours"])
    system.add_argument("--trace", required=True, help="folder of a recording (record, or notebook 21)")
    system.add_argument("--costs", required=True, help="JSON file of calibrate, or the name of a hardware profile")
    system.add_argument("--out", required=True, help="folder for policy, curve and checkpoints")
    system.add_argument("--budget", default="laptop", choices=["laptop", "paper"], help="decisions to learn from")
    system.add_argument("--seed", type=int, default=0)
    system.add_argument("--restart", action="store_true", help="start over instead of continuing")


def _train_controller(given) -> int:
    from pathlib import Path

    from specdec.costs.model import CostModel
    from specdec.costs.profiles import profile
    from specdec.replays.trace import open_trace

    trace = open_trace(Path(given.trace), given.pair)
    costs = CostModel.load(given.costs) if Path(given.costs).is_file() else profile(given.costs)
    options = dict(seed=given.seed, out_dir=Path(given.out), resume=not given.restart)
    if given.system == "radar":
        from specdec.policies.radar import RadarPolicy
        from specdec.training import radar, radar_data
        from specdec.training import radar as radar_module

        flat_nodes = RadarPolicy.preset(given.preset).flat_nodes
        data = radar_data.from_trace(trace.select(part="train"), flat_nodes=flat_nodes)
        latency = radar_module.latency_ms(costs, data.context_tok, flat_nodes)
        facts = {"pair": trace.header["pair"], "costs": costs.name}
        radar.train_radar(data, latency, given.preset, trained_for=facts, **options)
    elif given.system == "ours":
        _train_ours(given, trace, costs)
    else:
        from specdec.training import controllers

        train = {"resps": controllers.train_resps, "ltd": controllers.train_ltd}[given.system]
        train(trace, costs, given.preset, budget=given.budget, **options)
    print(given.out)
    return 0


def _train_ours(given, trace, costs) -> None:
    """On the narrowest beam whose whole trees were recorded: the cheapest to draft."""
    from pathlib import Path

    from specdec import runs
    from specdec.replays.static_trees import best_static
    from specdec.replays.trace import joined
    from specdec.training.value import train_ours

    top_k = min(trace.header["trees"], default=None)
    if top_k is None:
        raise SpecdecError(f"{given.trace} keeps no whole trees; record again with trees=(4,), for example.")
    tune, learn = (joined([trace.select(part=part)], top_k) for part in ("tune", "train"))
    options = dict(top_k=top_k, start=best_static(tune, costs), choose_on=tune, seed=given.seed, policy_ms=None)
    policy, curve = train_ours(learn, costs, **options)
    runs.write_table(Path(given.out) / "curve.parquet", curve)
    policy.save(Path(given.out) / "policy")


def train(given) -> int:
    if given.system in CONTROLLERS:
        return _train_controller(given)
    names = ("minutes", "steps", "seed", "threads", "device")
    options = {name: getattr(given, name) for name in names} | {"resume": not given.restart}
    if given.system == "target":
        from specdec.toy.pretrain import train_target

        folder = train_target(given.preset, given.out, **options)
    else:
        from specdec.training.drafter.chats import load_conversations
        from specdec.training.drafter.eagle3 import train_drafter

        chats = load_conversations(given.data) if given.data else None
        folder = train_drafter(given.target, given.out, given.preset, chats, **options)
    print(folder)
    return 0


# --- reproduce --------------------------------------------------------------------------------------------------------


def reproduce_options(parser) -> None:
    parser.add_argument("--scale", default="laptop", choices=["laptop", "paper"])
    parser.add_argument("--full", action="store_true", help="whole suites instead of a few prompts of each")
    parser.add_argument("--all", action="store_true", help="every notebook of the book, not only the main ones")
    parser.add_argument("--force", action="store_true", help="run notebooks that are fresh, too")


def reproduce(given) -> int:
    from specdec.tools import book

    chosen = book.Book(given.scale).choose((), given.all)
    whole = [entry.name for entry in chosen if given.full and entry.name.startswith("30_evaluate")]
    reports = []
    for names, parameters in (([e.name for e in chosen if e.name not in whole], {}), (whole, {"limit": 0})):
        if names:
            reports.append(book.run(given.scale, names, force=given.force, parameters=parameters))
    return int(any(report["state"].isin(["failed", "skipped"]).any() for report in reports))


# ---- from commands_replay ----------------------------------------


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
    from specdec import runs
    from specdec.replays import record as record_module
    from specdec.tools.estimate import estimate_record

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
    found = record_module.record(pair, given.suites, **settings)
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

    from specdec.costs.calibrate import calibrate as measure

    pair = load(given)
    now = time.process_time if given.cpu_time else None
    print(measure(pair, seconds=given.seconds, seed=given.seed, now=now).save(given.out))
    return 0


# ---- from cli ----------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status. `arguments` default to the process's own."""
    given = _parser().parse_args(arguments)
    try:
        return given.run(given) or 0
    except KeyboardInterrupt:
        if given.debug:
            raise
        print("\nspecdec: stopped; what was written is kept, and the same command continues.", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output has left, as `head` does
        sys.stderr.close()
        return 0
    except SpecdecError as error:
        if given.debug:
            raise
        print(f"specdec: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="specdec", description="Speculative decoding, measured and reproduced.")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    choices = parser.add_subparsers(dest="command", required=True, metavar="command")
    for name, (text, options, run) in COMMANDS.items():
        command = choices.add_parser(name, help=text, description=text)
        command.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
        options(command)
        command.set_defaults(run=run)
    return parser


# --- doctor -----------------------------------------------------------------------------------------------------------


def _doctor_options(parser) -> None:
    parser.add_argument("--bench", action="store_true", help="also measure the engine against transformers' generate")
    parser.add_argument("--curve", action="store_true", help="also measure cycle time against nodes and context")
    parser.add_argument("--threads", type=int, help="CPU threads while measuring (default: torch's)")
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"], choices=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=5, help="rounds of the bench")
    parser.add_argument("--cpu-time", action="store_true", help="count processor time (one thread, busy machines)")


def _doctor(given) -> int:
    from specdec.tools import doctor

    at_least("--rounds", given.rounds, 1)
    at_least("--threads", given.threads, 1)
    quiet()
    found = doctor.facts()
    print(doctor.report(found))
    if given.bench:
        _bench(given)
    if given.curve:
        _curve(given)
    return int(any(kind == doctor.FAULT for kind, _ in doctor.findings(found)))


def _bench(given) -> None:
    from specdec.report import tables
    from specdec.tools import doctor
    from specdec.tools import doctor as doctor_module

    options = dict(count=given.rounds, threads=given.threads, cpu_time=given.cpu_time)
    table = doctor_module.benchmark(tuple(given.dtype), **options)
    print(f"\n{tables.markdown(doctor.figures(table))}")
    print("\nMedians of ratios within a round [smallest .. largest round]; transformers' generate runs under sdpa.")


def _curve(given) -> None:
    import torch

    from specdec import runs
    from specdec.report import figures, tables
    from specdec.tools import doctor as doctor_module

    if given.threads:
        torch.set_num_threads(given.threads)
    rows = doctor_module.curve(doctor_module.reference_pair(getattr(torch, given.dtype[0])), cpu_time=given.cpu_time)
    table = tables.node_curve(rows, by="context")
    columns = ["context", "verified_tok", "draft_ms", "verify_ms", "commit_ms", "host_ms", "total_ms"]
    print(f"\n{tables.markdown(table[columns])}")
    figure = figures.node_curve(
        table, by="context", title=f"a cycle of the reference shape, {given.dtype[0]}, after so many tokens"
    )
    written = figures.save(figure, runs.figure_path("doctor", f"cycle_{given.dtype[0]}"), scale="laptop", data=table)
    print(f"\nThe curve is drawn in {written[0]}.")


# --- decode -----------------------------------------------------------------------------------------------------------


def _decode_options(parser) -> None:
    parser.add_argument("prompt", help="what to continue; a user message where the pair knows chat")
    parser.add_argument("--policy", default="eagle3", help="autoregressive, eagle3, static:total_tokens,depth,top_k")
    parser.add_argument("--raw", action="store_true", help="continue the text itself, without the chat template")
    pair_options(parser)


def _decode(given) -> int:
    from specdec.core.decode import autoregress, decode
    from specdec.evaluation.methods import AUTOREGRESSIVE, method_from

    policy = method_from(given.policy)
    pair = load(given)
    chats = getattr(pair.tokenizer, "chat_template", None) and not given.raw
    prompt = [{"role": "user", "content": given.prompt}] if chats and given.prompt else given.prompt
    options = dict(max_new_tokens=given.max_new_tokens, temperature=given.temperature, seed=given.seed)
    if policy is None:
        out, name = autoregress(pair, prompt, **options), AUTOREGRESSIVE
    else:
        out, name = decode(pair, prompt, policy, **options), repr(policy)
    print(out.text if out.text is not None else out.tokens)
    tau = "" if policy is None else f"tau {out.tau:.2f} in {len(out.rows)} cycles, "
    print(f"[{name}: {out.new_tok} tokens, {tau}{out.tokens_per_s:.0f} tokens/s]", file=sys.stderr)
    return 0


# --- audit ------------------------------------------------------------------------------------------------------------


def _audit_options(parser) -> None:
    pair_options(parser)
    suite_options(parser)
    parser.set_defaults(max_new_tokens=32, temperature=None)


def _audit(given) -> int:
    from specdec.data.prompts import conversation, gather
    from specdec.evaluation import lossless

    at_least("--limit", given.limit, 0)
    items = gather(given.suites, limit=given.limit or None, part=given.part, folder=given.folder, seed=given.seed)
    pair = load(given)
    prompts = [conversation(pair, item, 0, []) for item in items]
    temperatures = (0.0, 1.0) if given.temperature is None else (given.temperature,)
    options = dict(max_new_tokens=given.max_new_tokens, temperatures=temperatures, seed=given.seed)
    found = lossless.audit(pair, prompts, **options)
    print(found.summary())
    return int(not found.passed)


COMMANDS: dict[str, tuple[str, Callable, Callable]] = {
    "doctor": ("say what this machine has, what is missing or slow, and why", _doctor_options, _doctor),
    "decode": ("decode one prompt and print text, tau and tokens per second", _decode_options, _decode),
    "audit": ("check that no tree and no policy changes the text", _audit_options, _audit),
    "evaluate": ("measure methods on suites", evaluate_options, evaluate),
    "estimate": ("memory and time of a run before it runs", estimate_options, estimate),
    "record": ("record what every tree would do", record_options, record),
    "calibrate": ("measure what a cycle costs here", calibrate_options, calibrate),
    "train": ("train a target or an EAGLE-3 drafter", train_options, train),
    "reproduce": ("run the main notebooks of the book", reproduce_options, reproduce),
}

if __name__ == "__main__":
    sys.exit(main())
