"""Fixed shapes: the same text, the same operations at the same addresses in every cycle, and no Python in a replay."""

import gc
from collections import defaultdict
from dataclasses import replace

import pytest
import torch
import transformers as hf
from fakes.families import FAMILIES, WINDOW, OracleDrafter, build, model_of, plain_text, random_tree
from fakes.families import tokens as random_tokens
from fakes.pairs import random_target
from fakes.tapes import Tape, pretend_cuda, tensors
from torch.utils._python_dispatch import TorchDispatchMode

import specdec
from specdec.core.decode import autoregress, decode, stream
from specdec.core.pair import Pair
from specdec.core.policy import RandomPolicy, Static
from specdec.core.together import decode_many
from specdec.core.tree import EAGLE1_TREE, GrowingTree, StaticShape
from specdec.core.tree_config import TreeConfig
from specdec.core.verification import Picker
from specdec.errors import SpecdecError
from specdec.models.eagle.drafter import EagleDrafter
from specdec.models.eagle.network import EagleConfig, EagleNetwork
from specdec.models.fixed_shapes import FixedDrafter, FixedSession, FixedTarget
from specdec.models.recorded import Pool, Recorded
from specdec.models.target import Target

LIMITS = TreeConfig(total_tokens=24, depth=4, top_k=4)
POLICIES = {
    "static": lambda: Static(24, 4, 4),
    "random": lambda: RandomPolicy(LIMITS, seed=1),
    "eagle-1's tree": lambda: Static(shape=StaticShape(EAGLE1_TREE)),
    "flat at times": lambda: RandomPolicy(TreeConfig(12, 3, 3, flat_nodes=8), seed=1, asks=("extend",)),
}
FAMILIES_HERE = [(name, temperature) for name in ("qwen2-window", "gemma2") for temperature in (0.0, 1.0)]
FAMILIES_HERE += [
    ("gpt-oss", 1.0),
    ("gpt2", 0.0),
    ("deepseek-v3", 1.0),
]  # sinks, learned positions, values of other widths


def network(hidden: int, vocab_size: int, seed: int = 1, taps=(1, 2, 3), **fields) -> EagleNetwork:
    torch.manual_seed(seed)
    config = EagleConfig(hidden, 2 * hidden, 4, 2, vocab_size, vocab_size, hidden, taps=taps, **fields)
    return EagleNetwork(config)


def eagle_pair(model, fixed: bool, **fields) -> Pair:
    """The same weights with and without fixed shapes."""
    target = (FixedTarget if fixed else Target)(model)
    drafter = (FixedDrafter if fixed else EagleDrafter)(
        network(target.hidden_size, target.vocab_size, **fields), target
    )
    target.taps = drafter.taps
    return Pair(target, drafter)


@pytest.fixture(scope="module")
def llama():
    """Of few words, so that an untrained drafter hits now and then."""
    return random_target(vocab_size=12, layers=4)


@pytest.fixture(params=["called", "taped"])
def recorder(request, monkeypatch):
    """Recorded functions called as on a CPU, and taped and replayed as on a GPU."""
    return pretend_cuda(monkeypatch) if request.param == "taped" else None


# ---- text ----------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("policy", POLICIES)
def test_text_is_what_it_was(llama, policy, temperature, monkeypatch):
    pretend_cuda(monkeypatch)
    pair, plain = eagle_pair(llama, fixed=True), eagle_pair(llama, fixed=False)
    scores, grow = [], GrowingTree.grow
    monkeypatch.setattr(GrowingTree, "grow", lambda *given: (scores.append(given[2].flatten().clone()), grow(*given)))
    for length in (3, 40 if temperature else 150):  # padded; for the target alone; for neither
        prompt = torch.randint(12, (length,), generator=torch.Generator().manual_seed(length)).tolist()
        settings = dict(max_new_tokens=24, temperature=temperature, seed=7, stop_tokens=())
        out, expected = (decode(each, prompt, POLICIES[policy](), **settings) for each in (pair, plain))
        assert out.tokens == expected.tokens == autoregress(pair, prompt, **settings).tokens
        rows, expected_rows = out.cycles, expected.cycles
        assert rows.accepted_tok.tolist() == expected_rows.accepted_tok.tolist()
        assert rows.verified_tok.tolist() == expected_rows.verified_tok.tolist()
        assert rows.accepted_tok.max() >= 1
        drafted, expected_scores = torch.cat(scores).chunk(2)
        assert torch.allclose(drafted, expected_scores, atol=1e-4)
        scores.clear()


