"""The command line: 14 commands. OPTIONS says once what every option is; a command names its own.

Heavy modules are imported inside the functions, so that `--help` is instant. Exit statuses: 0; 1 if
the command found a fault; 2 for bad input; 130 for Ctrl-C. `--debug` shows the traceback instead.
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from specdec import machine, tools
from specdec.errors import SpecdecError

SYSTEMS = ("resps", "ltd", "radar", "ours")
SCALES = ("laptop", "paper")
# name -> (kind, default, help). kind: a type, [type] for several values, a tuple of choices, or
# bool for a flag
OPTIONS: dict[str, tuple[Any, Any, str]] = {
    # the pair and its place
    "pair": (str, None, "target and drafter by name, or a folder or hub id (default: small)"),
    "target": (str, None, "a preset, folder, hub id or GGUF file of a causal language model"),
    "drafter": (str, None, "a drafter's folder or hub id, or a kind, not the pair's own"),
    "dtype": (str, "auto", "number format of weights: auto, float32, bfloat16 or float16"),
    "device": (str, "auto", "where to run: auto, cpu or cuda"),
    "device_map": (str, None, "spread the target's layers over several GPUs: auto, balanced"),
    "on": (str, None, "several processes or machines: local, ray or ray://host:port"),
    "jobs": (int, None, "number of parallel jobs with --on (default: all cores)"),
    # prompts
    "suites": ([str], (), "suites such as laptop/gsm8k (default: embedded ones for the pair)"),
    "folder": (str, None, "JSONL files of suites that are not embedded (default: SPECDEC_DATA)"),
    "limit": (int, 4, "maximum number of prompts per suite; 0 takes all"),
    "part": (("train", "tune", "test"), None, "use only this split of each suite"),
    "data": (str, None, "conversations (drafters) or a file of prompts (controllers)"),
    # decoding and measuring
    "prompt": (str, None, "text to continue; a user message if the pair has a chat template"),
    "policy": (str, "tuned", "tuned, autoregressive, eagle3, static:60,7,10, or a policy's folder"),
    "methods": ([str], ("autoregressive", "eagle3", "eagle3-scripts"), "methods to compare"),
    "raw": (bool, False, "continue the text itself, without the chat template"),
    "max_new_tokens": (int, 128, "maximum number of new tokens per answer"),
    "temperature": (float, 0.0, "sampling temperature; 0 decodes greedily"),
    "seed": (int, 0, "random seed"),
    "repeats": (int, 1, "number of times to decode every prompt"),
    "tuned": (bool, False, "add the fastest static tree on the tuning prompts; judge on the rest"),
    "force": (bool, False, "start over instead of continuing or reusing a run"),
    "cpu_time": (bool, False, "measure processor time instead of the wall clock (one thread)"),
    "bench": (bool, False, "also time cycles of more pairs, in more rounds"),
    "gpu": (str, None, "compute from this GPU's data sheet: a100, h100, rtx3090 or t4"),
    "seconds": (float, 45.0, "duration of the measurement"),
    "estimate": (bool, False, "only print the estimated time and space"),
    # recordings
    "depth": (int, 12, "draft forwards after the first of the deepest tree"),
    "top_ks": ([int], (1, 2, 8, 16), "widths whose acceptance is recorded, but not the trees"),
    "trees": ([int], (4, 10), "widths whose whole trees are recorded"),
    "family": ([int], (), "record every tree up to these children per node and nodes per level"),
    "most_nodes": (int, 240, "largest number of verified nodes that can be replayed"),
    "trace": (str, None, "folder of a recording (default: the newest one of the pair)"),
    "costs": (str, None, "costs of a cycle: file of `specdec calibrate` or a hardware profile"),
    "machines": ([str], None, "hardware profiles to judge at as well (default: three GPUs)"),
    # trainings
    "preset": (str, None, "settings by name"),
    "set": (["extend"], (), "change settings of the preset, such as passes=2 (repeatable)"),
    "objective": (str, "ppow", "what to optimise: ppow, cst, kl_only, distillspec-reverse, ..."),
    "fields": (["extend"], (), "change settings of the objective, such as beta=0.1"),
    "start_from": (str, None, "folder of the drafter to continue from"),
    "minutes": (float, None, "stop after this many minutes instead of the preset's steps"),
    "steps": (int, None, "length of the training in steps or decisions (default: the preset's)"),
    "restart": (bool, False, "start over instead of continuing a run"),
    "budget": (SCALES, "laptop", "training length in decisions"),
    "variant": (("max_entropy", "standard"), "max_entropy", "variant of Re-SpS"),
    "order": (("6.1", "4"), "6.1", "section of LTD's paper whose order of rounds is used"),
    "systems": ([str], SYSTEMS, "controllers to train"),
    "seeds": ([int], (0,), "training seeds for each controller"),
    "out": (str, None, "output folder or file"),
    "tokens": (str, "3M", "total number of answer tokens in the folder, such as 500k or 3M"),
    "rows": (int, 64, "number of chats generated in parallel"),
    "answer_tok": (int, 320, "maximum number of tokens of an answer"),
    "prompts": (str, None, "file of prompts to answer before others are made up"),
    # the book
    "all": (bool, False, "run every notebook of the book, not only the main ones"),
    "scale": (SCALES, "laptop", "budgets of the notebooks"),
    "only": ([str], (), "names of notebooks or beginnings of them (2: the twenties)"),
    "p": (["append"], (), "set a parameter of the notebooks (repeatable)"),
    "smoke": (bool, False, "run with the small settings of the tests"),
    "notebooks": (str, None, "folder of the notebooks (default: SPECDEC_NOTEBOOKS)"),
    "publish": (bool, False, "copy the items of the runs into figures/"),
    "replace": (bool, False, "with --publish: also replace items with more rows than these"),
    "check": (bool, False, "change nothing; only list notebooks that are not tidy"),
}
PAIR = "pair target drafter"
PLACE = "dtype device device_map"
PROMPTS = "suites folder limit part"
DECODING = "max_new_tokens temperature seed"
# two commands have commands of their own
GROUPS = {"train": "train a drafter or a controller", "book": "run, list or open the notebooks"}


REQUIRED = object()  # as the default of an option


class Command(NamedTuple):
    """A command: its function, help, options, and defaults that differ from OPTIONS."""

    function: Callable[[argparse.Namespace], int | None]
    text: str
    options: str
    defaults: dict[str, Any]


COMMANDS: dict[str, Command] = {}


def command(name: str, *options: str, **defaults) -> Callable:
    """Decorator that adds a function to COMMANDS; its docstring is the help."""

    def add(function: Callable) -> Callable:
        COMMANDS[name] = Command(function, function.__doc__ or "", " ".join(options), defaults)
        return function

    return add


def add_option(parser: argparse.ArgumentParser, name: str, defaults: dict[str, Any]) -> None:
    """The argument of an option; a name in capitals is a positional one."""
    if name.isupper():
        parser.add_argument(name.lower(), help=OPTIONS[name.lower()][2])
        return
    kind, default, text = OPTIONS[name]
    default = defaults.get(name, default)
    facts: dict[str, Any] = {"default": default, "help": text}
    if kind is bool:
        facts["action"] = "store_true"
    elif kind == ["append"]:
        facts.update(action="append", nargs=2, default=[], metavar=("NAME", "VALUE"))
    elif kind == ["extend"]:
        facts.update(action="extend", nargs="*", default=[])
    elif isinstance(kind, list):
        facts.update(type=kind[0], nargs="*")
    elif isinstance(kind, tuple):
        facts["choices"] = kind
    else:
        facts["type"] = kind
    if default is REQUIRED:
        facts["required"] = True
    elif default not in (None, (), False):
        facts["help"] = f"{text} (default: {default})"
    parser.add_argument("-p" if name == "p" else f"--{name.replace('_', '-')}", **facts)


def parser() -> argparse.ArgumentParser:
    """The argument parser."""
    title = "Speculative decoding, measured and reproduced."
    top = argparse.ArgumentParser("specdec", description=title)
    top.add_argument("--debug", action="store_true", help="show the traceback of an error")
    groups = {"": top.add_subparsers(dest="command", required=True, metavar="command")}
    for name, text in GROUPS.items():
        group = groups[""].add_parser(name, help=text, description=text)
        groups[name] = group.add_subparsers(dest="system", required=True, metavar="system")
    for name, line in COMMANDS.items():
        group, _, last = name.rpartition(" ")
        each = groups[group].add_parser(last, help=line.text, description=line.text)
        each.add_argument("--debug", action="store_true", default=argparse.SUPPRESS)
        each.set_defaults(run=line.function)
        for option in line.options.split():
            add_option(each, option, line.defaults)
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status. `arguments` default to the process's own."""
    args = parser().parse_args(arguments)
    if getattr(args, "notebooks", None):
        os.environ[machine.NOTEBOOKS_VARIABLE] = args.notebooks
    usual = warnings.formatwarning
    # a warning without its line of code
    warnings.formatwarning = lambda message, *_, **__: f"specdec: {message}\n"
    try:
        return args.run(args) or 0
    except BrokenPipeError:  # the reader of our output has closed it, as `head` does
        sys.stderr.close()
        return 0
    except (SpecdecError, KeyboardInterrupt) as error:
        if args.debug:
            raise
        if isinstance(error, KeyboardInterrupt):
            error = "stopped; what was written is kept, and the same command continues."
        print(f"specdec: {error}", file=sys.stderr)
        return 2 if isinstance(error, SpecdecError) else 130
    finally:
        warnings.formatwarning = usual


