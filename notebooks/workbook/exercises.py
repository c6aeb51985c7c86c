"""The exercises of notebooks 10, 11 and 12: how each answer is judged, and two hints for each.

A test gets the notebook's variables and the answers, raises Miss with a sentence that does not give the answer away, and
returns a fact to remember. Notebooks take `check` from here.
"""

from __future__ import annotations

import math
import random
import time

import numpy as np

import specdec
from specdec.core.policy import Policy
from specdec.core.verification import accept, gumbel_noise
from specdec.evaluation.lossless import chi_square
from specdec.replays import snapshots

from workbook.lessons import Unanswered, exercise, function, need, number, several
from workbook.lessons import check as check

MOST_DRAWS = 20_000
TOKEN, COUNT = number(0, whole=True), number(0, whole=True)


def policy(what, value):
    """Reads a class of policies."""
    need(isinstance(value, type) and issubclass(value, Policy), f"{what} must be a class of policies, such as Static.")
    return value


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
    need(abs(alpha - right) < 0.005, f"{alpha:.3f} is too {'large' if alpha > right else 'small'}.")
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
    need(abs(said - share) < 0.005, f"{said:.3f} is too {'large' if said > share else 'small'}.")
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