@pytest.mark.parametrize(("name", "temperature"), FAMILIES_HERE)
def test_windows_caps_and_sinks_hold_in_replays(name, temperature, monkeypatch):
    tapes, model, prompt = pretend_cuda(monkeypatch), model_of(name), random_tokens(4, seed=5)
    truth = plain_text(model, prompt, 40, Picker.from_settings(temperature, seed=7))
    pair = Pair(FixedTarget(model, taps=(1, 3)), OracleDrafter(prompt.tolist() + truth, taps=(1, 3)))
    settings = dict(max_new_tokens=32, temperature=temperature, seed=7, stop_tokens=())
    for seed in range(2):
        out = decode(pair, prompt, RandomPolicy(LIMITS, seed=seed), **settings)
        assert out.tokens == truth[:32]
        assert out.cycles.accepted_tok.max() >= 2 and out.prompt_tok + 32 > 5 * WINDOW
    assert autoregress(pair, prompt, **settings).tokens == truth[:32]
    assert 5 <= len(tapes) <= 9  # one for each power of two; without features one row, the prompt, and the check


def test_in_low_precision_it_stays_close(llama):
    """Rounding depends on the length of a sum, and whole caches make longer ones."""
    model, prompt = random_target(vocab_size=12, layers=4, dtype=torch.bfloat16), torch.arange(12)
    fixed, plain = FixedTarget(model), Target(model)
    with fixed.inference(), plain.inference():
        rows, expected = (each.forward(prompt, each.new_cache(32)).logits.float() for each in (fixed, plain))
    assert (rows - expected).abs().max() < 0.05 * expected.std()


def test_several_sequences_together_and_other_doors(llama):
    pair, plain = eagle_pair(llama, fixed=True), eagle_pair(llama, fixed=False)
    prompts = [[1, 2, 3], [5] * 20, [7, 8] * 40]
    expected = [autoregress(plain, prompt, 20).tokens for prompt in prompts]
    for rows in (1, 2, 3):
        outs = decode_many(pair, prompts, Static(12, 3, 3), 20, rows=rows)
        assert [out.tokens for out in outs] == expected
    assert sum(stream(pair, prompts[0], Static(12, 3, 3), 20), []) == expected[0]
    ids = torch.tensor([prompts[2]])
    settings = dict(do_sample=False, max_new_tokens=20, pad_token_id=0)
    text = llama.generate(ids, custom_generate=specdec.generate, drafter=pair.drafter, **settings)
    assert text[0, ids.shape[1] :].tolist() == expected[2]
    assert specdec.audit(pair, prompts[:1], [Static(12, 3, 3)], max_new_tokens=12, progress=False).passed


# ---- what repeats --------------------------------------------------------------------------------------------------------
@pytest.fixture
def runs(monkeypatch) -> dict:
    """All runs of every recorded function, called as on a CPU: its operations, and where its inputs and outputs lie."""
    seen = defaultdict(list)

    def record(recorded: Recorded):
        outputs = recorded.function()

        def again():
            with Tape() as tape:
                values = recorded.function()
            for static, value in zip(tensors(outputs), tensors(values), strict=True):
                static.copy_(value)
            places = [tensor.data_ptr() for tensor in tensors(recorded.inputs, outputs)]
            seen[recorded].append((tape.described(), places))

        return outputs, again

    monkeypatch.setattr(Recorded, "record", record)
    return seen


@pytest.mark.parametrize("name", ["qwen2-window", "gemma2"])
def test_operations_and_addresses_repeat_from_cycle_to_cycle_and_turn_to_turn(name, runs):
    pair, settings = eagle_pair(model_of(name), fixed=True), dict(max_new_tokens=8, stop_tokens=())
    first = decode(pair, random_tokens(5, seed=1), Static(12, 3, 4), **settings)
    recorded = list(runs)
    second = decode(pair, random_tokens(9, seed=2), Static(12, 3, 4), **settings)
    third = decode(pair, random_tokens(5, seed=1), Static(12, 3, 4), **settings)
    assert first.tokens == third.tokens != second.tokens
    levels = [each for each in runs if "rows" in each.inputs]
    trees = [each for each in runs if "ancestors" in each.inputs and len(each.inputs["tokens"]) == 16]
    cycles = sum(len(out.cycles) for out in (first, second, third))
    assert len(levels) == 1 and len(runs[levels[0]]) == 3 * cycles
    assert len(runs[trees[-1]]) >= cycles
    for each in runs.values():
        assert all(again == each[0] for again in each)
        operations, places = each[0]
        assert len(operations) > 20 and 0 not in places
    assert len(runs) - len(recorded) <= 2  # the longer prompt's, in target and drafter