def _print_table(table, digits: int = 2) -> None:
    from specdec.report.tables import markdown

    print(markdown(table, digits=digits))


def _values(args: argparse.Namespace, names: str) -> dict[str, Any]:
    """Options as keyword arguments; a limit of 0 is none."""
    values = {name: getattr(args, name) for name in names.split()}
    if "limit" in values:
        values["limit"] = args.limit or None
    return values


def _which(args: argparse.Namespace):
    return tools.places.which(args.pair, args.target, args.drafter)


def _load(args: argparse.Namespace):
    """The pair of the options."""
    return tools.places.load(_which(args), args.dtype, args.device, args.device_map)


def _suites(args: argparse.Namespace) -> list[str]:
    """The named suites, or the usual embedded ones for the pair."""
    from specdec.data.suites import DEFAULT_NAMES, embedded_suite

    pair = _which(args).name
    return list(args.suites) or [embedded_suite(name, pair) for name in DEFAULT_NAMES]


@command("doctor", "bench")
def doctor(args) -> int:
    """report this machine's features, missing parts and the costs of a cycle here"""
    checks = tools.doctor.checks()
    _print_table(checks)
    print()
    pairs = ("tiny", "small") if args.bench else ("small",)
    _print_table(tools.doctor.benchmark(pairs, rounds=5 if args.bench else 1))
    return int((checks["state"] == tools.doctor.FAULT).any())


