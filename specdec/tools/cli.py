"""The command line: 14 commands, each a function whose signature is its options.

Parameters without a default are positional, others become `--options`; False makes a flag, a tuple
an option with several values. HELP explains every name once. Heavy modules are imported inside the
functions, so that `--help` is instant.
Exit statuses: 0; 1 if the command found a fault (a failed notebook, a different text); 2 for bad
input, in one sentence; 130 for Ctrl-C. `--debug` shows the traceback instead.
"""

from __future__ import annotations

import argparse
import inspect
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

from specdec import machine, tools
from specdec.errors import SpecdecError, check_integer

SYSTEMS = ("resps", "ltd", "radar", "ours")
HELP = {
    "all": "run every notebook of the book, not only the main ones",
    "answer_ms": "time of one answer in milliseconds (default: measured)",
    "answer_tok": "maximum number of tokens of an answer",
    "bench": "also time cycles of more pairs, in more rounds",
    "budget": "training length in decisions: laptop or paper",
    "check": "change nothing; only list notebooks that are not tidy",
    "costs": "costs of a cycle: file of `specdec calibrate` or name of a hardware profile",
    "cpu_time": "measure processor time instead of the wall clock (one thread)",
    "data": "conversations (drafters) or prompts to record (controllers): a file or folder",
    "depth": "expansions (draft forwards after the first) of the deepest tree",
    "device": "where to run: auto, cpu or cuda",
    "device_map": "spread the target's layers over several GPUs: auto, balanced or sequential",
    "drafter": "folder or hub id of a drafter, or a kind such as suffix, instead of the pair's own",
    "dtype": "number format of weights: auto, float32, bfloat16 or float16",
    "estimate": "only print the estimated time and space",
    "family": "record every tree up to this many children per node and nodes per level: 3 8",
    "features": "folder for cached target features of a fixed text",
    "features_gb": "disk budget for cached target features, in GB; 0 disables the cache",
    "fields": "change settings of the objective, such as beta=0.1",
    "folder": "folder of JSONL files for suites that are not embedded (default: SPECDEC_DATA)",
    "force": "start over instead of continuing or reusing a run",
    "full": "evaluate whole suites instead of a few prompts of each",
    "gpu": "compute from this GPU's data sheet: a100, h100, rtx3090 or t4",
    "jobs": "number of parallel jobs with --on (default: all cores)",
    "lengths": "positions per turn with RADAR's exact distributions",
    "limit": "maximum number of prompts per suite; 0 takes all",
    "machines": "hardware profiles to judge at as well (default: three GPUs)",
    "max_new_tokens": "maximum number of new tokens per answer",
    "methods": "decoding methods to compare, written as for --policy of `specdec decode`",
    "minutes": "stop after this many minutes instead of the preset's steps",
    "most_nodes": "largest number of verified nodes that can be replayed",
    "name": "name of the run directory",
    "no_browser": "start JupyterLab without opening a browser",
    "notebooks": "folder of the notebooks (default: SPECDEC_NOTEBOOKS, or the checkout's)",
    "objective": "what to optimise: ppow, cst, kl_only, distillspec-reverse, ...",
    "on": "where to run: local (several processes), ray or ray://host:port (default: here)",
    "only": "names of notebooks or beginnings of them (2: the twenties)",
    "order": "section of LTD's paper whose order of rounds is used: 6.1 or 4",
    "out": "output folder or file",
    "p": "set a parameter of the notebooks (repeatable)",
    "pair": "target and drafter by name, or a folder or hub id (default: small)",
    "part": "use only this split of each suite: train, tune or test",
    "policy": "how to draft: tuned, autoregressive, eagle3, static:total_tokens,depth,top_k, "
    "the folder of a learned policy, or a shipped one such as small/ours-float32",
    "preset": "settings by name",
    "prompt": "text to continue; a user message if the pair has a chat template",
    "prompt_tok": "longest prompt to reserve memory for, in tokens",
    "prompts": "file of prompts to answer before others are made up",
    "publish": "copy the items of the runs into figures/",
    "raw": "continue the text itself, without the chat template",
    "repeats": "number of times to decode every prompt",
    "replace": "with --publish: also replace items with more rows than these",
    "restart": "start over instead of continuing a run",
    "rounds": "rounds of --bench; in each, every method decodes every prompt",
    "rows": "number of chats generated in parallel",
    "scale": "budgets of the notebooks: laptop or paper",
    "seconds": "duration of the measurement in seconds",
    "seed": "random seed",
    "seeds": "training seeds for each controller",
    "set": "change settings of the preset, such as passes=2 (repeatable)",
    "smoke": "run with the small settings of the tests",
    "start_from": "folder of the drafter to continue from",
    "steps": "length of the training in steps or decisions (default: the preset's)",
    "suites": "suites of prompts such as laptop/gsm8k (default: embedded ones for the pair)",
    "systems": "controllers to train",
    "target": "a preset, folder, hub id or GGUF file of a causal language model",
    "temperature": "sampling temperature; 0 decodes greedily",
    "threads": "CPU threads to use (default: torch's choice)",
    "tokens": "total number of answer tokens in the folder, such as 500k or 3M",
    "top_ks": "beam widths whose acceptance is recorded, but not the trees",
    "trace": "folder of a recording (default: the newest one of the pair)",
    "trees": "beam widths whose whole trees are recorded",
    "tuned": "add the fastest static tree on the tuning prompts; evaluate on the test prompts",
    "unroll": "draft steps that training unrolls (default: the preset's)",
    "variant": "variant of Re-SpS: max_entropy or standard",
}
CHOICES = {
    "part": ("train", "tune", "test"),
    "scale": ("laptop", "paper"),
    "budget": ("laptop", "paper"),
    "order": ("6.1", "4"),
    "variant": ("max_entropy", "standard"),
    "systems": SYSTEMS,
}
# options that must be at least 1, if they are given
COUNTS = ("rows", "answer_tok", "repeats", "rounds", "threads", "max_new_tokens", "jobs")
# None as a default leaves the type to the annotation
TYPES = {"int": int, "float": float}