def test_nothing_of_the_function_runs_in_a_replay(llama, monkeypatch):
    tapes, calls = pretend_cuda(monkeypatch), defaultdict(int)
    whole = Recorded.__call__

    def counted(recorded, **values):
        calls[recorded] += 1
        return whole(recorded, **values)

    forwards = []
    llama_forward = type(llama).forward
    monkeypatch.setattr(Recorded, "__call__", counted)
    monkeypatch.setattr(type(llama), "forward", lambda *a, **k: forwards.append(1) or llama_forward(*a, **k))
    pair = eagle_pair(llama, fixed=True)
    decode(pair, [1, 2, 3], Static(12, 3, 4), max_new_tokens=40, stop_tokens=())
    before = len(tapes), len(forwards)
    out = decode(pair, [3, 2, 1], Static(12, 3, 4), max_new_tokens=40, stop_tokens=())
    assert (len(tapes), len(forwards)) == before
    assert len(out.cycles) > 5 and sum(calls.values()) > 5 * len(tapes)


class OnlyOn(TorchDispatchMode):
    """Collects the kinds of device that operations touch."""

    def __init__(self):
        super().__init__()
        self.devices = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        outputs = function(*args, **(kwargs or {}))
        self.devices |= {tensor.device.type for tensor in tensors(args, kwargs, outputs)}
        return outputs


def test_forwards_touch_no_other_device():
    with torch.device("meta"):
        text = hf.LlamaConfig(**FAMILIES["llama"][1])
        model, net = hf.LlamaForCausalLM(text).eval(), network(text.hidden_size, text.vocab_size)
    target = FixedTarget(model)
    target._probed = target._replays = True  # they look at values, which meta tensors have not
    drafter = FixedDrafter(net, target)
    target.taps = drafter.taps
    tokens, seen = torch.zeros(9, dtype=torch.long, device="meta"), torch.ones(9, 9, dtype=torch.bool, device="meta")
    with target.inference(), drafter.inference(), OnlyOn() as touched:
        cache, session = target.new_cache(64), drafter.session(64, 16)
        for _ in range(2):
            rows = target.forward(tokens, cache, last_only=True)
            session.root(tokens, rows.features, 4)
            session.expand(tokens[:3], tokens[:3], 4)
            session.expand(tokens[:4], tokens[:4], 4)
            rows = target.forward(tokens, cache, tokens, seen)
    assert touched.devices == {"meta"}
    assert rows.logits.shape == (9, target.vocab_size)


# ---- memory --------------------------------------------------------------------------------------------------------------
def test_memory_is_lent_to_one_at_a_time_and_comes_back():
    class Owner:
        pass

    pool, made = Pool(), []
    make = lambda: made.append(object()) or made[-1]  # noqa: E731
    one, two = Owner(), Owner()
    first, second, other = pool.lend(one, 8, make), pool.lend(two, 8, make), pool.lend(one, 9, make)
    assert len({id(first), id(second), id(other)}) == 3
    del one
    gc.collect()
    assert pool.lend(two, 8, make) is first and pool.lend(two, 9, make) is other and len(made) == 3


def test_what_a_turn_leaves_behind_cannot_spoil_the_next(llama):
    """Hidden rows have no weight, but no weight times infinity is not a number."""
    pair = eagle_pair(llama, fixed=True)
    expected = decode(pair, [1, 2, 3], Static(12, 3, 4), max_new_tokens=20)
    cache, session = pair.target.new_cache(50), pair.drafter.session(50, 12)
    with torch.inference_mode():
        cache.layers[0].keys.fill_(torch.inf)
        cache.layers[1].values.fill_(torch.nan)
        session.store.fill_(torch.nan)
    keys, store = cache.layers[0].keys.data_ptr(), session.store.data_ptr()
    del cache, session
    again = decode(pair, [1, 2, 3], Static(12, 3, 4), max_new_tokens=20)
    assert again.tokens == expected.tokens and again.tau == expected.tau
    assert pair.target.new_cache(50).layers[0].keys.data_ptr() == keys
    assert pair.drafter.session(50, 12).store.data_ptr() == store


def moved_midway(target, model, weights) -> torch.Tensor:
    """Logits after four tokens, the weights replaced after two."""
    with target.inference():
        cache = target.new_cache(8)
        for token in (1, 2):
            target.forward(torch.tensor([token]), cache, last_only=True)
    model.load_state_dict(weights, assign=True)
    with target.inference():
        target.forward(torch.tensor([3]), cache, last_only=True)
        return target.forward(torch.tensor([4]), cache, last_only=True).logits


