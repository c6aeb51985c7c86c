"""The exercises of notebooks 10 to 12 and 22 to 25: how each answer is judged, and two hints for each.

A test gets the notebook's variables and the answers, raises Miss with a sentence that does not give the answer away, and
returns a fact to remember. Notebooks take `check` from here.
"""

from __future__ import annotations

import math
import random
import time

import numpy as np
import torch

import specdec
from specdec import runs
from specdec.core.policy import Policy
from specdec.core.verification import accept, gumbel_noise
from specdec.evaluation.lossless import chi_square
from specdec.replays import oracle, snapshots

from workbook import book
from workbook.lessons import Unanswered, exercise, function, need, number, several
from workbook.lessons import check as check

MOST_DRAWS = 20_000
TOKEN, COUNT = number(0, whole=True), number(0, whole=True)


def policy(what, value):
    """Reads a class of policies."""
    need(isinstance(value, type) and issubclass(value, Policy), f"{what} must be a class of policies, such as Static.")
    return value


def near(said: float, right: float, within: float) -> None:
    """Miss unless a number is right; the sentence says in which direction it is off."""
    need(abs(said - right) < within, f"{said:.3f} is too {'large' if said > right else 'small'}.")


def taught(name: str, values: dict) -> book.NotebookRun:
    """A run for the pictures of a training notebook's lesson, which needs no recording of notebook 21.

    values: the notebook's `globals()`.
    """
    run = runs.start(f"{name.partition('_')[2]}_taught", {}, scale=values["scale"])
    return book.open(name, {**values, "recording": "the one that ships", "costs": "its own"}, run=run)


# 10, Speculative decoding


@exercise(
    "10.pass",
    {"pass_ms": function(number(0))},
    "Take time.perf_counter() before and after picks(target, ids[:tokens]), ten times.",
    "Put 1e3 times each difference into a list, and return the smallest: perf_counter counts seconds.",
)
def _(v, pass_ms):
    begun, spent = [], {}

    def before(module, given, more):
        begun[:] = [time.perf_counter(), (given[0] if given else more["input_ids"]).shape[-1]]

    def after(module, given, out):
        spent.setdefault(begun[1], []).append(1e3 * (time.perf_counter() - begun[0]))

    hooks = v.target.register_forward_pre_hook(before, with_kwargs=True), v.target.register_forward_hook(after)
    try:
        said, passes = pass_ms(8), spent.get(8, [])
        need(len(passes) >= 10, f"Asked for 8 tokens, it made {len(passes)} passes over 8 tokens and not ten.")
        least, most = min(passes) / 2, 3 * float(np.median(passes)) + 1  # another program may take its turn between
        need(not least < 1e3 * said < most, f"{said:.3g} are the seconds of a pass, not milliseconds.")
        need(least < said < most, f"It says {said:.3g} ms, but the quickest of its passes took {min(passes):.3g} ms.")
        need(said != pass_ms(8), "It says the same number to the last digit twice, which no two measurements do.")
        return f"A pass over 8 tokens takes {said / pass_ms(1):.1f} times as long as one over a single token."
    finally:
        for hook in hooks:
            hook.remove()


@exercise(
    "10.passes",
    {"passes_if_perfect": number(1)},
    "How many tokens does a pass bring if all its drafts are right, the bonus token included?",
    "Every pass brings gamma + 1 tokens, and a pass that is begun counts as a whole one.",
)
def _(v, said):
    took = v.chain(lambda text: v.picks(v.target, text)[-1], v.ids, v.gamma, v.new_tok)[1]
    need(
        said == took,
        f"You said {said:g}, but with a drafter that is never wrong it took {'more' if took > said else 'fewer'}.",
    )
    return f"It took {took} passes for {v.new_tok} tokens."


@exercise(
    "10.lookup",
    {"lookup": function(TOKEN)},
    "Look at the numbers i of the earlier places where text[i] is text[-1].",
    "Of these places take the last, and return text[i + 1]; return 0 where there is none.",
)
def _(v, lookup):
    for text, follows in (([5, 7, 5, 8, 5], 8), ([1, 2, 3], 0), ([4], 0), ([2, 2], 2), ([9, 1, 9, 9], 9)):
        said = lookup(text)
        need(said == follows, f"After {text} the guess is {follows}, and `lookup` says {said}.")
    found, needed = v.chain(lookup, v.ids, v.gamma, v.new_tok)
    need(found == v.expected, "The text changed, which no drafter can do; is `chain` as it was?")
    return f"{needed} passes by looking up, {v.passes} with the drafter."


@exercise(
    "10.liar",
    {"liar": function(TOKEN)},
    "Ask the target what it picks, by picks(target, text)[-1]: any other token will do.",
    "Return the number after the one that it picks, modulo target.config.vocab_size.",
)
def _(v, liar):
    size = v.target.config.vocab_size
    need((said := liar(v.ids)) < size, f"Tokens are numbers below {size}, and `liar` says {said}.")
    spoilt, needed = v.chain(liar, v.ids, 1, v.new_tok)
    need(needed == v.new_tok, f"It took {needed} passes for {v.new_tok} tokens: `liar` told the truth at least once.")
    need(spoilt == v.expected, "The text changed, which no drafter can do; is `chain` as it was?")
    return "The text is the same, and every pass brought the bonus token alone: speed is all that a drafter can spoil."