COMMANDS: dict[str, Callable] = {}
TRAININGS: dict[str, tuple[str, Callable]] = {}
BOOK: dict[str, Callable] = {}


def command(name: str, table: dict[str, Callable] = COMMANDS) -> Callable:
    """Decorator that adds a function to a table of commands; its docstring is the help."""

    def add(function: Callable) -> Callable:
        table[name] = function
        return function

    return add


def add_options(parser: argparse.ArgumentParser, function: Callable, skip=()) -> None:
    """An argument for every parameter of a command's function."""
    parser.add_argument("--debug", action="store_true", default=argparse.SUPPRESS)
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name not in skip:
            _add_option(parser, parameter)
    parser.set_defaults(run=function)


def _add_option(parser: argparse.ArgumentParser, parameter: inspect.Parameter) -> None:
    name = parameter.name
    text = HELP[name].replace("%", "%%")
    annotation = str(parameter.annotation).removesuffix(" | None")
    facts: dict = {"choices": CHOICES.get(name)}
    # 1. positional, or a flag
    if parameter.kind is not parameter.KEYWORD_ONLY:
        if parameter.default is not parameter.empty:
            facts.update(nargs="?", default=parameter.default)
        parser.add_argument(name, help=text, **facts)
        return
    flag = "-p" if name == "p" else f"--{name.replace('_', '-')}"
    if parameter.default is False:
        parser.add_argument(flag, action="store_true", help=text)
        return
    # 2. the kind of a value, and how many
    if annotation.startswith("tuple"):
        annotation = annotation.removeprefix("tuple[").split(",")[0]
        facts["nargs"] = "*"
    if name in ("set", "fields"):
        facts["action"] = "extend"
        del facts["choices"]
    if name == "p":
        facts = {"nargs": 2, "action": "append", "metavar": ("NAME", "VALUE")}
    if annotation in TYPES:
        facts["type"] = TYPES[annotation]
    # 3. the default, which the help states
    if parameter.default is parameter.empty:
        facts["required"] = True
    else:
        facts["default"] = parameter.default
        if facts.get("action") in ("extend", "append"):
            facts["default"] = []
        if parameter.default not in (None, (), ""):
            text = f"{text} (default: {_shown(parameter.default)})"
    parser.add_argument(flag, help=text, **facts)


def _shown(default) -> str:
    if isinstance(default, tuple):
        return " ".join(map(str, default))
    return str(default)