def test_weights_that_lie_elsewhere_are_recorded_anew(monkeypatch):
    pretend_cuda(monkeypatch)
    (model, same), other = (
        (random_target(vocab_size=12, layers=4) for _ in range(2)),
        random_target(12, layers=4, seed=5),
    )
    weights = {name: weight.clone() for name, weight in other.state_dict().items()}
    target = FixedTarget(model)
    midway = [moved_midway(each, each.model, weights) for each in (target, Target(same))]
    assert torch.allclose(*midway, atol=1e-4)
    assert autoregress(Pair(target), [1, 2, 3], 20).tokens == autoregress(Pair(Target(other)), [1, 2, 3], 20).tokens
    model.double()
    other.double()
    assert autoregress(Pair(target), [1, 2, 3], 20).tokens == autoregress(Pair(Target(other)), [1, 2, 3], 20).tokens


def drafted_scores(pair: Pair) -> torch.Tensor:
    """Log-probabilities of a root's children and of theirs."""
    features = torch.randn(2, 96, generator=torch.Generator().manual_seed(0))
    with pair.inference():
        session = pair.drafter.session(8, 4)
        children, scores = session.root(torch.tensor([1, 2]), features, 2)
        return torch.cat((scores, session.expand(children[0], torch.zeros(2, dtype=torch.long), 2)[1]))


def test_a_drafter_packed_anew_is_recorded_anew(llama, monkeypatch):
    pretend_cuda(monkeypatch)
    pair, fresh = eagle_pair(llama, fixed=True), eagle_pair(llama, fixed=False, seed=9)
    before = drafted_scores(pair)
    pair.drafter.network.load_state_dict(fresh.drafter.network.state_dict())
    pair.drafter.prepacked = pair.drafter.network.prepack()
    after, expected = drafted_scores(pair), drafted_scores(fresh)
    assert torch.allclose(after, expected, atol=1e-5) and not torch.allclose(before, expected, atol=0.01)
    for drafter in (pair.drafter, fresh.drafter):  # another reading, as `calibrate_reading` tries them
        drafter.config = drafter.network.config = replace(drafter.config, rope_theta=2.0)
    assert torch.allclose(drafted_scores(pair), drafted_scores(fresh), atol=1e-5)
    assert not torch.allclose(drafted_scores(pair), expected, atol=0.01)


def test_rows_of_a_prompt_are_the_callers(llama):
    target = eagle_pair(llama, fixed=True).target
    with target.inference():
        cache = target.new_cache(32)
        first = target.forward(torch.tensor([1, 2]), cache, last_only=True)
        kept = first.logits.clone(), first.features.clone()
        target.forward(torch.tensor([3, 4]), cache, last_only=True)
    assert torch.equal(first.logits, kept[0]) and torch.equal(first.features, kept[1])


def test_children_are_the_callers(llama):
    drafter = eagle_pair(llama, fixed=True).drafter
    features = torch.randn(2, 96, generator=torch.Generator().manual_seed(0))
    with drafter.target.inference(), drafter.inference():
        session = drafter.session(16, 12)
        children, state = session.root(torch.tensor([1, 2]), features, 3), session.root_state
        kept = [part.clone() for part in (*children, state)]
        few = torch.zeros(4, dtype=torch.long)
        levels = [session.expand(few + number, few, 4) for number in range(2)]
        kept += [part.clone() for part in levels[0]]
        levels.append(session.expand(few + 5, few, 4))
        others = session.root(torch.tensor([3, 4]), -features, 3)
    assert all(map(torch.equal, (*children, state, *levels[0]), kept))
    assert not torch.equal(others[1], children[1]) and not torch.equal(levels[0][1], levels[1][1])


def test_a_larger_tree_leaves_nothing_to_a_smaller_one(recorder):
    """The root first, other nodes in any order; and what pads the smaller one stays inside the table of positions."""
    family, settings = FAMILIES["gpt2"]
    model, tree, prompt = build(family, {**settings, "n_positions": 24}), random_tree(3), random_tokens(18, seed=2)
    few = torch.tensor([0, *range(8, 0, -1)])  # children before parents
    given = tree.token[few], tree.depth[few], tree.ancestors[few][:, few]
    logits = []
    for target in (FixedTarget(model), Target(model)):
        with target.inference():
            cache = target.new_cache(40)
            target.forward(prompt, cache)
            target.forward(tree.token, cache, tree.depth, torch.ones(13, 13, dtype=torch.bool))
            cache.truncate(len(prompt))
            target.forward(prompt[:2], cache)
            rows = target.forward(given[0], cache, *given[1:])
            logits.append(rows.logits.clone())
    assert int(tree.depth.max()) + len(prompt) + 2 > 24 > int(given[1].max()) + len(prompt) + 2
    assert torch.allclose(*logits, atol=1e-4)