@exercise(
    "10.alpha",
    {"alpha": number(0, 1)},
    "A draft x comes with probability q(x) and is kept with probability min(1, p(x) / q(x)).",
    "Multiply the two, which gives the smaller of p(x) and q(x), and add up over all tokens.",
)
def _(v, alpha):
    right = float(np.minimum(v.p, v.q).sum())
    near(alpha, right, 0.005)
    kept = np.mean([v.rng.random() < v.p[x] / v.q[x] for x in v.rng.choice(len(v.q), size=v.draws, p=v.q)])
    return f"Of {v.draws} drafts drawn now {kept:.3f} were kept."


@exercise(
    "10.rest",
    {"residual": function(several())},
    "Where q says a token more often than p, nothing of it is left.",
    "Take np.maximum(p - q, 0), and divide it by its sum.",
)
def _(v, residual):
    for p, q in ((v.p, v.q), (np.array([0.2, 0.5, 0.3]), np.array([0.6, 0.1, 0.3]))):
        made = np.asarray(residual(p, q), dtype=float)
        need(made.shape == p.shape, f"It has {made.size} numbers for {p.size} tokens.")
        need((made >= 0).all(), "Some of its probabilities are negative.")
        need(np.isclose(made.sum(), 1), f"Its probabilities add up to {made.sum():.3f}, and not to 1.")
        least = np.minimum(p, q)
        fits = np.allclose(least + (1 - least.sum()) * made, p)
        need(fits, "What is kept and what is drawn after a refusal do not add up to p.")
    return "What is kept, min(p, q), and what is drawn after a refusal add up to p."