@command("pairs")
def pairs(args) -> None:
    """list the pairs known by name to --pair and the notebooks"""
    from specdec.models.load import at_hand
    from specdec.models.pairs import names

    for name in names():
        print(f"{name:20} {'available' if at_hand(name) else 'to be downloaded'}")


@command("decode", "PROMPT policy raw", PAIR, PLACE, DECODING)
def decode(args) -> None:
    """decode one prompt and print text, tau and tokens per second"""
    from specdec.core.decode import autoregress
    from specdec.core.decode import decode as drafted
    from specdec.core.policy import Static

    settings = _values(args, f"raw {DECODING}")
    tuned = args.policy == "tuned"
    method = None if tuned else tools.places.policy(args.policy, _which(args).name)
    models = _load(args)
    if tuned:
        method = Static.of(models.usual_tree)
    if method is None:
        out = autoregress(models, args.prompt, **settings)
        facts = f"autoregressive: {out.new_tok} tokens"
    else:
        out = drafted(models, args.prompt, method, **settings)
        facts = f"{method!r}: {out.new_tok} tokens, tau {out.tau:.2f} in {len(out.rows)} cycles"
    print(out.tokens if out.text is None else out.text)
    print(f"[{facts}, {out.tokens_per_s:.0f} tokens/s]", file=sys.stderr)


AUDITED: dict[str, Any] = {"methods": (), "max_new_tokens": 32, "temperature": None}


@command("audit", "methods", PAIR, PLACE, DECODING, PROMPTS, **AUDITED)
def audit(args) -> int:
    """check that no tree and no policy changes the text, at temperature 0 and 1"""
    from specdec.data.suites import gather, openings
    from specdec.evaluation import lossless

    policies = lossless.default_policies(args.seed)
    for text in args.methods:
        policies[text] = tools.places.policy(text, _which(args).name)
    items = gather(_suites(args), **_values(args, "limit part folder seed"))
    models = _load(args)
    temperatures = (0.0, 1.0) if args.temperature is None else (args.temperature,)
    settings = _values(args, "max_new_tokens seed")
    prompts = openings(models, items)
    result = lossless.audit(models, prompts, policies, temperatures=temperatures, **settings)
    _print_table(result.table)
    if result.unasked:
        print(f"Never asked, so not tested: {', '.join(result.unasked)}.")
    if len(result.failures):
        print("Not lossless; the first of the texts that differ:")
        _print_table(result.failures.head())
    return int(not result.passed)


