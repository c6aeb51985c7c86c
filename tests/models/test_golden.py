"""The official-semantics engine's own trees, verifications and texts, reproduced one by one."""

import json
from types import SimpleNamespace

import pytest
import torch
from fakes.golden import GOLDEN, needs_golden
from fakes.reference import paths_of, sequential_rejection
from safetensors.torch import load_file

import specdec
from specdec.core.cycle import run_cycle
from specdec.core.engine import LiveEngine
from specdec.core.policy import Static
from specdec.core.tree import DraftTree
from specdec.core.verification import Picker, make_warpers

pytestmark = needs_golden

PROMPTS, CONFIGS = range(4), range(4)
GRID = [pytest.param(p, c, id=f"p{p}-c{c}") for p in PROMPTS for c in CONFIGS]
VARIANTS = ("narrow_hidden", "full_vocab", "rope_theta_500k")
CASES = [f"v{2 * number}" for number in range(26)]


def read(name: str):
    return json.loads((GOLDEN / name).read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def golden():
    """The pair and everything recorded about it."""
    pair = specdec.load_pair(
        target=GOLDEN / "target", drafter=GOLDEN / "drafter", dtype="float32", device="cpu"
    )
    book = read("golden.json")
    return SimpleNamespace(
        pair=pair,
        # The verification cases' two own prompts are not recorded.
        prompts=[torch.tensor(ids) for ids in book["prompts"] if ids],
        policies=[Static(*numbers) for numbers in book["configs"]],
        generations={(g["prompt"], g["config"]): g for g in book["generation"]},
        first=load_file(GOLDEN / "first_call.safetensors"),
        cases={case["key"]: case for case in read("verify.json")},
        verify=load_file(GOLDEN / "verify.safetensors"),
    )


def first_cycle(pair, prompt, policy) -> LiveEngine:
    """An engine after its first cycle; its `tree` and its candidate pool are still there."""
    engine = LiveEngine(pair, prompt, 32, policy.limits, Picker())
    with pair.inference():
        engine.prefill()
        engine.root_token = engine.tokens[0]
        run_cycle(engine, policy)
    return engine


def assert_same_tree(tree: DraftTree, recorded: dict) -> None:
    """Tokens, mask, positions and paths, all exact. recorded: under the official names."""
    assert tree.token.tolist() == recorded["draft_tokens"].tolist()
    assert torch.equal(tree.ancestors, recorded["tree_mask"])
    assert torch.equal(tree.depth, recorded["tree_position_ids"])
    assert torch.equal(paths_of(tree), recorded["retrieve_indices"])


def part(tensors: dict, key: str) -> dict:
    return {
        name.removeprefix(key + "."): tensor
        for name, tensor in tensors.items()
        if name.startswith(key + ".")
    }


def parents_of(mask: torch.Tensor) -> list[int]:
    """A node's parent is the last ancestor before itself."""
    rows = mask.clone().fill_diagonal_(False)
    return [int(row.nonzero().max()) if row.any() else -1 for row in rows]


@pytest.mark.parametrize(("prompt", "config"), GRID)
def test_generation_and_the_first_tree(golden, prompt, config):
    recorded, policy = golden.generations[prompt, config], golden.policies[config]
    trees, ids = read(f"trees_p{prompt}_c{config}.json"), recorded["output_new_ids"]
    # One token more than recorded: the official engine never emits the last bonus token.
    engine = LiveEngine(golden.pair, golden.prompts[prompt], len(ids) + 1, policy.limits, Picker())
    rows, seen = [], []
    with golden.pair.inference():
        engine.prefill()
        while not engine.finished:
            context_tok = engine.context_tok
            rows.append(run_cycle(engine, policy))
            seen.append((engine.tree.token.tolist(), engine.tree.parent.tolist(), context_tok))
    assert seen == [
        tuple(tree[name] for name in ("draft_tokens", "parents", "context_len")) for tree in trees
    ]
    assert [row.accepted_tok for row in rows] == recorded["accept_length_per_cycle"]
    assert len(rows) == recorded["cycles"]
    assert sum(row.new_tok for row in rows) / len(rows) == pytest.approx(recorded["tau"], abs=1e-9)
    assert engine.tokens[: len(ids)] == ids
    recorded = part(golden.first, f"p{prompt}.c{config}")
    engine = first_cycle(golden.pair, golden.prompts[prompt], golden.policies[config])
    tree = engine.tree
    assert_same_tree(tree, recorded)
    assert torch.equal(tree.parent, recorded["parents"])
    torch.testing.assert_close(tree.score, recorded["node_scores"], atol=1e-5, rtol=0)
    # The kept candidates, counted as the official engine counts them: k, then k * k per level.
    pool = engine.growing.whole()
    kept = recorded["node_flat_candidate_index"] + 1
    assert torch.equal(kept, kept.sort().values)
    assert torch.equal(pool.token[kept], tree.token[1:])
    assert torch.equal(pool.score[kept], tree.score[1:])
    numbers = torch.cat((torch.zeros(1, dtype=torch.long), kept))
    assert torch.equal(numbers[tree.parent[1:]], pool.parent[kept])


@pytest.mark.parametrize("prompt", PROMPTS)
def test_first_forward_and_public_functions_give_what_was_recorded(golden, prompt):
    ids = golden.prompts[prompt]
    plain = specdec.autoregress(golden.pair, ids, max_new_tokens=128)
    drafted = specdec.decode(golden.pair, ids, golden.policies[0], max_new_tokens=128)
    recorded = golden.generations[prompt, 0]
    assert plain.tokens == recorded["ar_greedy_new_ids_128"]
    assert drafted.tokens == recorded["output_new_ids_128"]
    recorded, ids, pair = part(golden.first, f"p{prompt}"), golden.prompts[prompt], golden.pair
    with pair.target.inference() as target, pair.drafter.inference():
        rows = target.forward(ids, target.new_cache(len(ids)))
        root = rows.logits[-1].argmax()
        session = pair.drafter.session(len(ids), 0)
        step = session.step("root", torch.cat((ids[1:], root[None])), rows.features)
        hidden = pair.drafter.layer(step)
        found = {
            "prefill_logits_last": rows.logits[-1],
            "fused_features": rows.features,
            "fc_out": pair.drafter.network.fuse(rows.features),
            "draft_hidden_last_prenorm": hidden[-1],
            "draft_logits_last": pair.drafter.network.head(hidden)[-1],
        }
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, recorded[name], atol=2e-5, rtol=1e-5, msg=name)


