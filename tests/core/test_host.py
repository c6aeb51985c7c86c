"""A device apart from the host: the same texts, nothing of the host in them, few waits a cycle."""

import copy
from dataclasses import replace

import pytest
import torch
from fakes.gpu import DEVICE, fake_device
from fakes.pairs import random_network, random_target
from fakes.values import random_policy

import specdec
from specdec.core.pair import Pair
from specdec.core.tree import EAGLE1_TREE, StaticShape
from specdec.models.eagle_drafter import BlockDrafter, EagleDrafter
from specdec.models.eagle_network import EagleConfig
from specdec.models.heads import HeadsConfig, HeadsDrafter
from specdec.models.load import load_drafter
from specdec.models.ngrams import HybridDrafter
from specdec.models.small_lm import SmallLM
from specdec.models.target import Target
from specdec.policies.resps import RespsPolicy

device = pytest.fixture(fake_device)
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [7, 8, 9, 7, 8]]
SAMPLED = dict(temperature=0.8, top_k=20, top_p=0.95, min_p=0.01, repetition_penalty=1.2, seed=3)
TREE = specdec.Static(12, 3, 4)
EAGLE = EagleConfig(32, 48, 4, 2, 40, 18, 32, taps=(0, 1, 2))
FIRST = replace(EAGLE, generation=1, num_taps=1, taps=(2,))
HEADS = HeadsConfig(32, 40, 18, num_heads=3, taps=(2,))
RESPS = RespsPolicy(features_size=96, totals=(4, 8), depths=(2, 3), widths=(2, 4))
NETWORKS = {
    "eagle-3": (EagleDrafter, EAGLE),
    "eagle-1": (EagleDrafter, FIRST),
    "griffin": (EagleDrafter, replace(FIRST, griffin=True)),
    "medusa": (HeadsDrafter, HEADS),
    "hydra": (HeadsDrafter, replace(HEADS, hydra=True)),
    "block": (BlockDrafter, replace(EAGLE, block=4)),
}


def pair_of(name: str) -> Pair:
    target = Target(random_target(40, 32, layers=2, seed=3))
    if name == "lm":
        return Pair(target, SmallLM(random_target(40, 32, layers=1, seed=4), target))
    if name in ("prompt_lookup", "lookahead"):
        return Pair(target, load_drafter(name, target))
    kind, config = NETWORKS.get(name, NETWORKS["eagle-3"])
    drafter = kind(random_network(config, 5), target)
    target.taps = drafter.taps
    return Pair(target, HybridDrafter(drafter) if name == "hybrid" else drafter)


def texts(pair, policy, sampling):
    """Each alone, and of trees that are fixed all at once; with the rows of cycles."""
    options = dict(max_new_tokens=8, stop_tokens=(), **sampling)
    made = [specdec.decode(pair, prompt, policy, **options) for prompt in PROMPTS]
    if isinstance(policy, specdec.Static):
        made += specdec.decode_many(pair, PROMPTS, policy, **options)
    return [text.tokens for text in made], [row for text in made for row in text.rows]


CASES = [(name, TREE, 1) for name in (*NETWORKS, "lm")]
CASES += [("eagle-3", specdec.Static(60, 7, 10), 1)]
CASES += [("eagle-3", specdec.Static.of(StaticShape(EAGLE1_TREE)), 1)]
CASES += [("eagle-3", RESPS.fill_at_random((8, 8), 0), 1)]
CASES += [("eagle-3", random_policy(32, probe="draft"), 1)]
CASES += [("eagle-3", f"smollm2/{name}-float32", 1) for name in ("ltd", "radar")]
# copies are looked up in the text and merged with the tree on the host
CASES += [("prompt_lookup", TREE, 5), ("lookahead", TREE, 6), ("hybrid", TREE, 5)]


@pytest.mark.filterwarnings("ignore:the policy in")  # it was trained for other costs
@pytest.mark.parametrize("sampling", [{}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize(("name", "policy", "reads"), CASES)
def test_a_device_gives_the_same_texts_with_few_waits(name, policy, reads, sampling, device):
    if isinstance(policy, str):
        policy = specdec.load_policy(policy)
    pair = pair_of(name)
    expected, _ = texts(pair, policy, sampling)
    # weights are moved after they were bound, as a reader may do it
    pair = copy.deepcopy(pair)
    with torch.no_grad():
        for network in filter(None, (pair.target.model, pair.drafter.network)):
            network.to(DEVICE)
    # the probe, and tables that are uploaded when they are first needed
    specdec.decode(pair, PROMPTS[0], policy, 4)
    device.reads = device.uploads = 0
    found, rows = texts(pair, policy, sampling)
    assert found == expected
    # a text's first token, one read a cycle, and one for every question that a policy is asked
    questions = sum(row.questions for row in rows)
    assert device.reads <= len(found) + reads * len(rows) + questions
    if reads == 1:
        assert device.uploads <= (2 + (name == "lm")) * len(found) + len(rows)


def test_the_device_refuses_tensors_of_the_host_and_counts_waits(device):
    there, here = torch.arange(4.0, device=DEVICE), torch.arange(4)
    for mixed in (lambda: there + here, lambda: there[here], lambda: torch.cat((there, here))):
        with pytest.raises(RuntimeError, match="of the host"):
            mixed()
    waits = [there.tolist, there.cpu, there.nonzero, there.max().item, there.any().__bool__]
    waits += [lambda: there[there > 1], lambda: there.masked_select(there > 1)]
    waits += [lambda: int(there[1]), lambda: torch.zeros(4).copy_(there)]
    for number, wait in enumerate(waits, 1):
        wait()
        assert (device.reads, device.uploads) == (number, 0)
    there.copy_(here)
    there[:2] = torch.tensor([1.0, 2.0], device=DEVICE)
    assert (device.reads, device.uploads) == (len(waits), 2)