def parser() -> argparse.ArgumentParser:
    """The argument parser."""
    title = "Speculative decoding, measured and reproduced."
    top = argparse.ArgumentParser("specdec", description=title)
    top.add_argument("--debug", action="store_true", help="show the traceback of an error")
    version = f"specdec {sys.modules['specdec'].__version__}"
    top.add_argument("--version", action="version", version=version)
    commands = top.add_subparsers(dest="command", required=True, metavar="command")
    for name, function in COMMANDS.items():
        text = _summary(function)
        add_options(commands.add_parser(name, help=text, description=text), function)
    # two commands have commands of their own
    text = "train a drafter or a controller"
    train = commands.add_parser("train", help=text, description=text)
    systems = train.add_subparsers(dest="system", required=True, metavar="system")
    for name, (text, function) in TRAININGS.items():
        unfit = {"system"}
        if name != "eagle3":
            unfit.add("unroll")
        if name != "ppow":
            unfit.add("objective")
        if name == "eagle3":
            unfit.add("fields")
        if name != "resps":
            unfit.add("variant")
        if name != "ltd":
            unfit.add("order")
        add_options(systems.add_parser(name, help=text, description=text), function, unfit)
    text = "the notebooks: run, contents, pages, lab, student (without solutions) or tidy"
    book = commands.add_parser("book", help=text, description=text)
    actions = book.add_subparsers(dest="action", required=True, metavar="action")
    for name, function in BOOK.items():
        text = _summary(function)
        add_options(actions.add_parser(name, help=text, description=text), function)
    return top