@exercise(
    "10.biased",
    {"biased": function(TOKEN)},
    "Take the exact rule, and keep drafts more readily than min(1, p / q).",
    "Keep a draft where rng.random() < 2 * p[draft] / q[draft], or always; else draw from the residual.",
)
def _(v, biased):
    said = [biased(v.p, v.q, v.rng) for _ in range(v.draws // 4)]
    need(max(said) < len(v.p), f"Tokens are numbers below {len(v.p)}, and it says {max(said)}.")
    counts = np.bincount(said, minlength=len(v.p))
    verdict = chi_square(counts, v.p)
    need(not verdict.passed, f"It was not caught: the p-value is {verdict.p_value:.3f}.")
    moved, towards = counts / counts.sum() - v.p, v.q - v.p
    generous = moved @ towards > 0.6 * np.linalg.norm(moved) * np.linalg.norm(towards)
    need(generous, "It was caught, but not for being generous: it does not lean to what the drafter likes.")
    return f"Caught: the p-value is {verdict.p_value:.2g}. A speed table shows what such a rule gains, and not what it costs."


@exercise(
    "10.draws",
    {"enough": number(1, MOST_DRAWS, whole=True)},
    "Small errors need many draws: try ten times as many.",
    "Some hundreds are too few to be sure, and a few thousand are enough.",
)
def _(v, enough):
    samples = [[v.careless(v.p, v.q, v.rng) for _ in range(enough)] for _ in range(10)]
    caught = sum(not chi_square(np.bincount(sample, minlength=len(v.p)), v.p).passed for sample in samples)
    need(caught >= 9, f"With {enough} draws it was caught {caught} times of 10.")
    return f"With {enough} draws the careless rule was caught {caught} times of 10."


@exercise(
    "10.walk",
    {"new_tokens": several()},
    "Begin at the root: which word does the target say there, and has the root a child with it?",
    "Go down while a child carries the word that the target says; where none does, that word is the last.",
)
def _(v, new_tokens):
    came = accept(v.tree_tokens, v.tree_parents, lambda node, path: v.other[node])[1]
    agree = sum(1 for mine, right in zip(new_tokens, came, strict=False) if mine == right)
    need(new_tokens == came, f"Of your {len(new_tokens)} words the first {agree} came out; the rest differs.")
    return "Down while a child says what the target says, then the target's own word."


@exercise(
    "10.gumbel",
    {"pick": function(TOKEN)},
    "The noise is added to the logarithm of p.",
    "Return the number of the largest: np.argmax(np.log(p) + noise).",
)
def _(v, pick):
    noises = [gumbel_noise(v.seed, position, len(v.p)).numpy() for position in range(v.draws // 4)]
    chosen = [pick(v.p, noise) for noise in noises]
    need(max(chosen) < len(v.p), f"Tokens are numbers below {len(v.p)}, and it says {max(chosen)}.")
    verdict = chi_square(np.bincount(chosen, minlength=len(v.p)), v.p)
    need(verdict.passed, f"These are no draws from p: the p-value is {verdict.p_value:.2g}.")
    same = chosen == [int(np.argmax(np.log(v.p) + noise)) for noise in noises]
    need(same, "These are draws from p, but not those that the noise makes.")
    return f"These are draws from p (p-value {verdict.p_value:.2f}), and the noise alone decides them."


@exercise(
    "10.mask",
    {"tree_mask": function(several(" of rows", several()))},
    "Node i sees itself, its parent, the parent's parent, and so on; the root's parent is -1.",
    "For each row walk up: while node >= 0, set row[node] to True and continue with parents[node].",
)
def _(v, tree_mask):
    for parents in (list(v.tree_parents), [-1, 0, 1, 0, 3, 4, 1]):
        right = specdec.DraftTree.from_arrays(range(len(parents)), parents).ancestors.tolist()
        made = [[bool(one) for one in row] for row in tree_mask(parents)]
        need(len(made) == len(right), f"It has {len(made)} rows for {len(right)} nodes.")
        wrong = [node for node, row in enumerate(right) if made[node] != row]
        need(not wrong, f"With the parents {parents} the row of node {(wrong or [0])[0]} is not right.")
    return "Each node sees its own text only, so that one pass can check all branches."


def expected_speed(alpha: float, gamma: int, c: float) -> float:
    """The formula of the notebook."""
    return sum(alpha**i for i in range(gamma + 1)) / (1 + gamma * c)


@exercise(
    "10.best",
    {"best_length": function(COUNT)},
    "predicted(alpha, gamma, c) gives the speedup of one length; compare all of them.",
    "Return max(range(longest + 1), key=...) with the predicted speedup as the key.",
)
def _(v, best_length):
    for alpha, c, *longest in ((0.8, 0.1), (0.5, 0.2), (0.3, 0.5), (0.9, 0.05), (0.9, 0.01, 3)):
        best = max(range((longest or [20])[0] + 1), key=lambda gamma: expected_speed(alpha, gamma, c))
        said, limit = best_length(alpha, c, *longest), f", longest={longest[0]}" if longest else ""
        need(said == best, f"For alpha={alpha}, c={c}{limit} another length than {said} is predicted to be faster.")
    return "The better and the cheaper the drafter, the longer."


@exercise(
    "10.when",
    {"break_even": function(number())},
    "For gamma = 1 the speedup is (1 + alpha) / (1 + c): when is it 1?",
    "(1 + alpha) / (1 + c) = 1 is solved by exactly one c.",
)
def _(v, break_even):
    for alpha in (0.6, 0.3, 0.95):
        speed = expected_speed(alpha, 1, break_even(alpha))
        need(abs(speed - 1) < 1e-9, f"At alpha={alpha} and that c the speedup is {speed:.3f}, and not 1.")
    return "One draft pays as long as it costs less, in passes, than it is likely to be right."


@exercise(
    "10.measure",
    {"alpha_measured": number(0, 1)},
    "A cycle tries one draft more than it accepts, unless all were right.",
    "Divide the sum of accepted_tok by the sum of accepted_tok plus one where it is below max(lengths).",
)
def _(v, said):
    tried = sum(min(row.accepted_tok + 1, max(v.lengths)) for row in v.longest.rows)
    share = sum(row.accepted_tok for row in v.longest.rows) / tried
    near(said, share, 0.005)
    return f"Of {tried} drafts that were tried {share:.3f} were accepted."


# 11, Draft trees


def scores_of(nodes, score) -> list:
    """Their scores, the best first: of equal ones either may be taken."""
    return sorted((score[node] for node in nodes), reverse=True)


NODES = several(" of numbers", number(0, whole=True))


@exercise(
    "11.verified",
    {"verified_nodes": function(NODES)},
    "Sort the candidates 1, 2, ... by score, the largest first.",
    "Take the first `count` of sorted(range(1, len(score)), key=lambda node: -score[node]).",
)
def _(v, verified_nodes):
    score, sent = list(v.snapshot.score), [node for node, was in enumerate(v.snapshot.verified) if was and node]
    for count in (len(sent), 3):
        mine = verified_nodes(score, count)
        need(0 not in mine, "Node 0 is the root: it is certain, and no candidate.")
        need(len(set(mine)) == count, f"It gives {len(set(mine))} nodes where {count} are asked for.")
        best = scores_of(range(1, len(score)), score)[:count]
        others = sum(score[node] < best[-1] for node in mine if node < len(score))
        need(others == 0 and max(mine) < len(score), f"{others} of its {count} nodes have a better one outside.")
    return f"These {len(sent)} nodes were sent to the target."


@exercise(
    "11.last",
    {"by_last_step": function(NODES)},
    "The score of a path is a sum of logarithms: take off the parent's to get the last step's.",
    "Sort the candidates by score[node] - score[parent[node]], the largest first, and take `count`.",
)
def _(v, by_last_step):
    score, parent = list(v.snapshot.score), list(v.snapshot.parent)
    count = sum(map(bool, v.snapshot.verified[1:]))
    chosen = by_last_step(score, parent, count)
    need(0 not in chosen, "Node 0 is the root: it is certain, and no candidate.")
    need(len(set(chosen)) == count, f"It gives {len(set(chosen))} nodes where {count} are asked for.")
    last = [0.0, *(score[node] - score[parent[node]] for node in range(1, len(score)))]
    best = scores_of(range(1, len(last)), last)[:count]
    need(np.allclose(scores_of(chosen, last), best), "Other nodes are likelier after their parents than these.")
    lost = [node for node in chosen if parent[node] not in {0, *chosen}]
    return f"{len(lost)} of {count} nodes hang in the air: their parents are not verified, so nothing leads to them."


@exercise(
    "11.plain",
    {"better_plain": number(0, whole=True)},
    "Of a cycle and of the same place with TreeConfig(1, 7, 10), compare kept_tok / total_ms.",
    "Count cycle in lane.cycles with step.kept_tok / step.total_ms above cycle.kept_tok / cycle.total_ms.",
)
def _(v, said):
    one = specdec.TreeConfig(1, 7, 10)
    steps = [snapshots.what_if(v.explorer.recording, 0, cycle.position, one) for cycle in v.lane.cycles]
    both = zip(steps, v.lane.cycles, strict=True)
    counted = sum(step.kept_tok / step.total_ms > cycle.kept_tok / cycle.total_ms for step, cycle in both)
    need(said == counted, f"{said} of {len(steps)} cycles is too {'many' if said > counted else 'few'}.")
    return f"In {counted} of {len(steps)} cycles."


# 12, Decisions


@exercise(
    "12.cycle",
    {"cycle_ms": function(number(0))},
    "The root pass comes once, a level n times, a node v times.",
    "Add t_root, n times t_level, t_0 and v times t_node.",
)
def _(v, cycle_ms):
    for n, nodes in ((3, 8), (0, 1), (0, 50), (3, 1), (3, 50)):
        right = v.t_root + n * v.t_level + v.t_0 + nodes * v.t_node
        said = cycle_ms(n, nodes)
        need(
            math.isclose(said, right, rel_tol=1e-6),
            f"For n={n} and v={nodes} {said:.3g} ms is not what the formula gives.",
        )
    return f"With n=3 and v=8 a cycle takes {cycle_ms(3, 8):.1f} ms, a plain step {v.step_ms:.1f}."


@exercise(
    "12.even",
    {"even_tau": number(0)},
    "A plain step brings one token: how many of them fit into the time of the cycle?",
    "Divide the time of the cycle, by the formula above, by step_ms.",
)
def _(v, said):
    right = (v.t_root + 3 * v.t_level + v.t_0 + 8 * v.t_node) / v.step_ms
    need(math.isclose(said, right, rel_tol=0.01), f"{said:.2f} is too {'large' if said > right else 'small'}.")
    return f"A cycle must bring {right:.2f} tokens to be as fast as plain decoding."


@exercise(
    "12.likely",
    {"OnlyLikely": policy},
    "Count the scores above a limit; scores are logarithms of probabilities, and `least` is none.",
    "Return min(int((question.scores > math.log(self.least)).sum()), question.largest).",
)
def _(v, policy_class):
    asked = []

    class Watched(policy_class):
        def answer(self, question):
            asked.append((question.scores.clone(), question.largest, self.least, answer := super().answer(question)))
            return answer

    plain = v.plain.tokens
    try:
        for least in (policy_class.least, 0.2):
            Watched.least = least
            text = specdec.decode(v.models, v.messages, Watched(v.size, 3, v.top_k), max_new_tokens=v.max_new_tokens)
            need(text.tokens == plain, "The text changed, which no policy can do; is it decoded from the same prompt?")
    except specdec.SpecdecError:
        if asked and asked[0][-1] is None:
            raise Unanswered("`OnlyLikely.answer` returns nothing yet; write it, then run both cells again.") from None
        raise
    need(asked, "It was asked nothing; leave `asks` as it is.")
    wanted = [min(int((scores > math.log(least)).sum()), largest) for scores, largest, least, _ in asked]
    plainly = [min(int((scores > least).sum()), largest) for scores, largest, least, _ in asked]
    said = [int(answer) for *_, answer in asked]
    need(
        said != plainly,
        "Scores are logarithms and never above 0, and `least` is a probability: the two cannot be compared.",
    )
    wrong = [i for i, (mine, right) in enumerate(zip(said, wanted, strict=True)) if mine != right]
    need(not wrong, f"In {len(wrong)} of {len(said)} cycles it is not as many as have a path likelier than `least`.")
    return f"The size followed the text: from {min(said)} to {max(said)} nodes."


@exercise(
    "12.useless",
    {"Useless": policy},
    "Whatever is not verified cannot be accepted: which of the three questions decides how much is verified?",
    "Ask for SIZE, as OnlyLikely does, and always answer 0.",
)
def _(v, policy_class):
    for messages in (v.messages, [{"role": "user", "content": v.items[0].turns[0]}]):
        text = specdec.decode(v.models, messages, policy_class(16, 3, 3), max_new_tokens=v.max_new_tokens)
        if text.tau != 1 and not [
            name for name in vars(policy_class) if not name.startswith("__") or name == "__init__"
        ]:
            raise Unanswered("`Useless` decides nothing yet; write it, then run both cells again.")
        need(text.tau == 1, f"It brings {text.tau:.2f} tokens per cycle, and the bonus token alone would be 1.")
    return "Every cycle brought the bonus token alone, and the text is the same."


@exercise(
    "12.headroom",
    {"headroom": function(number())},
    "Speeds are 1 / time: of the way from the tuned tree's speed to the clairvoyant's, how far does the policy come?",
    "Divide 1 / policy - 1 / tuned by 1 / clairvoyant - 1 / tuned.",
)
def _(v, headroom):
    names = getattr(getattr(headroom.asked, "__code__", None), "co_names", ())
    need(
        "specdec" not in {*names, str(headroom.asked.__module__).partition(".")[0]},
        "The package has such a function; write the formula yourself.",
    )
    for policy, tuned, clairvoyant in ((8, 10, 6), (10, 10, 6), (12, 10, 6), (5, 7, 5)):
        said, right = headroom(policy, tuned, clairvoyant), (1 / policy - 1 / tuned) / (1 / clairvoyant - 1 / tuned)
        way = f"For the times {policy}, {tuned} and {clairvoyant} it says {said:.3f}"
        need(math.isclose(said, right, abs_tol=1e-9), f"{way}, which is too {'large' if said > right else 'small'}.")
    return "0 is the tuned tree, 1 the clairvoyant; a policy that is slower than the tree is below 0."


@exercise(
    "12.ratio",
    {"slower": several(" of cycles"), "faster": several(" of cycles")},
    "A short cycle with a good ratio counts as much as a long one with a bad ratio: give `slower` both kinds.",
    "Give `slower` two quick cycles and one that takes very long for one token, and `faster` three equal ones.",
)
def _(v, slower, faster):
    for name, cycles in (("slower", slower), ("faster", faster)):
        for cycle in cycles:
            pair = several()(f"a cycle of `{name}`", cycle)
            need(len(pair) == 2, f"A cycle of `{name}` is (new tokens, milliseconds), and not {cycle}.")
            number(1, whole=True)("the number of new tokens", pair[0]), number(1e-9)("a time", pair[1])
    rates = [sum(tok for tok, _ in cycles) / sum(ms for _, ms in cycles) for cycles in (slower, faster)]
    need(
        rates[0] < rates[1],
        f"The throughput of `slower` is {rates[0]:.4f} tokens/ms, which is not below {rates[1]:.4f}.",
    )
    ratios = [float(np.mean([tok / ms for tok, ms in cycles])) for cycles in (slower, faster)]
    need(
        ratios[0] > ratios[1], f"The mean of ratios of `slower` is {ratios[0]:.4f}, which is not above {ratios[1]:.4f}."
    )
    return "The mean of ratios prefers the one that takes longer for the same text."


@exercise(
    "12.threshold",
    {"threshold": number(1e-6, 1)},
    "Print the speedup for ten values between 0.001 and 0.9, and take the best.",
    "One of `thresholds` will do: take the one with the largest speedup.",
)
def _(v, threshold):
    mine, *others = [
        specdec.replay(v.trace, v.StopWhenUnsure(least, v.size, v.depth, v.top_k), v.there).speedup
        for least in (threshold, *v.thresholds)
    ]
    need(mine >= max(others), f"With it the speedup is {mine:.3f}, and one of `thresholds` gives more.")
    return f"With {threshold:g} the speedup is {mine:.3f}; the best of `thresholds` gives {max(others):.3f}."


@exercise(
    "12.calls",
    {"best_calls": function(number(1, whole=True))},
    "For every a from 1 to len(expected) there are expected[a - 1] tokens in base_ms + a * call_ms.",
    "Return max(range(1, len(expected) + 1), key=...) with tokens per millisecond as the key.",
)
def _(v, best_calls):
    longer = sorted(random.Random(1).uniform(1, 4) for _ in range(12))
    for expected in ([1.7, 2.2, 2.5, 2.7, 2.8, 2.85, 2.88], longer):
        for base_ms, call_ms in ((68, 2.7), (10, 3), (1, 10), (500, 0.1)):
            best = max(range(1, len(expected) + 1), key=lambda a: expected[a - 1] / (base_ms + a * call_ms))
            said = best_calls(expected, base_ms, call_ms)
            need(said == best, f"With {base_ms} + a * {call_ms} ms {said} calls are not the best.")
    return "The dearer what comes once, the more calls pay."


@exercise(
    "12.when",
    {"smallest_n": number(1, whole=True)},
    "An answer is asked for once in N cycles: which share of their time does it take?",
    "Solve 2 / (20 N) = 0.01 for N.",
)
def _(v, said):
    share = 2 / (20 * said)
    need(share <= 0.01, f"With N = {said} asking takes {share:.1%} of the time of the cycles, more than 1 %.")
    need(said == 1 or 2 / (20 * (said - 1)) > 0.01, f"With fewer cycles than {said} asking takes at most 1 % as well.")
    return "An answer that is kept may be dearer."


# 22, Train Re-SpS


@exercise(
    "22.asked",
    {"asked": number(1, whole=True)},
    "The first question comes before the first cycle: count the cycles 0, N, 2 N and so on.",
    "Count the multiples of 30 from 0 to 60.",
)
def _(v, asked):
    need(asked != 2, "61 / 30 is a little more than 2, but the tree of the last cycle needs a question, too.")
    need(asked == 3, f"{asked} questions are too {'many' if asked > 3 else 'few'}.")
    return "In cycles 0, 30 and 60. A text of 30 cycles is decided by a single answer."


@exercise(
    "22.reward",
    {"r_avg": function(number())},
    "Divide within each cycle first; then take the mean over the cycles.",
    "Return the sum of tok / s over zip(tokens, seconds), divided by len(tokens).",
)
def _(v, r_avg):
    for tokens, seconds in (([3, 1, 2], [0.1, 0.05, 0.2]), ([4], [0.1])):
        said, ratios = r_avg(tokens, seconds), [tok / s for tok, s in zip(tokens, seconds, strict=True)]
        way = f"For {tokens} tokens in {seconds} seconds it says {said:.2f}"
        pooled = math.isclose(said, sum(tokens) / sum(seconds)) and len(tokens) > 1
        need(
            not pooled,
            f"{way}: that is all tokens over all seconds, a ratio of sums, and Equation 5 is a mean of ratios.",
        )
        need(not math.isclose(said, sum(ratios)) or len(tokens) == 1, f"{way}: that is the sum of the ratios.")
        need(math.isclose(said, sum(ratios) / len(ratios)), f"{way}, which is not Equation 5.")
    cycles = [cycle for lane in v.lanes for cycle in lane.cycles]
    tokens, seconds = [c.kept_tok for c in cycles], [c.total_ms / 1e3 for c in cycles]
    mean, throughput = r_avg(tokens, seconds), sum(tokens) / sum(seconds)
    return f"Over all recorded cycles it is {mean:.1f} per second; the throughput is {throughput:.1f}."


@exercise(
    "22.errors",
    {"errors": several(" of line numbers", number(1, 15, whole=True))},
    "Play through the first two cycles and write down `step`; then ask what the clock measures, and who needs the buffer.",
    "One is the line that starts the clock, one the line that guards the buffer, one the line that counts.",
)
def _(v, errors):
    wrong = {7, 12, 15}
    found, innocent = wrong & set(errors), set(errors) - wrong
    need(not innocent, f"Line {min(innocent, default=0)} is right as it is; you found {len(found)} of the three.")
    need(found == wrong, f"You found {len(found)} of the three errors.")
    return (
        "With line 7 depth costs nothing; with line 12 nothing is learned; with line 15 the first tree is never kept."
    )


@exercise(
    "22.idle",
    {"idle": number(0, 1)},
    "Take the largest speedup of the rows with total_tokens of at least 32, and the largest of all rows.",
    "Divide trees.loc[trees['total_tokens'] >= 32, 'speedup'].max() by trees['speedup'].max().",
)
def _(v, idle):
    grid = specdec.static_grid(v.texts, v.prices)
    best = grid.loc[grid["total_tokens"] >= 32, "speedup"].max()
    need(
        abs(idle - best) > 5e-4,
        f"{idle:.3f} is the speedup of the large tree itself; relate it to that of the best tree.",
    )
    right = best / grid["speedup"].max()
    near(idle, right, 5e-4)
    return f"No static tree of such a grid is faster here than {right:.2f} of the best one. Check the grid before you train."


@exercise(
    "22.kept",
    {"kept_share": number()},
    "Three times are needed: of the fastest static tree of `sizes`, and of the bounds with n = 1 and n = 10.",
    "specdec.headroom(time of n = 10, least time of static_grid(..., total_tokens=sizes), time of n = 1); times are sums.",
)
def _(v, said):
    static_ms = specdec.static_grid(v.texts, v.prices, total_tokens=v.sizes)["time_ms"].min()
    often, seldom = (oracle.kept_bound(v.texts, v.prices, n, v.sizes)["time_ms"].sum() for n in (1, 10))
    right = float(specdec.headroom(seldom, static_ms, often))
    need(abs(said - often / seldom) > 5e-4, "That is the ratio of the two bounds; relate both to the static tree.")
    near(said, right, 5e-3)
    return f"{right:.0%} is left: a tree that is kept for ten cycles cannot follow the text from token to token."


# 23, Train LTD


@exercise(
    "23.reachable",
    {"reachable": several(" of depths", number(0, 99, whole=True))},
    "Between two questions it continues; the largest depth needs no question.",
    "It can stop at every multiple of 3 up to 12.",
)
def _(v, reachable):
    right, said = {3, 6, 9, 12}, set(reachable)
    need(not said & {0, 1, 2}, "It is not asked before the third expansion, and so drafts at least that deep.")
    need(12 in said, "Without a stop it drafts to the end.")
    need(not said - right, f"{min(said - right, default=0)} is not possible: there it is not asked.")
    need(said == right, f"{len(right - said)} is missing.")
    return "A policy that was trained to stop anywhere can decode with four depths only."


@exercise(
    "23.gamma",
    {"factor": number(0)},
    "Each step between the decision and the reward multiplies the reward by gamma.",
    "The reward at 12 counts 0.99 to the ninth: which factor makes up for that?",
)
def _(v, factor):
    need(abs(factor - 0.99**9) > 1e-3, f"{factor:.3f} is what a unit of reward is worth; which reward makes up for it?")
    right = 1 / 0.99**9
    near(factor, right, 1e-3)
    paper = 1 / 0.999**9 - 1
    return f"{right - 1:.1%}: more than LTD's printed gain over its tuned trees on four of five targets. With 0.999: {paper:.1%}."


@exercise(
    "23.accepted",
    {"accepted_tokens": function(number(0, whole=True))},
    "A node is verified if its rank is below `nodes`: how many nodes of the path are?",
    "Count the ranks of ranks[n] that are smaller than `nodes`.",
)
def _(v, accepted_tokens):
    width = v.depth_policy.top_k
    for row in range(0, len(v.texts), 7):
        ranks = v.texts.ranks[width][row].astype(int).tolist()
        for n, nodes in ((0, 1), (0, 10), (3, 8), (v.depth_policy.depth, 60)):
            right, said = int(v.texts.accepted_tok(row, width, n, nodes)), accepted_tokens(ranks, n, nodes)
            where = f"At position {row}, with n={n} and {nodes} nodes"
            need(said == right, f"{where}, {said} is too {'many' if said > right else 'few'}.")
    return "So one recording gives the result of every depth and every size, and training needs no decoding."


PAIR = several(" of two numbers", number(1e-9))


@exercise(
    "23.ratio",
    {"short": PAIR, "long": PAIR},
    "Give `short` a little of both tokens and time, and `long` more of both, at a lower ratio.",
    "The first cycle takes long anyway, so that some more milliseconds hardly count: try (2, 10.0) and (4, 24.0).",
)
def _(v, short, long):
    for name, answer in (("short", short), ("long", long)):
        need(len(answer) == 2, f"`{name}` is (new tokens, milliseconds), and not {answer}.")
    own = [tokens / ms for tokens, ms in (short, long)]
    need(own[0] > own[1], f"Alone `short` has {own[0]:.3f} tokens/ms, which is not more than {own[1]:.3f} of `long`.")
    whole = [(tokens + v.other[0]) / (ms + v.other[1]) for tokens, ms in (short, long)]
    need(
        whole[0] < whole[1],
        f"With the other cycle `short` has {whole[0]:.4f} tokens/ms, not less than {whole[1]:.4f} of `long`.",
    )
    return "The reward of a cycle takes no account of the other cycles' time. L - rate * T with the rate reached so far does."


@exercise(
    "23.over",
    {"over": number(0)},
    "The one is a mean over cycles, the other all tokens over all milliseconds.",
    "Divide the mean of kept_tok / total_ms by the sum of kept_tok over the sum of total_ms.",
)
def _(v, over):
    cycles = [(cycle.kept_tok, cycle.total_ms) for lane in v.lanes for cycle in lane.cycles]
    right = (
        float(np.mean([tok / ms for tok, ms in cycles])) * sum(ms for _, ms in cycles) / sum(tok for tok, _ in cycles)
    )
    need(
        abs(over * right - 1) > 1e-3 or abs(right - 1) < 1e-3,
        f"{over:.3f} is the throughput over the mean: turn it round.",
    )
    near(over, right, 2e-3)
    side = "above" if right > 1 else "below"
    return f"The mean of ratios is {abs(right - 1):.1%} {side} the throughput: short cycles count as much as long ones."


# 24, Train RADAR


@exercise(
    "24.expected",
    {"expected_l": number(0)},
    "Three ways end it: nothing accepted, one token (`dog`, or `cat` without `sat`), two tokens.",
    "P(L = 1) is 0.6 (1 - 0.5) + 0.3, and P(L = 2) is 0.6 times 0.5.",
)
def _(v, said):
    need(abs(said - 2.2) > 1e-6, "That counts the bonus token, which every cycle yields.")
    need(abs(said - 1.2) < 1e-6, f"{said:g} is too {'large' if said > 1.2 else 'small'}.")
    return "The same as the sum of P(v) over all drafted nodes, 0.6 + 0.3 + 0.3. No draft probability occurs in it."


@exercise(
    "24.lstm",
    {"lstm_step": function(several(" of h and c"))},
    "The rows of the gates are i, f, g, o, 128 each; g has a tanh, the other three the logistic function 1 / (1 + exp(-x)).",
    "Split (the sum of both products and both biases).reshape(4, 128); the new c is needed for the new h.",
)
def _(v, lstm_step):
    w, memory = v.controller.network.arrays(), (np.zeros(128, np.float32), np.zeros(128, np.float32))
    for t, state in enumerate(v.states[3, :3], 1):
        made = [np.asarray(part, dtype=float) for part in lstm_step(w, state, *memory)]
        need(
            len(made) == 2 and all(part.shape == (128,) for part in made),
            "It must return h and c, of 128 numbers each.",
        )
        memory = v.controller.network.step(state, memory)[1]
        close = [np.allclose(part, right, atol=1e-4) for part, right in zip(made, memory, strict=True)]
        need(
            close != [False, False] or not np.allclose(made[::-1], memory, atol=1e-4),
            "These are c and h: return h first.",
        )
        need(close[1], f"At step {t} c is not right, so look at i, f and g.")
        need(close[0], f"At step {t} c is right and h is not, so look at o.")
    return "Three steps of a recorded cycle agree with the package's network."


@exercise(
    "24.bonus",
    {"early": PAIR, "late": PAIR},
    "The bonus token weighs most where few tokens were accepted: make `late` longer, at a slightly better ratio.",
    "Try (1.0, 10.0) and (2.5, 20.0).",
)
def _(v, early, late):
    for name, answer in (("early", early), ("late", late)):
        need(len(answer) == 2, f"`{name}` is (accepted tokens, milliseconds), and not {answer}.")
    need(early[1] < late[1], "The later stop must take longer.")
    rewards, yields = ([(tok + bonus) / ms for tok, ms in (early, late)] for bonus in (0, 1))
    need(rewards[1] > rewards[0], f"The reward of `late` is {rewards[1]:.4f}, which is not above {rewards[0]:.4f}.")
    need(yields[0] > yields[1], f"The yield of `early` is {yields[0]:.4f}, which is not above {yields[1]:.4f}.")
    return "So without alpha the policy drafts too long. L - rate * l with the bonus token needs no such charge."


@exercise(
    "24.memory",
    {"differ": number(0, 1)},
    "Write a loop over the seven states of a position that ends at the first stop, once with the memory and once with None.",
    "Step returns (logits, memory); logits.argmax() == 0 is a stop; compare where both loops end, position by position.",
)
def _(v, differ):
    def stop(seen, remember):
        memory = None
        for n, state in enumerate(seen):
            logits, memory = v.controller.network.step(state, memory if remember else None)
            if logits.argmax() == 0:
                return n
        return len(seen)

    right = float(np.mean([stop(seen, True) != stop(seen, False) for seen in v.states[:, :7]]))
    near(differ, right, 2e-3)
    return f"At {right:.1%} of the positions; elsewhere the newest level alone decides."


# 25, Train PPOW


@exercise(
    "25.eta", {"largest_eta": number(0)}, "What is the reward of k = 1?", "1 / (0.12 + 1): eta may be as large as that."
)
def _(v, eta):
    right = 1 / 1.12
    near(eta, right, 5e-3)
    return "With a larger eta, windows that are refused at once can be preferred to those with an accepted token."


@exercise(
    "25.advantages",
    {"advantages": function(several(" of numbers", number()))},
    "Take off the mean of the group; divide by the square root of the mean squared difference, plus delta.",
    "The deviation is over all len(rewards) windows, not len(rewards) - 1.",
)
def _(v, advantages):
    for rewards in ([0.0, 0.893, 1.613, 0.0], [1.0, 3.0], [0.893] * 3):
        right = (np.array(rewards) - np.mean(rewards)) / (np.std(rewards) + 1e-6)
        said = np.array(advantages(rewards))
        need(len(said) == len(rewards), f"It gives {len(said)} numbers for {len(rewards)} windows.")
        other = (np.array(rewards) - np.mean(rewards)) / (np.std(rewards, ddof=1) + 1e-6)
        need(
            len(set(rewards)) == 1 or not np.allclose(said, other, atol=1e-4),
            f"For {rewards} its deviation is that of a sample.",
        )
        need(np.allclose(said, right, atol=1e-4), f"For {rewards} it says {[round(float(one), 3) for one in said]}.")
    return "They add up to 0: a group says which of its windows is better, and never that all of them are good."


@exercise(
    "25.flat",
    {"accepted": several(" of numbers", number(0, whole=True))},
    "An advantage compares with the mean of the group: when does no window differ from it?",
    "Four equal numbers below the length of the window.",
)
def _(v, accepted):
    need(len(accepted) == 4, f"It has {len(accepted)} numbers, and there are four windows.")
    need(max(accepted) <= v.window, f"A window has {v.window} tokens, so that {max(accepted)} cannot be accepted.")
    need(len(set(accepted)) == 1, "Their rewards differ, so that the better ones become likelier.")
    need(accepted[0] < v.window, "With these the drafter is perfect; nothing is left to learn.")
    groups = torch.cat([found.rewards[0].unflatten(0, (-1, v.group)) for found, *_ in v.collected])
    return f"Of the groups above {float((groups == groups[:, :1]).all(1).double().mean()):.0%} are like this."


@exercise(
    "25.closed",
    {"expected_reward": function(number(0))},
    "Add up, over k from 0 to K, the probability of exactly k tokens times k / (k gamma + 1).",
    "Keep the product of q so far; k tokens have the probability of that product times (1 - the next q), and the last has no next.",
)
def _(v, expected_reward):
    random = np.random.default_rng(0)
    for q, gamma in (([1.0, 1.0], 0.12), ([0.5], 0.0), ([0.8, 0.6, 0.9], 0.12), (list(random.random(6)), 0.3)):
        chances = np.cumprod([1.0, *q]) * (1 - np.array([*q, 0.0]))
        rewards = [k / (k * gamma + 1) for k in range(len(q) + 1)]
        said, right = expected_reward(q, gamma), float(chances @ rewards)
        lost = right - chances[-1] * rewards[-1]
        need(
            not math.isclose(said, lost, abs_tol=1e-9) or lost == right,
            f"For q={q} the case that all are accepted is missing.",
        )
        way = f"For q={[round(float(one), 2) for one in q]} and gamma={gamma} it says {said:.3f}"
        need(math.isclose(said, right, abs_tol=1e-6), f"{way}, which is too {'large' if said > right else 'small'}.")
    q = [0.8] * v.window
    drawn = (random.random((4000, v.window)) < 0.8).cumprod(1).sum(1)
    spread = float(np.std(drawn / (drawn * 0.12 + 1))) / v.group**0.5
    exact = expected_reward(q, 0.12)
    return f"Where all q are 0.8 it is {exact:.2f}; the mean of {v.group} drawn windows is off by {spread:.2f} or so."


@exercise(
    "25.paid",
    {"paid": number(0, 1)},
    "Take the gaps of the windows with accepted == 0 from all of `collected`, and count those below 2.",
    "torch.cat([found.gap[found.accepted == 0] for found, *_ in collected]), then the mean of `< 2.0`.",
)
def _(v, paid):
    gaps = torch.cat([found.gap[found.accepted == 0] for found, *_ in v.collected])
    every = torch.cat([found.gap.flatten() for found, *_ in v.collected])
    right, whole = float((gaps < 2).double().mean()), float((every < 2).double().mean())
    need(
        abs(paid - whole) > 5e-3 or abs(right - whole) < 5e-3,
        "That is a share of all windows; only those with k = 0 count.",
    )
    near(paid, right, 5e-3)
    return f"Their median gap is {float(gaps.median()):.0f} nats over {v.window} tokens, far above 2: gaps of single tokens add up."