@pytest.mark.parametrize("key", CASES)
def test_verification(golden, key):
    case, tensors = golden.cases[key], part(golden.verify, key)
    tokens, parents = tensors["draft_tokens"].tolist(), parents_of(tensors["tree_mask"])
    if case["temperature"] == 0:
        tree, context = DraftTree.from_arrays(tokens, parents), torch.tensor(tokens[:1])
        path, picked = Picker().walk(tree, tensors["node_logits"], context)
        assert picked[-1] == int(tensors["sample_p"].argmax())
    else:
        top_p = case["top_p"] or 1.0  # the official engine writes 0 for "off"
        warpers = make_warpers(case["temperature"], top_k=case["top_k"], top_p=top_p)
        probs = warpers(None, tensors["node_logits"]).softmax(-1)
        uniforms = iter(case["uniforms_consumed"])
        path, bonus_probs = sequential_rejection(tokens, parents, probs, uniforms)
        assert next(uniforms, None) is None  # every number was used, in the same order
        torch.testing.assert_close(bonus_probs, tensors["sample_p"].flatten(), atol=1e-6, rtol=1e-5)
    assert path == case["accepted_nodes"]
    assert len(path) - 1 == case["accept_length"]
    assert [tokens[node] for node in path] == case["accepted_tokens"]


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants(golden, variant):
    tensors = load_file(GOLDEN / "variants" / "first_call.safetensors")
    book = read("variants/variants.json")
    records = [record for record in book if record.get("variant") == variant]
    text = next(record for record in book if record["key"] == variant)
    assert len(records) == 3
    drafter = specdec.load_drafter(GOLDEN / "variants" / variant, golden.pair.target)
    pair = specdec.Pair(golden.pair.target, drafter)
    for record in records:
        engine = first_cycle(
            pair, golden.prompts[record["prompt"]], golden.policies[record["config"]]
        )
        assert engine.root_token == record["root_token"]
        assert_same_tree(engine.tree, part(tensors, record["key"]))
    prompt, ids = golden.prompts[text["gen_prompt"]], text["output_new_ids"]
    drafted = specdec.decode(
        pair, prompt, golden.policies[text["config"]], max_new_tokens=len(ids) + 1
    )
    assert drafted.tokens[:-1] == ids
    assert len(drafted.rows) == text["cycles"]