def _summary(function: Callable) -> str:
    return " ".join((function.__doc__ or "").split())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status. `arguments` default to the process's own."""
    options = vars(parser().parse_args(arguments))
    usual = warnings.formatwarning
    warnings.formatwarning = _as_sentence
    debug = options.pop("debug")
    function = options.pop("run")
    # `system` is an argument of the trainings alone
    for name in ("command", "action", "system"):
        if name not in inspect.signature(function).parameters:
            options.pop(name, None)
    try:
        _check(options)
        return function(**options) or 0
    except KeyboardInterrupt:
        if debug:
            raise
        kept = "what was written is kept, and the same command continues"
        print(f"\nspecdec: stopped; {kept}.", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output has closed it, as `head` does
        sys.stderr.close()
        return 0
    except SpecdecError as error:
        if debug:
            raise
        print(f"specdec: {error}", file=sys.stderr)
        return 2
    finally:
        warnings.formatwarning = usual


def _check(options: dict) -> None:
    """Refuse numbers that no command can use; set the folder of the notebooks."""
    for name in (*COUNTS, "limit"):
        lowest = 0 if name == "limit" else 1
        value = options.get(name)
        if value is not None and value < lowest:
            option = f"--{name.replace('_', '-')}"
            raise SpecdecError(f"{option} must be at least {lowest}, got {value}.")
    if options.get("on") is not None:
        from specdec.parallel import checked_place

        checked_place(options["on"])
    notebooks = options.pop("notebooks", None)
    if notebooks:
        os.environ[machine.NOTEBOOKS_VARIABLE] = notebooks


def _as_sentence(message, *_, **__) -> str:
    """A warning as a sentence, without its line of code."""
    return f"specdec: {message}\n"


def _print_table(table, digits: int = 2) -> None:
    from specdec.report.tables import markdown

    print(markdown(table, digits=digits))


def _suites(suites: tuple, pair: str, every: bool = False) -> list[str]:
    """The named suites, or embedded ones for the pair: the usual four, or all."""
    from specdec.data.suites import DEFAULT_NAMES, NAMES, embedded_suite

    names = NAMES if every else DEFAULT_NAMES
    return list(suites) or [embedded_suite(name, pair) for name in names]


@command("doctor")
def doctor(
    *,
    bench: bool = False,
    rounds: int = 5,
    dtype: str = "float32",
    threads: int | None = None,
    cpu_time: bool = False,
) -> int:
    """report this machine's features, missing parts and the costs of a cycle here"""
    checks = tools.doctor.checks()
    _print_table(checks)
    pairs = ("tiny", "small") if bench else ("small",)
    how = {"rounds": rounds if bench else 1, "threads": threads, "cpu_time": cpu_time}
    print()
    _print_table(tools.doctor.benchmark(pairs, dtype, **how))
    return int((checks["state"] == tools.doctor.FAULT).any())


@command("pairs")
def pairs() -> None:
    """list the pairs known by name to --pair and the notebooks"""
    import pandas

    from specdec.models.load import at_hand
    from specdec.models.pairs import names

    rows = []
    for name in names():
        rows.append({"pair": name, "state": "available" if at_hand(name) else "to be downloaded"})
    _print_table(pandas.DataFrame(rows))


@command("decode")
def decode(
    prompt: str,
    *,
    policy: str = "tuned",
    raw: bool = False,
    pair: str | None = None,
    target: str | None = None,
    drafter: str | None = None,
    dtype: str = "auto",
    device: str = "auto",
    device_map: str | None = None,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    seed: int = 0,
) -> None:
    """decode one prompt and print text, tau and tokens per second"""
    from specdec.core.decode import autoregress
    from specdec.core.decode import decode as drafted
    from specdec.core.policy import Static

    which = tools.places.which(pair, target, drafter)
    method = None if policy == "tuned" else tools.places.policy(policy, which.name)
    models = tools.places.load(which, dtype, device, device_map=device_map)
    if policy == "tuned":
        method = Static.of(models.usual_tree)
    how = {"temperature": temperature, "seed": seed, "raw": raw}
    if method is None:
        out = autoregress(models, prompt, max_new_tokens, **how)
        facts = f"autoregressive: {out.new_tok} tokens"
    else:
        out = drafted(models, prompt, method, max_new_tokens, **how)
        facts = f"{method!r}: {out.new_tok} tokens, tau {out.tau:.2f} in {len(out.rows)} cycles"
    print(out.tokens if out.text is None else out.text)
    print(f"[{facts}, {out.tokens_per_s:.0f} tokens/s]", file=sys.stderr)


@command("audit")
def audit(
    *,
    policy: tuple[str, ...] = (),
    pair: str | None = None,
    target: str | None = None,
    drafter: str | None = None,
    dtype: str = "auto",
    device: str = "auto",
    device_map: str | None = None,
    max_new_tokens: int = 32,
    temperature: float | None = None,
    seed: int = 0,
    suites: tuple[str, ...] = (),
    folder: str | None = None,
    limit: int = 4,
    part: str | None = None,
) -> int:
    """check that no tree and no policy changes the text, at temperature 0 and 1"""
    from specdec.data.suites import gather, openings
    from specdec.evaluation import lossless

    which = tools.places.which(pair, target, drafter)
    policies = {text: tools.places.policy(text, which.name) for text in policy}
    names = _suites(suites, which.name)
    items = gather(names, limit=limit or None, part=part, folder=folder, seed=seed)
    models = tools.places.load(which, dtype, device, device_map=device_map)
    how: dict = {"max_new_tokens": max_new_tokens, "seed": seed}
    if policies:
        how["policies"] = {**lossless.default_policies(seed), **policies}
    how["temperatures"] = (0.0, 1.0) if temperature is None else (temperature,)
    result = lossless.audit(models, openings(models, items), **how)
    _print_table(result.table)
    if result.unasked:
        names = ", ".join(result.unasked)
        print(f"\nNever asked, so not tested: {names}; decode more or longer texts.")
    if len(result.failures):
        print("\nNot lossless; the first of the texts that differ:\n")
        _print_table(result.failures.head())
    return int(not result.passed)


@command("evaluate")
def evaluate(
    *,
    methods: tuple[str, ...] = ("autoregressive", "eagle3", "eagle3-scripts"),
    policy: tuple[str, ...] = (),
    tuned: bool = False,
    name: str = "evaluate",
    force: bool = False,
    pair: str | None = None,
    target: str | None = None,
    drafter: str | None = None,
    dtype: str = "auto",
    device: str = "auto",
    device_map: str | None = None,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    seed: int = 0,
    suites: tuple[str, ...] = (),
    folder: str | None = None,
    limit: int = 4,
    part: str | None = None,
    repeats: int = 1,
    on: str | None = None,
    jobs: int | None = None,
) -> None:
    """measure the speed of methods on suites"""
    from specdec.evaluation import bench
    from specdec.evaluation.tuning import tune_static

    which = tools.places.which(pair, target, drafter)
    named = {text: tools.places.policy(text, which.name) for text in (*methods, *policy)}
    if tuned and part not in (None, "test"):
        raise SpecdecError(f"--tuned evaluates on the test part, not on --part {part}.")
    names = _suites(suites, which.name)
    models = tools.places.load(which, dtype, device, device_map=device_map)
    how: dict = {"max_new_tokens": max_new_tokens, "temperature": temperature}
    how.update(seed=seed, folder=folder)
    if tuned:
        named["tuned"] = tune_static(models, names, **how).policy
        part = "test"
        print(f"The fastest tree on the tuning prompts is {named['tuned']!r}.", file=sys.stderr)
    how.update(part=part, repeats=repeats, name=name, force=force, on=on, jobs=jobs)
    run = bench.evaluate(named, names, models, limit=limit or None, **how)
    table = bench.summary(run)
    columns = ["suite", "method", "prompts", "speedup", "speedup_low", "speedup_high", "tau"]
    columns += ["tok_per_s", "same_frac", "accuracy_frac"]
    _print_table(table[[column for column in columns if column in table]])
    print(f"\nEvery row is in {run.directory}.")


@command("estimate")
def estimate(
    *,
    gpu: str | None = None,
    policy: str | None = None,
    pair: str | None = None,
    target: str | None = None,
    drafter: str | None = None,
    dtype: str = "auto",
    device: str = "auto",
    max_new_tokens: int = 128,
    prompt_tok: int = 1024,
    suites: tuple[str, ...] = (),
    folder: str | None = None,
    limit: int = 4,
    part: str | None = None,
    repeats: int = 1,
) -> None:
    """estimate memory and time of a run before it runs"""
    which = tools.places.which(pair, target, drafter)
    how: dict = {"dtype": dtype, "device": device, "drafter": drafter, "gpu": gpu}
    how.update(max_new_tokens=max_new_tokens, prompt_tok=prompt_tok, limit=limit or None)
    how.update(folder=folder, part=part, repeats=repeats)
    if policy:
        largest = tools.places.policy(policy, which.name)
        if largest is not None:
            how["tree"] = largest.limits
    needed = tools.estimate.estimate(which.base, _suites(suites, which.name), **how)
    if not needed.fits:
        raise SpecdecError(needed.sentence)
    print(needed.sentence, file=sys.stderr)


@command("record")
def record(
    *,
    data: str | None = None,
    estimate: bool = False,
    name: str = "record",
    depth: int = 12,
    top_ks: tuple[int, ...] = (1, 2, 8, 16),
    trees: tuple[int, ...] = (4, 10),
    family: tuple[int, ...] = (),
    most_nodes: int = 240,
    lengths: int | None = None,
    pair: str | None = None,
    target: str | None = None,
    drafter: str | None = None,
    dtype: str = "auto",
    device: str = "auto",
    device_map: str | None = None,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    seed: int = 0,
    suites: tuple[str, ...] = (),
    folder: str | None = None,
    limit: int = 40,
    on: str | None = None,
    jobs: int | None = None,
) -> None:
    """record what every tree would accept, so that any policy can be replayed"""
    from specdec import runs
    from specdec.replays import record as recording

    # 1. the pair and its prompts
    which = tools.places.which(pair, target, drafter)
    models = tools.places.load(which, dtype, device, device_map=device_map)
    prompts = _own_prompts(Path(data)) if data else _suites(suites, which.name, every=True)
    if lengths is None:
        lengths = recording.usual_lengths(models, (*top_ks, *trees), depth)
    how: dict = {"max_new_tokens": max_new_tokens, "temperature": temperature, "seed": seed}
    how.update(depth=depth, top_ks=top_ks, trees=trees, family=family, most_nodes=most_nodes)
    how.update(lengths=lengths, limit=limit or None, folder=folder, name=name, on=on, jobs=jobs)
    if data:
        how["part"] = recording.SPLIT
    # 2. what it needs
    needed = tools.estimate.estimate_record(models, prompts, **how)
    print(needed.sentence, file=sys.stderr)
    if estimate:
        return
    if not needed.fits:
        raise SpecdecError(needed.sentence)
    # 3. the recording, which other commands then find
    trace = recording.record(models, prompts, **how)
    print(f"{trace!r}", file=sys.stderr)
    matching = [run for run in runs.find(name) if run.key == trace.header["key"]]
    if name == tools.places.RECORDINGS:
        tools.places.leave_recording(matching[0].directory, trace)
    print(matching[0].directory)


def _own_prompts(path: Path) -> dict:
    """The user's turns of every line, as one suite: the pair gives its own answers."""
    from specdec.data.suites import Prompt
    from specdec.training.drafter.generate_data import read_prompts

    files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
    prompts = []
    for file in files:
        for chat in read_prompts(file):
            turns = tuple(turn["content"] for turn in chat if turn["role"] == "user")
            prompts.append(Prompt(f"{path.stem}/{len(prompts)}", path.stem, turns))
    return {path.stem: prompts}


@command("generate-data")
def generate_data(
    target: str,
    *,
    out: str,
    tokens: str = "3M",
    minutes: float | None = None,
    rows: int = 64,
    answer_tok: int = 320,
    prompts: str | None = None,
    folder: str | None = None,
    seed: int = 0,
    dtype: str = "auto",
    device: str = "auto",
    device_map: str | None = None,
    threads: int | None = None,
    estimate: bool = False,
) -> None:
    """let a chat model write prompts and answers to train its drafter on"""
    import torch

    from specdec.models.load import load_pair
    from specdec.training.drafter import generate_data as chats

    total = _amount(tokens)
    if threads:
        torch.set_num_threads(threads)
    how: dict = {"seed": seed, "rows": rows, "answer_tok": answer_tok}
    if prompts:
        how["prompts"] = Path(prompts)
    config = chats.ChatConfig(**how)
    where = {"device_map": device_map} if device_map else {}
    pair = load_pair(target=target, dtype=dtype, device=device, **where)
    files = chats.open_chats(pair, config, out, folder)
    missing = total - files.answer_tok
    if missing > 0:
        print(chats.estimate_chats(pair, config, missing), file=sys.stderr)
    if missing > 0 and not estimate:
        end = {"tokens": total, "minutes": minutes, "benchmarks": folder}
        files = chats.generate_chats(pair, config, out, **end)
    counts = ", ".join(f"{name} {count:,}" for name, count in files.counts.items())
    print(f"{out} holds {files.answer_tok:,} answer tokens ({counts}).")


def _amount(text: str) -> int:
    """A count such as 300000, 300k or 3M."""
    units = {"k": 1_000, "m": 1_000_000}
    unit = units.get(text.strip()[-1:].lower(), 1)
    try:
        count = int(float(text.strip().rstrip("kKmM")) * unit)
    except (ValueError, OverflowError):
        raise SpecdecError(f"--tokens takes a number such as 500k or 3M, not {text!r}.") from None
    return check_integer("--tokens", count, 1)


@command("score")
def score(
    policy: str,
    *,
    trace: str | None = None,
    costs: str | None = None,
    machines: tuple[str, ...] | None = None,
    answer_ms: float | None = None,
) -> None:
    """judge a controller by replay: speed over plain decoding and the tuned tree"""
    from specdec.evaluation.score import score as judge

    how: dict = {"trace": trace, "costs": costs, "policy_ms": answer_ms}
    if machines is not None:
        how["machines"] = machines
    result = judge(policy, **how)
    _print_table(result.table, digits=3)
    print(f"\n{result.sentence}")


@command("calibrate")
def calibrate(
    *,
    pair: str | None = None,
    target: str | None = None,
    drafter: str | None = None,
    dtype: str = "auto",
    device: str = "auto",
    device_map: str | None = None,
    seconds: float = 45.0,
    seed: int = 0,
    cpu_time: bool = False,
    out: str | None = None,
) -> None:
    """measure the time of every part of a cycle on this machine"""
    from specdec.core.pair import dtype_name
    from specdec.costs.calibrate import calibrate as measure

    which = tools.places.which(pair, target, drafter)
    models = tools.places.load(which, dtype, device, device_map=device_map)
    costs = measure(models, seconds=seconds, seed=seed, cpu_time=cpu_time)
    number_format = dtype_name(models.target.dtype)
    print(costs.save(out or tools.places.costs_file(models.name, number_format)))
    tree = None if out else tools.places.keep_tree(models.name, number_format)
    if tree:
        print(f"{models.name} now decodes with the tree {tree.text}, the fastest at these costs.")


def train_drafter(
    *,
    system: str,
    target: str,
    out: str,
    data: str | None = None,
    preset: str | None = None,
    set: tuple[str, ...] = (),
    objective: str = "ppow",
    fields: tuple[str, ...] = (),
    unroll: int | None = None,
    start_from: str | None = None,
    minutes: float | None = None,
    steps: int | None = None,
    threads: int | None = None,
    device: str | None = None,
    seed: int = 0,
    restart: bool = False,
    features: str | None = None,
    features_gb: float = 20.0,
) -> None:
    """Train a drafter of one kind, or continue one with PPOW."""
    from specdec.data.toy_chats import CorpusChats
    from specdec.training.drafter import accuracy, chats, eagle3, presets

    # 1. the settings; those of another kind are not among its options
    if system != "ppow":
        preset = preset or "small"
    more: dict = {"seed": seed, "own_text": bool(data), "fields": fields}
    if system == "ppow":
        more["objective"] = objective
    if system == "eagle3":
        more["unroll"] = unroll
    names = (system, target, preset, set, start_from)
    settings, aim, start = presets.training_named(*names, **more)
    cache = presets.CacheConfig(Path(features) if features else None, features_gb)
    how: dict = {"minutes": minutes, "steps": steps, "seed": seed}
    budget = presets.Budget(threads=threads, device=device, features=cache, **how)
    # 2. the training
    conversations = chats.load_conversations(data) if data else CorpusChats()
    how = {"settings": settings, "objective": aim, "start_from": start, "budget": budget}
    how.update(out_dir=out, resume=not restart)
    print(eagle3.train_drafter(target, conversations, **how))
    # 3. what it learned, by number of conversations
    if settings.passes and settings.held_out:
        points = accuracy.learning_curve(out)
        print()
        _print_table(points, digits=3)
        if system != "ppow":
            print()
            _print_table(accuracy.fit_doubling(points), digits=3)


def train_controller(
    *,
    system: str,
    pair: str | None = None,
    target: str | None = None,
    drafter: str | None = None,
    data: str | None = None,
    trace: str | None = None,
    costs: str | None = None,
    preset: str = "ours",
    set: tuple[str, ...] = (),
    steps: int | None = None,
    budget: str = "laptop",
    variant: str = "max_entropy",
    order: str | None = None,
    out: str | None = None,
    seed: int = 0,
    restart: bool = False,
) -> None:
    """Train a controller on a recording."""
    from specdec import runs
    from specdec.policies import ltd
    from specdec.policies.base import setting
    from specdec.training import controllers

    which = tools.places.which(pair, target, drafter)
    # 1. the recording and its prices; with --data they are made first
    if data:
        if trace:
            raise SpecdecError("give --data (prompts to record) or --trace, and not both.")
        record(data=data, limit=0, pair=pair, target=target, drafter=drafter)
        if not costs:
            calibrate(pair=pair, target=target, drafter=drafter)
    name = None if trace and not which.typed else which.name
    recorded = tools.places.trace(trace, name)
    pair_name, dtype = recorded.header["pair"], recorded.header["dtype"]
    prices = tools.places.costs(costs, pair_name, dtype)
    # 2. the settings
    changes = dict(setting("--set", "ppo.gamma=0.9", text) for text in set)
    if system == "ltd":
        changes = {"rounds": ltd.ORDERS[order or "6.1"]} | changes
    how: dict = {"preset": preset, "steps": steps, "seed": seed, "changes": changes}
    if system == "resps":
        how["variant"] = variant
    if changes.get("state") == "text" and "text_state" not in recorded.header:
        chosen = which if which.typed else tools.places.which(pair_name)
        texts = runs.workbook_module("texts", "experiments")
        recorded = texts.embedded(recorded, lambda: tools.places.load(chosen, dtype))
    # 3. the training
    folder = Path(out or tools.places.policy_folder(pair_name, system, dtype))
    how.update(out_dir=folder, resume=not restart, paper=budget == "paper")
    controllers.train_system(system, recorded, prices, **how)
    print(folder)


def train_sweep(
    *,
    systems: tuple[str, ...] = SYSTEMS,
    seeds: tuple[int, ...] = (0,),
    pair: str | None = None,
    target: str | None = None,
    drafter: str | None = None,
    trace: str | None = None,
    costs: str | None = None,
    preset: str = "ours",
    steps: int | None = None,
    budget: str = "laptop",
    out: str,
    on: str | None = None,
    jobs: int | None = None,
) -> None:
    """Train several controllers with several seeds; existing ones are kept."""
    from specdec.training import controllers

    which = tools.places.which(pair, target, drafter)
    recorded = tools.places.trace(trace, None if trace and not which.typed else which.name)
    prices = tools.places.costs(costs, recorded.header["pair"], recorded.header["dtype"])
    how = {"preset": preset, "steps": steps, "paper": budget == "paper", "on": on, "jobs": jobs}
    folder = Path(out)
    _print_table(controllers.train_sweep(systems, recorded, prices, seeds, out_dir=folder, **how))


DRAFTERS = {
    "eagle3": "train an EAGLE-3 drafter for any target, by the training-time test",
    "ppow": "continue training a drafter, with PPOW or another objective",
    "block": "train a block drafter, which drafts all positions in one pass",
    "eagle1": "train an EAGLE-1 drafter (also for EAGLE-2's trees)",
    "hass": "train an EAGLE-1 drafter by HASS",
    "griffin": "train a GRIFFIN drafter",
    "medusa": "train Medusa's heads",
    "hydra": "train Hydra's heads",
    "hydra++": "train Hydra's heads behind an extra layer",
    "lm": "train a small language model as drafter",
}
for _name, _text in DRAFTERS.items():
    TRAININGS[_name] = (_text, train_drafter)
for _name in SYSTEMS:
    TRAININGS[_name] = (f"train the controller {_name} on a recording", train_controller)
TRAININGS["sweep"] = ("train several controllers with several seeds", train_sweep)


@command("reproduce")
def reproduce(
    *,
    scale: str = "laptop",
    full: bool = False,
    all: bool = False,
    force: bool = False,
    notebooks: str | None = None,
    on: str | None = None,
    jobs: int | None = None,
) -> int:
    """run the main notebooks of the book and write a page of all results"""
    book = tools.book.Book(scale)
    names = [entry.name for entry in book.choose((), all)]
    whole_suites = [name for name in names if full and name.startswith("30_evaluate")]
    first = [name for name in names if name not in whole_suites]
    reports = [tools.book.run(book, first, force=force, on=on, jobs=jobs)]
    if whole_suites:
        how = {"parameters": {"limit": 0}, "force": force, "on": on, "jobs": jobs}
        reports.append(tools.book.run(book, whole_suites, **how))
    tools.book.write_page(book)
    return int(any(_any_failed(report) for report in reports))


def _any_failed(report) -> bool:
    return bool(report["state"].isin(["failed", "skipped"]).any())


@command("items")
def items(
    *,
    scale: str = "laptop",
    publish: bool = False,
    replace: bool = False,
    notebooks: str | None = None,
) -> int:
    """list the papers' tables and figures and the state of each"""
    from specdec import runs

    book_items = runs.workbook_module("items")
    if not publish:
        table = book_items.status(scale)
        _print_table(table[["item", "state", "missing", "scale", "notebook"]])
        states = table["state"].value_counts().items()
        counts = ", ".join(f"{count} {state}" for state, count in states)
        print(f"\n{counts}, of {len(table)}.")
        return 0
    sources = runs.workbook_module("claims").sources(scale, richest=not replace)
    published = book_items.publish(scale, sources, replace)
    # README's verdicts and figure follow from the published rows
    if runs.home() == runs.workbook():
        runs.workbook_module("speeds").write(book_items.figures_dir())
        page = runs.workbook_module("page")
        page.write_verdicts(runs.home() / "README.md", book_items.figures_dir())
    if not len(published):
        print(f"The runs of scale {scale} hold no item; run make book first.")
        return 0
    _print_table(published)
    return int((published["state"] == "refused").any())


@command("run", BOOK)
def book_run(
    *,
    only: tuple[str, ...] = (),
    all: bool = False,
    force: bool = False,
    smoke: bool = False,
    p: tuple[str, ...] = (),
    scale: str = "laptop",
    notebooks: str | None = None,
    on: str | None = None,
    jobs: int | None = None,
) -> int:
    """run the notebooks whose results are out of date"""
    import yaml

    book = tools.book.Book(scale)
    values = {name: yaml.safe_load(text) for name, text in p}  # a number, flag or list
    how = {"force": force, "smoke": smoke, "everything": all, "on": on, "jobs": jobs}
    report = tools.book.run(book, only, parameters=values, **how)
    if not only:
        tools.book.write_page(book)
    return int(_any_failed(report))


@command("contents", BOOK)
def book_contents(*, scale: str = "laptop", notebooks: str | None = None) -> None:
    """print the table of contents with the state of each notebook"""
    print(tools.book.contents(scale))


@command("pages", BOOK)
def book_pages(
    *, only: tuple[str, ...] = (), scale: str = "laptop", notebooks: str | None = None
) -> None:
    """write the executed notebooks as pages with pictures into figures/book"""
    from specdec import runs

    written = runs.workbook_module("executed").write_pages(tools.book.Book(scale), only)
    print("\n".join(map(str, written)))


@command("student", BOOK)
def book_student(*, out: str | None = None, notebooks: str | None = None) -> None:
    """write the teaching notebooks without their solutions"""
    from specdec import runs

    folder = Path(out) if out else runs.home() / "runs" / "student"
    print("\n".join(map(str, tools.book.write_student_edition(folder))))


@command("lab", BOOK)
def book_lab(*, no_browser: bool = False, notebooks: str | None = None) -> int:
    """open the book in JupyterLab"""
    return tools.book.open_lab(["--no-browser"] if no_browser else [])


@command("tidy", BOOK)
def book_tidy(*, check: bool = False, notebooks: str | None = None) -> int:
    """remove outputs from the notebooks and rewrite their first cells"""
    untidy = tools.book.tidy_all(check=check)
    print("\n".join(untidy) or "everything is tidy")
    return int(check and bool(untidy))


if __name__ == "__main__":
    sys.exit(main())