MEASURING = "methods tuned repeats force on jobs"


@command("evaluate", MEASURING, PAIR, PLACE, DECODING, PROMPTS)
def evaluate(args) -> None:
    """measure the speed of methods on suites"""
    from specdec.evaluation import bench
    from specdec.evaluation.tuning import tune_static

    methods = {}
    for text in args.methods:
        methods[text] = tools.places.policy(text, _which(args).name)
    if args.tuned and args.part not in (None, "test"):
        raise SpecdecError(f"--tuned evaluates on the test part, not on --part {args.part}.")
    suites = _suites(args)
    models = _load(args)
    if args.tuned:
        settings = _values(args, f"{DECODING} folder")
        methods["tuned"] = tune_static(models, suites, **settings).policy
        args.part = "test"
    settings = _values(args, f"{DECODING} folder limit part repeats force on jobs")
    run = bench.evaluate(methods, suites, models, **settings)
    table = bench.summary(run)
    columns = ["suite", "method", "prompts", "speedup", "speedup_low", "speedup_high", "tau"]
    columns += ["tok_per_s", "same_frac", "accuracy_frac"]
    _print_table(table.reindex(columns=columns).dropna(axis=1, how="all"))
    print(run.directory)


@command("estimate", "gpu repeats max_new_tokens dtype device", PAIR, PROMPTS)
def estimate(args) -> None:
    """estimate memory and time of a run before it runs"""
    names = "dtype device drafter gpu max_new_tokens limit folder part repeats"
    needed = tools.estimate.estimate(_which(args).base, _suites(args), **_values(args, names))
    if not needed.fits:
        raise SpecdecError(needed.sentence)
    print(needed.sentence, file=sys.stderr)


SHAPES = "depth top_ks trees family most_nodes"
RECORDING = f"data estimate {SHAPES} on jobs suites folder limit"


@command("record", RECORDING, PAIR, PLACE, DECODING, limit=40)
def record(args) -> None:
    """record what every tree would accept, so that any policy can be replayed"""
    from specdec import runs
    from specdec.data.suites import NAMES, Prompt, embedded_suite
    from specdec.replays import record as recording
    from specdec.training.drafter.generate_data import read_prompts

    # 1. the pair and its prompts
    models = _load(args)
    settings = _values(args, f"{DECODING} {SHAPES} limit folder on jobs")
    widths = (*args.top_ks, *args.trees)
    settings["lengths"] = recording.usual_lengths(models, widths, args.depth)
    prompts = list(args.suites) or [embedded_suite(name, models.name) for name in NAMES]
    if args.data:  # the user's turns of every line: the pair gives its own answers
        name = Path(args.data).stem
        prompts = {name: []}
        for chat in read_prompts(Path(args.data)):
            turns = tuple(turn["content"] for turn in chat if turn["role"] == "user")
            prompts[name].append(Prompt(f"{name}/{len(prompts[name])}", name, turns))
        settings["part"] = recording.SPLIT
    # 2. what it needs
    needed = tools.estimate.estimate_record(models, prompts, **settings)
    print(needed.sentence, file=sys.stderr)
    if args.estimate:
        return
    if not needed.fits:
        raise SpecdecError(needed.sentence)
    # 3. the recording, which other commands then find
    trace = recording.record(models, prompts, **settings)
    print(f"{trace!r}", file=sys.stderr)
    for run in runs.find(tools.places.RECORDINGS):
        if run.key == trace.header["key"]:
            tools.places.leave_recording(run.directory, trace)
            print(run.directory)


WRITING = "out tokens minutes rows answer_tok prompts folder seed estimate"


@command("generate-data", "TARGET", WRITING, PLACE, out=REQUIRED)
def generate_data(args) -> None:
    """let a chat model write prompts and answers to train its drafter on"""
    from specdec.training.drafter import generate_data as chats

    thousands = {"k": 1_000, "M": 1_000_000}
    try:
        total = int(float(args.tokens.rstrip("kM")) * thousands.get(args.tokens[-1:], 1))
    except ValueError:
        raise SpecdecError(f"--tokens takes 500k or 3M, not {args.tokens!r}.") from None
    settings = _values(args, "seed rows answer_tok")
    if args.prompts:
        settings["prompts"] = Path(args.prompts)
    config = chats.ChatConfig(**settings)
    args.pair = args.drafter = None
    pair = _load(args)
    end = {"tokens": total, "minutes": args.minutes, "benchmarks": args.folder}
    files = chats.generate_chats(pair, config, args.out, **end)
    counts = ", ".join(f"{name} {count:,}" for name, count in files.counts.items())
    print(f"{args.out} holds {files.answer_tok:,} answer tokens ({counts}).")