def test_there_is_room_for_padding_up_to_the_last_row(llama):
    pairs = [eagle_pair(llama, fixed=fixed) for fixed in (True, False)]
    tokens, logits, children = torch.arange(256) % 12, [], []
    for pair in pairs:
        with pair.inference():
            cache, session = pair.target.new_cache(256), pair.drafter.session(247, 9)
            features = pair.target.forward(tokens[:191], cache).features
            features = torch.cat((features, pair.target.forward(tokens[191:], cache).features))
            cache.truncate(191)
            logits.append(pair.target.forward(tokens[191:], cache).logits.clone())  # 65 rows, padded to 128
            session.root(tokens[1:248], features[:247], 9)
            children.append(session.expand(tokens[:9], tokens[:9] * 0, 9)[1].clone())  # 9 rows, padded to 16
    assert torch.allclose(*logits, atol=1e-4) and torch.allclose(*children, atol=1e-4)


# ---- limits and refusals -------------------------------------------------------------------------------------------------
def test_text_is_right_up_to_the_last_position(recorder):
    family, settings = FAMILIES["gpt2"]  # a table of positions: one beyond its end would be an error
    model, prompt = build(family, {**settings, "n_positions": 24}), random_tokens(5, seed=6)
    truth = plain_text(model, prompt, 19, Picker())
    pair = Pair(FixedTarget(model), OracleDrafter(prompt.tolist() + truth + [2] * 9))
    for seed in range(3):
        assert decode(pair, prompt, RandomPolicy(LIMITS, seed=seed), 19, stop_tokens=()).tokens == truth
    assert autoregress(pair, prompt, 19, stop_tokens=()).tokens == truth
    with pytest.raises(SpecdecError, match="context ends at 24"):
        decode(pair, prompt, max_new_tokens=20)


def test_overflow_is_refused_before_anything_is_written(llama):
    pair, tokens = eagle_pair(llama, fixed=True), torch.arange(9)
    with pair.inference():
        cache, session = pair.target.new_cache(8), pair.drafter.session(8, 4)
        with pytest.raises(SpecdecError, match="room for 8 tokens but 9 are needed"):
            pair.target.forward(tokens, cache)
        assert len(cache) == 0
        features = pair.target.forward(tokens[:8], cache).features
        with pytest.raises(SpecdecError, match="room for 8 tokens, 9 are needed"):
            session.root(tokens, features[[0] * 9], 4)
        with pytest.raises(SpecdecError, match="top_k=13 exceeds the draft vocabulary"):
            session.root(tokens[:8], features, 13)


def test_a_model_that_reads_values_back_is_refused_as_a_graph_and_left_as_it_was(monkeypatch):
    family, settings = FAMILIES["llama"]
    dynamic = dict(rope_type="dynamic", factor=4.0, rope_theta=1e4)
    model = build(family, {**settings, "rope_parameters": dynamic})
    expected = autoregress(Pair(Target(model)), [1, 2, 3], 8).tokens
    assert autoregress(Pair(FixedTarget(model)), [1, 2, 3], 8).tokens == expected  # on a CPU nothing is recorded
    pretend_cuda(monkeypatch)
    with pytest.raises(SpecdecError, match="cannot be recorded as a CUDA graph .*capturing.; load this pair without"):
        autoregress(Pair(FixedTarget(model)), [1, 2, 3], 8)
    assert autoregress(Pair(Target(model)), [1, 2, 3], 8).tokens == expected


def test_a_replay_that_gives_other_logits_is_noticed(llama, monkeypatch):
    monkeypatch.setattr(Recorded, "record", lambda recorded: (recorded.function(), lambda: None))
    with pytest.raises(SpecdecError, match="other logits when a forward is replayed.*load this pair without capture"):
        autoregress(eagle_pair(llama, fixed=True), [1, 2, 3], 8)


def test_capture_is_a_flag_of_load_pair():
    pair, plain = (specdec.load_pair("tiny", dtype="float32", capture=capture) for capture in (True, False))
    assert isinstance(pair.target, FixedTarget) and isinstance(pair.drafter, FixedDrafter)
    assert not isinstance(plain.target, FixedTarget) and not isinstance(plain.drafter, FixedDrafter)
    chat = [{"role": "user", "content": "What is 3 + 4?"}]
    out, expected = (decode(each, chat, Static(16, 4, 4), max_new_tokens=24) for each in (pair, plain))
    assert out.tokens == expected.tokens and out.tau == expected.tau
    assert isinstance(pair.drafter.session(8, 8), FixedSession)
