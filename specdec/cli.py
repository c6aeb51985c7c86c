"""The command line: `specdec doctor | decode | audit | evaluate | estimate | record | calibrate | train | reproduce`.

Parses, calls the library, prints. Everything heavy is imported when a command needs it, so that `--help` is instant.
Bad input is one sentence and status 2, Ctrl-C one sentence and status 130; --debug shows where it happened instead.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

from specdec import commands, commands_replay
from specdec.config import SpecdecError


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
    from specdec import doctor

    commands.at_least("--rounds", given.rounds, 1)
    commands.at_least("--threads", given.threads, 1)
    commands.quiet()
    found = doctor.facts()
    print(doctor.report(found))
    if given.bench:
        _bench(given)
    if given.curve:
        _curve(given)
    return int(any(kind == doctor.FAULT for kind, _ in doctor.findings(found)))


def _bench(given) -> None:
    from specdec import doctor, speed, tables

    options = dict(count=given.rounds, threads=given.threads, cpu_time=given.cpu_time)
    table = speed.benchmark(tuple(given.dtype), **options)
    print(f"\n{tables.markdown(doctor.figures(table))}")
    print("\nMedians of ratios within a round [smallest .. largest round]; transformers' generate runs under sdpa.")


def _curve(given) -> None:
    import torch

    from specdec import plots, runs, speed, tables

    if given.threads:
        torch.set_num_threads(given.threads)
    rows = speed.curve(speed.reference_pair(getattr(torch, given.dtype[0])), cpu_time=given.cpu_time)
    table = tables.node_curve(rows, by="context")
    columns = ["context", "verified_tok", "draft_ms", "verify_ms", "commit_ms", "host_ms", "total_ms"]
    print(f"\n{tables.markdown(table[columns])}")
    figure = plots.node_curve(
        table, by="context", title=f"a cycle of the reference shape, {given.dtype[0]}, after so many tokens"
    )
    written = plots.save(figure, runs.figure_path("doctor", f"cycle_{given.dtype[0]}"), scale="laptop", data=table)
    print(f"\nThe curve is drawn in {written[0]}.")


# --- decode -----------------------------------------------------------------------------------------------------------


def _decode_options(parser) -> None:
    parser.add_argument("prompt", help="what to continue; a user message where the pair knows chat")
    parser.add_argument("--policy", default="eagle3", help="autoregressive, eagle3, static:total_tokens,depth,top_k")
    parser.add_argument("--raw", action="store_true", help="continue the text itself, without the chat template")
    commands.pair_options(parser)


def _decode(given) -> int:
    from specdec.decoding import autoregress, decode
    from specdec.methods import AUTOREGRESSIVE, method_from

    policy = method_from(given.policy)
    pair = commands.load(given)
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
    commands.pair_options(parser)
    commands.suite_options(parser)
    parser.set_defaults(max_new_tokens=32, temperature=None)


def _audit(given) -> int:
    from specdec import lossless
    from specdec.methods import conversation, gather

    commands.at_least("--limit", given.limit, 0)
    items = gather(given.suites, limit=given.limit or None, part=given.part, folder=given.folder, seed=given.seed)
    pair = commands.load(given)
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
    "evaluate": ("measure methods on suites", commands.evaluate_options, commands.evaluate),
    "estimate": ("memory and time of a run before it runs", commands.estimate_options, commands.estimate),
    "record": ("record what every tree would do", commands_replay.record_options, commands_replay.record),
    "calibrate": ("measure what a cycle costs here", commands_replay.calibrate_options, commands_replay.calibrate),
    "train": ("train a target or an EAGLE-3 drafter", commands.train_options, commands.train),
    "reproduce": ("run the main notebooks of the book", commands.reproduce_options, commands.reproduce),
}

if __name__ == "__main__":
    sys.exit(main())