@command("score", "POLICY trace costs machines")
def score(args) -> None:
    """judge a controller by replay: speed over plain decoding and the tuned tree"""
    from specdec.evaluation import score as module

    machines = module.MACHINES if args.machines is None else args.machines
    result = module.score(args.policy, trace=args.trace, costs=args.costs, machines=machines)
    _print_table(result.table, digits=3)
    print(f"\n{result.sentence}")


@command("calibrate", "seconds seed cpu_time out", PAIR, PLACE)
def calibrate(args) -> None:
    """measure the time of every part of a cycle on this machine"""
    from specdec.core.pair import dtype_name
    from specdec.costs.calibrate import calibrate as measure

    models = _load(args)
    costs = measure(models, **_values(args, "seconds seed cpu_time"))
    dtype = dtype_name(models.target.dtype)
    print(costs.save(args.out or tools.places.costs_file(models.name, dtype)))
    tree = None if args.out else tools.places.keep_tree(models.name, dtype)
    if tree:
        print(f"{models.name} now decodes with the tree {tree.text}, the fastest at these costs.")


def train_drafter(args) -> None:
    """Train a drafter of one kind, or continue one with PPOW."""
    from specdec.data.toy_chats import CorpusChats
    from specdec.training.drafter import chats, eagle3, presets

    # 1. the settings; eagle3 has no objective, and only that of ppow has a name
    names = (args.system, args.target, args.preset, args.set, args.start_from)
    more = _values(args, f"seed {MORE.get(args.system, 'fields')}")
    settings, aim, start = presets.training_named(*names, own_text=bool(args.data), **more)
    budget = presets.Budget(**_values(args, "minutes steps seed device"))
    # 2. the training
    conversations = chats.load_conversations(args.data) if args.data else CorpusChats()
    how: dict = {"settings": settings, "objective": aim, "start_from": start, "budget": budget}
    how.update(out_dir=args.out, resume=not args.restart)
    print(eagle3.train_drafter(args.target, conversations, **how))


def _recording(args: argparse.Namespace) -> tuple:
    """The recording that a training reads, and its prices."""
    which = _which(args)
    name = None if args.trace and not which.typed else which.name
    recorded = tools.places.trace(args.trace, name)
    header = recorded.header
    return recorded, tools.places.costs(args.costs, header["pair"], header["dtype"])


def train_controller(args) -> None:
    """Train a controller on a recording."""
    from specdec import runs
    from specdec.policies import ltd
    from specdec.policies.base import setting
    from specdec.training import controllers

    # 1. the recording and its prices; with --data they are made first
    if args.data:
        if args.trace:
            raise SpecdecError("give --data (prompts to record) or --trace, and not both.")
        chosen = []
        for name in PAIR.split():
            if getattr(args, name):
                chosen += [f"--{name}", getattr(args, name)]
        parse = parser().parse_args
        record(parse(["record", "--data", args.data, "--limit", "0", *chosen]))
        if not args.costs:
            calibrate(parse(["calibrate", *chosen]))
    recorded, prices = _recording(args)
    pair, dtype = recorded.header["pair"], recorded.header["dtype"]
    # 2. the settings
    changes = dict(setting("--set", "ppo.gamma=0.9", text) for text in args.set)
    if args.system == "ltd":
        changes.setdefault("rounds", ltd.ORDERS[args.order])
    settings = _values(args, "preset steps seed")
    if args.system == "resps":
        settings["variant"] = args.variant
    if changes.get("state") == "text" and "text_state" not in recorded.header:
        which = _which(args)
        which = which if which.typed else tools.places.which(pair)
        texts = runs.workbook_module("texts", "experiments")
        recorded = texts.embedded(recorded, lambda: tools.places.load(which, dtype))
    # 3. the training
    folder = Path(args.out or tools.places.policy_folder(pair, args.system, dtype))
    how = {"out_dir": folder, "resume": not args.restart, "paper": args.budget == "paper"}
    controllers.train_system(args.system, recorded, prices, changes=changes, **settings, **how)
    print(folder)


