"""The command line: `specdec doctor | decode | audit | evaluate | estimate | record | calibrate | train | reproduce | book`.

Parses, calls the library, prints. COMMANDS is the table: what a command is for, the function that adds its options to a
parser, and the function that runs it and returns the exit status. Everything heavy is imported when a command needs it,
so that `--help` is instant. Bad input is one sentence and status 2, Ctrl-C one sentence and status 130; --debug shows
where it happened instead.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

from specdec.errors import SpecdecError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status. `arguments` default to the process's own."""
    args = _parser().parse_args(arguments)
    try:
        return args.run(args) or 0
    except KeyboardInterrupt:
        if args.debug:
            raise
        print("\nspecdec: stopped; what was written is kept, and the same command continues.", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output has left, as `head` does
        sys.stderr.close()
        return 0
    except SpecdecError as error:
        if args.debug:
            raise
        print(f"specdec: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="specdec", description="Speculative decoding, measured and reproduced.")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    for name, (text, add_options, run) in COMMANDS.items():
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
        add_options(command)
        command.set_defaults(run=run)
    return parser


# --- options and steps that commands share ----------------------------------------------------------------------------


def _pair_options(parser) -> None:
    parser.add_argument("--pair", default="small", help="a preset such as tiny, small or llama-3.1-8b")
    parser.add_argument("--dtype", default="auto", help="auto, float32, bfloat16 or float16")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")


def _decoding_options(parser) -> None:
    _pair_options(parser)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)


def _suite_options(parser) -> None:
    parser.add_argument("--suites", nargs="+", metavar="SUITE", help="names such as laptop/gsm8k (default: four)")
    parser.add_argument("--folder", help="folder of JSONL files for suites that are not embedded")
    parser.add_argument("--limit", type=int, default=4, help="prompts per suite; 0 for all")
    parser.add_argument("--part", choices=["train", "tune", "test"], help="part of each suite (default: all of it)")
    parser.add_argument("--repeats", type=int, default=1)


def _suites(args) -> list[str]:
    """The suites that were named, or the default ones."""
    from specdec.data.suites import DEFAULT_SUITES

    return args.suites or list(DEFAULT_SUITES)


def _training_options(parser) -> None:
    parser.add_argument("--out", required=True, help="folder for weights or policy, curve and checkpoints")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--restart", action="store_true", help="start over instead of continuing")


def _quiet() -> None:
    """Without transformers' own progress bars: loading a shipped pair takes a moment."""
    from transformers.utils import logging

    logging.disable_progress_bar()


def _load(args):
    from specdec.models.load import load_pair

    _quiet()
    return load_pair(args.pair, dtype=args.dtype, device=args.device)


def _at_least(lowest: int, args, *names: str) -> None:
    for name in names:
        value = getattr(args, name)
        if value is not None and value < lowest:
            raise SpecdecError(f"--{name.replace('_', '-')} must be at least {lowest}, got {value}.")


def _pick(args, *names: str) -> dict:
    return {name: getattr(args, name) for name in names}


# --- doctor -----------------------------------------------------------------------------------------------------------


def _doctor_options(parser) -> None:
    parser.add_argument("--bench", action="store_true", help="also measure the engine against transformers' generate")
    parser.add_argument("--curve", action="store_true", help="also measure cycle time against nodes and context")
    parser.add_argument("--threads", type=int, help="CPU threads while measuring (default: torch's)")
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"], choices=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=5, help="rounds of the bench")
    parser.add_argument("--cpu-time", action="store_true", help="count processor time (one thread, busy machines)")


def _doctor(args) -> int:
    from specdec.report import tables
    from specdec.tools import doctor

    _at_least(1, args, "rounds", "threads")
    _quiet()
    checks = doctor.checks(doctor.facts())
    print(tables.markdown(checks))
    options = _pick(args, "threads", "cpu_time")
    if args.bench:
        options |= {"pairs": ("tiny", "small"), "reference": True, "rounds": args.rounds, "progress": True}
    print(f"\n{tables.markdown(doctor.benchmark(tuple(args.dtype), **options))}")
    print("\nA cycle in steps of plain decoding (plain_ms each); speed: times as fast as plain decoding.")
    if args.curve:
        _curve(args)
    return int((checks["state"] == doctor.FAULT).any())


def _curve(args) -> None:
    import torch

    from specdec import runs
    from specdec.report import figures, tables
    from specdec.tools import doctor

    if args.threads:
        torch.set_num_threads(args.threads)
    dtype = args.dtype[0]
    rows = doctor.curve(doctor.reference_pair(getattr(torch, dtype)), cpu_time=args.cpu_time)
    table = tables.node_curve(rows, by="context")
    columns = ["context", "verified_tok", "draft_ms", "verify_ms", "commit_ms", "host_ms", "total_ms"]
    print(f"\n{tables.markdown(table[columns])}")
    title = f"a cycle of the reference shape, {dtype}, after so many tokens"
    figure = figures.node_curve(table, by="context", title=title)
    stem = runs.figure_path("doctor", f"cycle_{dtype}")
    print(f"\nThe curve is drawn in {figures.save(figure, stem, scale='laptop', data=table)[0]}.")


# --- decode and audit -------------------------------------------------------------------------------------------------


def _decode_options(parser) -> None:
    parser.add_argument("prompt", help="what to continue; a user message where the pair knows chat")
    parser.add_argument("--policy", default="eagle3", help="autoregressive, eagle3, static:total_tokens,depth,top_k")
    parser.add_argument("--raw", action="store_true", help="continue the text itself, without the chat template")
    _decoding_options(parser)


def _decode(args) -> int:
    from specdec.core.decode import autoregress, decode
    from specdec.evaluation.methods import AUTOREGRESSIVE, method_from

    policy = method_from(args.policy)
    pair = _load(args)
    chats = getattr(pair.tokenizer, "chat_template", None) and not args.raw
    prompt = [{"role": "user", "content": args.prompt}] if chats and args.prompt else args.prompt
    options = _pick(args, "max_new_tokens", "temperature", "seed")
    if policy is None:
        out, name, tau = autoregress(pair, prompt, **options), AUTOREGRESSIVE, ""
    else:
        out, name = decode(pair, prompt, policy, **options), repr(policy)
        tau = f"tau {out.tau:.2f} in {len(out.rows)} cycles, "
    print(out.text if out.text is not None else out.tokens)
    print(f"[{name}: {out.new_tok} tokens, {tau}{out.tokens_per_s:.0f} tokens/s]", file=sys.stderr)
    return 0


def _audit_options(parser) -> None:
    _decoding_options(parser)
    _suite_options(parser)
    parser.set_defaults(max_new_tokens=32, temperature=None)


def _audit(args) -> int:
    from specdec.data.prompts import conversation, gather
    from specdec.evaluation import lossless
    from specdec.report import tables

    _at_least(0, args, "limit")
    items = gather(_suites(args), limit=args.limit or None, **_pick(args, "part", "folder", "seed"))
    pair = _load(args)
    prompts = [conversation(pair, item, 0, []) for item in items]
    temperatures = (0.0, 1.0) if args.temperature is None else (args.temperature,)
    audit = lossless.audit(pair, prompts, temperatures=temperatures, **_pick(args, "max_new_tokens", "seed"))
    print(tables.markdown(audit.table))
    if not audit.passed:
        print(f"\nNot lossless; the first of the texts that differ:\n\n{tables.markdown(audit.failures.head())}")
    return int(not audit.passed)


# --- evaluate and estimate --------------------------------------------------------------------------------------------


def _evaluate_options(parser) -> None:
    _decoding_options(parser)
    _suite_options(parser)
    methods = ["autoregressive", "eagle3", "eagle3-scripts"]
    parser.add_argument("--methods", nargs="+", default=methods, metavar="METHOD")
    parser.add_argument(
        "--tuned", action="store_true", help="add the static tree tuned on the suites' tune part; judge on test"
    )
    parser.add_argument("--name", default="evaluate", help="of the run directory")
    parser.add_argument("--force", action="store_true", help="start over instead of continuing or reusing a run")


def _evaluate(args) -> int:
    from specdec.evaluation import bench
    from specdec.evaluation.methods import method_from
    from specdec.report import tables

    methods = {text: method_from(text) for text in args.methods}
    _print_estimate(args, probe=False)
    pair = _load(args)
    options = _pick(args, "max_new_tokens", "temperature", "seed", "folder")
    if args.tuned:
        methods["tuned"], args.part = _tuned(args, pair, options), "test"
    options |= _pick(args, "part", "repeats", "name", "force") | {"limit": args.limit or None}
    run = bench.evaluate(methods, _suites(args), pair, **options)
    table = bench.summary(run)
    shown = ["suite", "method", "prompts", "speedup", "speedup_low", "speedup_high", "tau", "tok_per_s", "same_frac"]
    print(tables.markdown(table[[name for name in shown if name in table]]))
    print(f"\nEvery row is in {run.directory}.")
    return 0


def _tuned(args, pair, options: dict):
    """The tuned static tree; SpecdecError where it was to be judged on prompts it may have seen."""
    from specdec.evaluation.tuning import tune_static

    if args.part not in (None, "test"):
        raise SpecdecError(f"--tuned judges on the test part of the suites, not on --part {args.part}.")
    policy = tune_static(pair, _suites(args), **options).policy
    print(f"The fastest static tree on the tuning prompts is {policy!r}.", file=sys.stderr)
    return policy


def _estimate_options(parser) -> None:
    _decoding_options(parser)
    _suite_options(parser)
    parser.add_argument("--prompt-tok", type=int, default=1024, help="longest prompt to reserve memory for")


def _estimate(args) -> int:
    _print_estimate(args, prompt_tok=args.prompt_tok)
    return 0


def _print_estimate(args, **options) -> None:
    """What the run will take, on stderr; SpecdecError where it does not fit into memory."""
    from specdec.tools.estimate import estimate

    _at_least(0, args, "limit")
    _at_least(1, args, "repeats", "max_new_tokens")
    options |= _pick(args, "dtype", "device", "max_new_tokens", "folder", "part", "repeats")
    needed = estimate(args.pair, _suites(args), limit=args.limit or None, **options)
    if not needed.fits:
        raise SpecdecError(needed.sentence)
    print(needed.sentence, file=sys.stderr)


# --- record and calibrate: what a controller is trained and judged on -------------------------------------------------


def _record_options(parser) -> None:
    _decoding_options(parser)
    parser.add_argument("--suites", nargs="+", metavar="SUITE", help="names such as laptop/gsm8k (default: laptop/*)")
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


def _record(args) -> int:
    from specdec import runs
    from specdec.data.suites import EMBEDDED
    from specdec.replays.record import record
    from specdec.tools.estimate import estimate_record

    _at_least(0, args, "limit")
    pair = _load(args)
    suites = args.suites or list(EMBEDDED)
    settings = _pick(args, "max_new_tokens", "depth", "top_ks", "trees", "most_nodes", "lengths", "temperature")
    settings |= _pick(args, "seed", "folder", "name") | {"limit": args.limit or None}
    needed = estimate_record(pair, suites, **settings)
    print(needed.sentence, file=sys.stderr)
    if args.estimate:
        return 0
    if not needed.fits:
        raise SpecdecError(needed.sentence)
    trace = record(pair, suites, **settings)
    print(f"{trace!r}", file=sys.stderr)
    print(next(run.directory for run in runs.find(args.name) if run.key == trace.header["key"]))
    return 0


def _calibrate_options(parser) -> None:
    _pair_options(parser)
    parser.add_argument("--seconds", type=float, default=45.0, help="of measuring")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cpu-time", action="store_true", help="count processor time (one thread, busy machines)")
    parser.add_argument("--out", required=True, help="JSON file for the cost model")


def _calibrate(args) -> int:
    from specdec.costs import calibrate

    model = calibrate.calibrate(_load(args), **_pick(args, "seconds", "seed", "cpu_time"))
    print(model.save(args.out))
    return 0


# --- train ------------------------------------------------------------------------------------------------------------

CONTROLLERS = {"resps": "Re-SpS's", "ltd": "LTD's", "radar": "RADAR's", "ours": "our"}


def _train_options(parser) -> None:
    systems = parser.add_subparsers(dest="system", required=True, metavar="target|eagle3|resps|ltd|radar|ours")
    target = systems.add_parser("target", help="a target of the shipped kind, from the generated corpus")
    eagle3 = systems.add_parser("eagle3", help="an EAGLE-3 drafter for any target, by the training-time test")
    eagle3.add_argument("--target", required=True, help="folder or hub id of a causal LM with its tokenizer")
    eagle3.add_argument("--data", help="JSONL of conversations (ShareGPT or UltraChat style); default the corpus")
    for system in (target, eagle3):
        system.add_argument("--preset", default="small", help="tiny or small (eagle3: paper as well)")
        system.add_argument("--minutes", type=float, help="stop on time instead of on steps")
        system.add_argument("--steps", type=int)
        system.add_argument("--threads", type=int)
        system.add_argument("--device", help="default: a GPU where there is one")
        _training_options(system)
    for name, whose in CONTROLLERS.items():
        system = systems.add_parser(name, help=f"{whose} controller, on a recording")
        system.add_argument("--pair", default="small", help="name of the pair that was recorded")
        system.add_argument("--preset", default="ours", choices=["paper", "official", "ours"])
        system.add_argument("--trace", required=True, help="folder of a recording (record, or notebook 21)")
        system.add_argument("--costs", required=True, help="JSON file of calibrate, or the name of a hardware profile")
        system.add_argument("--budget", default="laptop", choices=["laptop", "paper"], help="decisions to learn from")
        _training_options(system)


def _train(args) -> int:
    if args.system in CONTROLLERS:
        _train_controller(args)
        print(args.out)
        return 0
    from specdec.training.drafter.eagle3 import Budget, train_drafter

    budget, resume = Budget(**_pick(args, "minutes", "steps", "seed", "threads", "device")), not args.restart
    if args.system == "target":
        from specdec.toy.pretrain import train_target

        print(train_target(args.preset, args.out, budget, resume=resume))
    else:
        from specdec.toy.chats import CorpusChats
        from specdec.training.drafter.chats import load_conversations

        conversations = load_conversations(args.data) if args.data else CorpusChats()
        options = dict(out_dir=args.out, settings=args.preset, budget=budget, resume=resume)
        print(train_drafter(args.target, conversations, **options))
    return 0


def _train_controller(args) -> None:
    from pathlib import Path

    from specdec.costs.model import CostModel
    from specdec.costs.profiles import profile
    from specdec.replays.trace import open_trace

    trace = open_trace(Path(args.trace), args.pair)
    costs = CostModel.load(args.costs) if Path(args.costs).is_file() else profile(args.costs)
    options = {"seed": args.seed, "out_dir": Path(args.out), "resume": not args.restart}
    if args.system == "radar":
        from specdec.training.radar import train_radar

        train_radar(trace, costs, args.preset, **options)
    elif args.system == "ours":
        _train_ours(args, trace, costs)
    else:
        from specdec.policies import ltd, resps
        from specdec.training import controllers

        if args.system == "resps":
            controllers.train_resps(trace, costs, resps.CONFIGS[args.preset], **options)
        else:
            configs = ltd.LAPTOP if args.budget == "laptop" else ltd.CONFIGS
            controllers.train_ltd(trace, costs, configs[args.preset], **options)


def _train_ours(args, trace, costs) -> None:
    """On the narrowest beam whose whole trees were recorded: the cheapest to draft."""
    from pathlib import Path

    from specdec import runs
    from specdec.policies.value import ValueConfig
    from specdec.replays.static_trees import best_static
    from specdec.replays.trace import joined
    from specdec.training.value import train_value

    top_k = min(trace.header["trees"], default=None)
    if top_k is None:
        raise SpecdecError(f"{args.trace} keeps no whole trees; record again with trees=(4,), for example.")
    tune, learn = (joined([trace.select(part=part)], top_k) for part in ("tune", "train"))
    options = dict(start=best_static(tune, costs), tune_on=tune, seed=args.seed, policy_ms=None)
    policy, curve = train_value(learn, costs, ValueConfig(top_k=top_k), **options)
    runs.write_table(Path(args.out) / "curve.parquet", curve)
    policy.save(Path(args.out) / "policy")


# --- the book ---------------------------------------------------------------------------------------------------------


def _reproduce_options(parser) -> None:
    parser.add_argument("--scale", default="laptop", choices=["laptop", "paper"])
    parser.add_argument("--full", action="store_true", help="whole suites instead of a few prompts of each")
    parser.add_argument("--all", action="store_true", help="every notebook of the book, not only the main ones")
    parser.add_argument("--force", action="store_true", help="run notebooks that are fresh, too")


def _reproduce(args) -> int:
    from specdec.tools import book

    opened = book.Book(args.scale)
    names = [entry.name for entry in opened.choose((), args.all)]
    full = [name for name in names if args.full and name.startswith("30_evaluate")]
    reports = []
    for some, parameters in (([name for name in names if name not in full], {}), (full, {"limit": 0})):
        if some:
            reports.append(book.run(opened, some, force=args.force, parameters=parameters))
    return int(any(report["state"].isin(["failed", "skipped"]).any() for report in reports))


def _book_options(parser) -> None:
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="run, contents or tidy, each with --help")


def _book(args) -> int:
    from specdec.tools import book

    return book.main(args.arguments)


COMMANDS: dict[str, tuple[str, Callable, Callable]] = {
    "doctor": ("say what this machine has, what is missing or slow, and why", _doctor_options, _doctor),
    "decode": ("decode one prompt and print text, tau and tokens per second", _decode_options, _decode),
    "audit": ("check that no tree and no policy changes the text", _audit_options, _audit),
    "evaluate": ("measure methods on suites", _evaluate_options, _evaluate),
    "estimate": ("memory and time of a run before it runs", _estimate_options, _estimate),
    "record": ("record what every tree would do", _record_options, _record),
    "calibrate": ("measure what a cycle costs here", _calibrate_options, _calibrate),
    "train": ("train a target, an EAGLE-3 drafter or a controller", _train_options, _train),
    "reproduce": ("run the main notebooks of the book", _reproduce_options, _reproduce),
    "book": ("run, list or tidy the notebooks", _book_options, _book),
}

if __name__ == "__main__":
    sys.exit(main())