DRAFTERS = {
    "eagle3": "train an EAGLE-3 drafter for any target, by the training-time test",
    "ppow": "continue training a drafter, with PPOW or another objective",
    "block": "train a block drafter, which drafts all positions in one pass",
    "eagle1": "train an EAGLE-1 drafter (also for EAGLE-2's trees)",
    "hass": "train an EAGLE-1 drafter by HASS",
    "griffin": "train a GRIFFIN drafter",
    "medusa": "train Medusa's heads",
    "hydra": "train Hydra's heads",
    "lm": "train a small language model as drafter",
}
DRAFTING = "target out data preset set start_from minutes steps device seed restart"
CONTROLLING = f"{PAIR} trace costs preset steps budget out"
MORE = {"eagle3": "", "ppow": "objective fields", "resps": "variant", "ltd": "order"}
for _name, _text in DRAFTERS.items():
    _defaults = {"target": REQUIRED, "out": REQUIRED, "device": None}
    if _name != "ppow":
        _defaults["preset"] = "small"
    _options = f"{DRAFTING} {MORE.get(_name, 'fields')}"
    COMMANDS[f"train {_name}"] = Command(train_drafter, _text, _options, _defaults)
for _name in SYSTEMS:
    _text = f"train the controller {_name} on a recording"
    _options = f"{CONTROLLING} data set seed restart {MORE.get(_name, '')}"
    COMMANDS[f"train {_name}"] = Command(train_controller, _text, _options, {"preset": "ours"})


@command("train sweep", CONTROLLING, "systems seeds on jobs", preset="ours", out=REQUIRED)
def train_sweep(args) -> None:
    """train several controllers with several seeds; existing ones are kept"""
    from specdec.training import controllers

    recorded, prices = _recording(args)
    settings = _values(args, "seeds preset steps on jobs")
    settings.update(out_dir=Path(args.out), paper=args.budget == "paper")
    _print_table(controllers.train_sweep(args.systems, recorded, prices, **settings))


@command("items", "scale publish replace notebooks")
def items(args) -> int:
    """list the papers' tables and figures and the state of each"""
    from specdec import runs

    book_items = runs.workbook_module("items")
    if not args.publish:
        table = book_items.status(args.scale)
        _print_table(table[["item", "state", "missing", "scale", "notebook"]])
        return 0
    sources = runs.workbook_module("claims").sources(args.scale, richest=not args.replace)
    published = book_items.publish(args.scale, sources, args.replace)
    # README's verdicts and figure follow from the published rows
    if runs.home() == runs.workbook():
        runs.workbook_module("speeds").write(book_items.figures_dir())
        page = runs.workbook_module("page")
        page.write_verdicts(runs.home() / "README.md", book_items.figures_dir())
    _print_table(published)
    return int((published["state"] == "refused").any())


@command("reproduce", "all force scale notebooks on jobs")
def reproduce(args) -> int:
    """run the main notebooks of the book and write a page of all results"""
    args.only, args.p, args.smoke = (), (), False
    return book_run(args)


@command("book run", "only p smoke all force scale notebooks on jobs")
def book_run(args) -> int:
    """run the notebooks whose results are out of date"""
    import yaml

    book = tools.book.Book(args.scale)
    values = {name: yaml.safe_load(text) for name, text in args.p}  # a number, flag or list
    how = _values(args, "force smoke on jobs")
    report = tools.book.run(book, args.only, parameters=values, everything=args.all, **how)
    if not args.only:
        tools.book.write_page(book)
    return int(report["state"].isin(["failed", "skipped"]).any())


@command("book contents", "scale notebooks")
def book_contents(args) -> None:
    """print the table of contents with the state of each notebook"""
    print(tools.book.contents(args.scale))


@command("book pages", "only scale notebooks")
def book_pages(args) -> None:
    """write the executed notebooks as pages with pictures into figures/book"""
    from specdec import runs

    pages = runs.workbook_module("executed").write_pages(tools.book.Book(args.scale), args.only)
    print(*pages, sep="\n")


@command("book student", "out notebooks")
def book_student(args) -> None:
    """write the teaching notebooks without their solutions"""
    from specdec import runs

    folder = Path(args.out) if args.out else runs.home() / "runs" / "student"
    print(*tools.book.write_student_edition(folder), sep="\n")


@command("book lab", "notebooks")
def book_lab(args) -> int:
    """open the book in JupyterLab"""
    return tools.book.open_lab([])


@command("book tidy", "check notebooks")
def book_tidy(args) -> int:
    """remove outputs from the notebooks and rewrite their first cells"""
    untidy = tools.book.tidy_all(check=args.check)
    print("\n".join(untidy) or "everything is tidy")
    return int(args.check and bool(untidy))


if __name__ == "__main__":
    sys.exit(main())
