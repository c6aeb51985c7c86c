"""Several processes: a target in shares decodes what one process decodes, and a training is that of one process."""

import dataclasses
import json
import multiprocessing
import os
import socket
import subprocess
import sys
import traceback
from pathlib import Path

import pytest
import torch
from fakes.killed import killed_at

import specdec
from specdec import ranks, runs
from specdec.core.policy import Policy, RandomPolicy
from specdec.core.verification import Picker
from specdec.models import load, spread
from specdec.models.target import Target
from specdec.tools import cli
from specdec.training.drafter import eagle3, generate_data, networks, presets
from specdec.training.drafter.chats import load_conversations
from specdec.training.drafter.generate_data import ChatConfig, generate_chats
from specdec.training.drafter.presets import CacheConfig

PROMPT = "What is 3 plus 4?"
TREE = specdec.TreeConfig(12, 3, 4)


def in_two(work, folder: Path) -> list:
    """What `work(folder)` returns in each of two processes, as JSON keeps it; an exception there fails the test here."""
    if torch.cuda.is_available():
        pytest.skip("transformers shares a target among GPUs here; these tests are about gloo on a CPU")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=one_rank, args=(work, folder, number, port)) for number in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(240)
        process.kill()  # where it is still at work
    codes = [process.exitcode for process in processes]
    assert codes == [0, 0], [(folder / f"failed-{number}").read_text() for number in range(2) if codes[number] == 1]
    return [json.loads((folder / f"rank-{number}.json").read_text()) for number in range(2)]


def one_rank(work, folder: Path, number: int, port: int) -> None:
    # A forked process renews torch's pool of threads at its first use, and two threads at once (transformers reads
    # weights in several) get "Invalid thread pool": it is renewed here, while there is one.
    torch.set_num_threads(torch.get_num_threads())
    os.environ |= {"RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    try:
        found = work(folder)
        (folder / f"rank-{number}.json").write_text(json.dumps(found))
        ranks.barrier()
        ranks.leave()
    except BaseException:
        (folder / f"failed-{number}").write_text(traceback.format_exc())
        os._exit(1)  # the other one may wait for us in a forward, and is ended from outside
    os._exit(0)


def loaded():
    return load.load_model(load.target_place("tiny"), torch.float32, torch.device("cpu"))


class OwnSeed(RandomPolicy):  # answers at random, otherwise on every rank
    def __init__(self):
        super().__init__(TREE, seed=ranks.rank())
        self.shown = []

    def observe(self, cycle):
        self.shown.append(cycle.total_ms)


class Failing(Policy):  # fails on rank 0, which alone is asked
    asks, limits, plan = frozenset({"plan"}), TREE, TREE


def tree_rows(pair, dtype=None) -> list[torch.Tensor]:
    """Logits and features of a prompt and of a tree after it, a root with two branches; in `dtype` from then on."""
    target = pair.target if dtype is None else Target(pair.target.model.to(dtype), pair.target.taps)
    depth, ancestors = torch.tensor([0, 1, 1, 2, 2]), torch.eye(5, dtype=torch.bool)
    for path in ((0, 1, 3), (0, 2, 4)):
        ancestors[path[1], path[0]] = ancestors[path[2], list(path)] = True
    with target.inference() if dtype else pair.inference():
        cache = target.new_cache(64)
        first = target.forward(torch.arange(5, 25), cache)
        rows = target.forward(torch.tensor([7, 30, 31, 32, 33]), cache, depth, ancestors)
    return [torch.cat(parts) for parts in ((first.logits, rows.logits), (first.features, rows.features))]


def texts(pair, temperature: float) -> list[list[int]]:
    """What one prompt leads to, plainly, by a tree, by trees at random, and beside another prompt."""
    settings, static = dict(max_new_tokens=12, stop_tokens=(), seed=3, temperature=temperature), specdec.Static.of(TREE)
    made = [specdec.autoregress(pair, PROMPT, **settings)]
    made += [specdec.decode(pair, PROMPT, policy, **settings) for policy in (static, OwnSeed())]
    made += specdec.decode_many(pair, [PROMPT, "Hello"], static, **settings)[:1]
    return [one.tokens for one in made]


def decoded_in_shares(folder):
    pair = specdec.load_pair("tiny", dtype="float32", spread="tp")
    policy, query = OwnSeed(), pair.target.model.model.layers[0].self_attn.q_proj
    found = {"tree": [values.tolist() for values in tree_rows(pair)], "q": list(query.weight.to_local().shape)}
    found["texts"] = [texts(pair, temperature) for temperature in (0.0, 1.0)]
    rows = specdec.decode(pair, PROMPT, policy, max_new_tokens=8, stop_tokens=()).rows
    found |= {"shown": len(policy.shown), "rows": [dataclasses.asdict(row) for row in rows]}
    try:
        specdec.decode(pair, PROMPT, Failing(), max_new_tokens=8, stop_tokens=())
    except specdec.SpecdecError as error:
        found["failed"] = [type(error).__name__, str(error)]
    picker = spread.InStep().picker(Picker())
    found["agreed"] = [agree([float(ranks.rank()), 0.25]) for agree in (ranks.slowest, ranks.mean)]
    found["pick"] = picker.pick(torch.eye(4)[ranks.rank()], torch.arange(3))  # each would pick its own
    found["exact"] = [values.tolist() for values in tree_rows(pair, torch.float64)]
    return found


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    return in_two(decoded_in_shares, tmp_path_factory.mktemp("shares"))


@pytest.fixture(scope="module")
def alone():
    return specdec.load_pair("tiny", dtype="float32")


def test_a_target_in_shares_gives_the_logits_features_and_texts_of_one_process(shared, alone):
    expected, exact = tree_rows(alone), tree_rows(specdec.load_pair("tiny", dtype="float32"), torch.float64)
    assert shared[0]["q"] == [64, 128]  # half of the 128 rows
    for found in shared:
        for ours, theirs in zip(found["exact"], exact, strict=True):
            torch.testing.assert_close(torch.tensor(ours, dtype=torch.float64), theirs, rtol=1e-11, atol=1e-11)
        logits, features = map(torch.tensor, found["tree"])
        for ours, theirs, true in zip((logits, features), expected, exact, strict=True):
            assert (ours - true).abs().max() <= 3 * (theirs - true).abs().max()
        torch.testing.assert_close(features, expected[1], rtol=1e-4, atol=1e-4)
    expected = [texts(alone, temperature) for temperature in (0.0, 1.0)]
    assert shared[0]["texts"] == shared[1]["texts"] == expected and expected[0] != expected[1]
    assert all(tokens == of_one[0] for of_one in expected for tokens in of_one)


def test_rank_0_picks_answers_and_fails_for_all_and_the_slowest_is_timed(shared):
    first, second = shared
    assert first["rows"] == second["rows"]  # the same trees, and the same times
    assert len({row["verify_nodes"] for row in first["rows"]} | {row["expansions"] for row in first["rows"]}) > 1
    for row in first["rows"]:
        laps = [row[f"{name}_ms"] for name in ("draft", "policy", "verify", "commit", "host")]
        assert row["total_ms"] == pytest.approx(sum(laps))
    assert first["pick"] == second["pick"] == 0
    assert first["agreed"] == second["agreed"] == [[1.0, 0.25], [0.5, 0.25]]
    assert first["shown"] == len(first["rows"]) and second["shown"] == 0
    assert shared[0]["failed"] == ["SpecdecError", "Failing answers no plan question."]
    assert shared[1]["failed"][0] == "RankZeroFailed"


def test_one_process_is_left_as_it_is_and_weights_that_lie_elsewhere_are_refused(alone):
    engine, policy = specdec.core.decode.opened(alone, PROMPT, None, 8)
    assert alone.in_step is None and type(engine.picker) is Picker and not isinstance(policy, spread.RankZeroPolicy)
    assert not isinstance(engine.clock, spread.SlowestClock) and "root" not in vars(engine)
    row = {"loss": 0.5, "tok": 3}
    assert eagle3.of_all_ranks(row) is row and ranks.broadcast(row) is row and ranks.share([1, 2]) == [1, 2]
    assert not torch.distributed.is_initialized()
    accelerate = pytest.importorskip("accelerate")
    model = loaded()
    names = [*(f"model.layers.{number}" for number in range(8)), "model.embed_tokens", "model.norm", "model.rotary_emb"]
    places = dict.fromkeys([*names, "lm_head"], "cpu")
    model = accelerate.dispatch_model(model, places, main_device="cpu", force_hooks=True)
    pair = specdec.load_pair(target=model, drafter=load.shipped_folder("tiny") / "drafter")
    for ours, theirs in zip(tree_rows(pair), tree_rows(alone), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    assert not pair.target._layers._lean and not pair.target._prepacked._groups
    assert alone.target._layers._lean
    pair = specdec.load_pair("tiny", dtype="float32", spread="auto")
    text = specdec.decode(pair, PROMPT, max_new_tokens=8, stop_tokens=()).tokens
    assert text == specdec.autoregress(pair, PROMPT, max_new_tokens=8, stop_tokens=()).tokens and pair.in_step is None
    model = loaded()
    model.model.layers[3].mlp.to("meta")
    for given, said in (
        (dict(target=model), "3 weights of the target do not fit on the devices here"),
        (dict(target=loaded(), spread="auto"), "a loaded model keeps its dtype and device"),
    ):
        pytest.raises(specdec.SpecdecError, specdec.load_pair, **given).match(said)


def trained(folder, steps=20, **more):
    """The curve of a training on the same text, in float32; of several ranks rank 0 writes it."""
    chats, name = load_conversations(folder / "chats.jsonl"), "two" if ranks.world() > 1 else "one"
    settings, objective = presets.preset("tiny", dict(regenerate_chats=0, passes=3, held_out=2, length=64, batch=4))
    settings = dataclasses.replace(settings, held_out_frac=0.2, draft_vocab_size=64)
    features = CacheConfig(folder / f"features-{name}", more.pop("features_gb", 1.0))
    budget = presets.Budget(steps=steps, device="cpu", features=features, **more)
    options = dict(out_dir=folder / name, objective=objective, settings=settings, budget=budget)
    with pytest.MonkeyPatch.context() as patch:
        for module in (eagle3, networks):
            patch.setattr(module, "compute_dtype", lambda device: torch.float32)
        eagle3.train_drafter("tiny", chats, **options)
    return curve(folder / name)


def curve(folder):
    return runs.read_table(folder / "drafter_training" / "loss.parquet")


def equal_curves(folder, **training):
    """The curve of two ranks, which have trained already, equals that of one process, which trains here and is returned."""
    two, one = curve(folder / "two"), trained(folder, **training)
    torch.testing.assert_close(torch.tensor(two["loss"].values), torch.tensor(one["loss"].values), rtol=1e-4, atol=0)
    return two, one


def conversations(folder):
    pair = specdec.load_pair("tiny", dtype="float32")
    prompts = [f"What is {a} plus {b}?" for a in range(4) for b in range(6)]
    texts = specdec.decode_many(pair, prompts, plain=True, max_new_tokens=40, stop_tokens=())
    lines = [
        json.dumps({"messages": [dict(role="user", content=prompt), dict(role="assistant", content=one.text or "x")]})
        for prompt, one in zip(prompts, texts, strict=True)
    ]
    (folder / "chats.jsonl").write_text("\n".join(lines) + "\n")


def written(folder, name: str):
    """Chats that the target writes, in files of eight."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(generate_data, "SHARD", 8)
        pair = specdec.load_pair("tiny", dtype="float32", drafter=None)
        config = ChatConfig(rows=8, answer_tok=8, prompt_tok=16)
        return generate_chats(pair, config, folder / name, tokens=200, progress=False).answer_tok


def trained_and_written(folder):
    trained(folder, steps=8)
    return written(folder, "chats")


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    folder = tmp_path_factory.mktemp("training")
    conversations(folder)
    return folder, in_two(trained_and_written, folder)


def test_two_ranks_train_and_write_chats_as_one_process(ran):
    folder, found = ran
    two, one = equal_curves(folder, steps=8)
    assert len(one) == 8 and one["loss"].iloc[-1] < 0.9 * one["loss"].iloc[0]
    assert (two["batch_tok"] == one["batch_tok"]).all() and (two["counted_tok"] == one["counted_tok"]).all()
    caches = [{path.name for path in folder.glob(f"features-{name}/**/*.safetensors")} for name in ("one", "two")]
    assert caches[0] == caches[1] != set()
    target = specdec.load_pair("tiny").target
    weights = [load.load_drafter(folder / name / "drafter", target).network.parameters() for name in ("one", "two")]
    for ours, theirs in zip(*weights, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-2)  # written in bfloat16
    assert found == [written(folder, "alone")] * 2
    names = sorted(path.name for path in (folder / "alone").iterdir())
    assert names == sorted(path.name for path in (folder / "chats").iterdir()) and len(names) >= 3
    for name in names:
        assert (folder / "chats" / name).read_text() == (folder / "alone" / name).read_text()


@pytest.mark.nightly
@pytest.mark.parametrize(("fsdp", "features_gb"), [(False, 0.0), (True, 0.0), (True, 1.0)])
def test_20_steps_of_two_ranks_are_those_of_one_process(tmp_path, fsdp, features_gb):
    conversations(tmp_path)

    def work(folder):
        trained(folder, fsdp=fsdp, features_gb=features_gb)
        model, _ = networks.load_target("tiny", torch.device("cpu"), fsdp)
        return {hasattr(weight, "full_tensor") for weight in model.parameters()} == {fsdp}

    assert in_two(work, tmp_path) == [True, True]
    _, one = equal_curves(tmp_path, features_gb=features_gb)
    assert len(one) == 20


@pytest.mark.nightly
def test_an_interrupted_training_of_two_ranks_goes_on(tmp_path):
    conversations(tmp_path)

    def work(folder):
        with killed_at(eagle3.DrafterRun, "_update", 11):
            trained(folder)
        ranks.barrier()
        trained(folder)

    in_two(work, tmp_path)
    two, _ = equal_curves(tmp_path)
    assert list(two["step"]) == list(range(20))


@pytest.mark.nightly
def test_torchrun_prints_once_what_one_process_prints():
    command = ["-m", "specdec", "decode", PROMPT, "--pair", "small", "--max-new-tokens", "24", "--dtype", "float32"]
    options = dict(capture_output=True, text=True, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}, timeout=500)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    two = subprocess.run([*torchrun, *command, "--tp"], **options)
    one = subprocess.run([sys.executable, *command], **options)
    assert one.returncode == two.returncode == 0, two.stderr
    assert two.stdout == one.stdout and two.stderr.count("tokens/s") == 1
    refused = subprocess.run([*torchrun[:-1], "3", *command, "--tp"], **options)
    assert refused.returncode == 1 and refused.stderr.count("do not divide among 3 processes") == 1


@pytest.fixture
def several(request, monkeypatch):
    """As if torchrun had started three processes (or as many as asked), of which this is the first; nobody else is there."""
    if getattr(request, "param", 3) == 1:
        return
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "3"}.items():
        monkeypatch.setenv(name, value)
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)


TRAIN = "train eagle3 --target tiny --preset tiny --out OUT"
DECODE = "decode Hello --pair tiny"


@pytest.mark.parametrize(
    ("several", "line", "said"),
    [
        (3, f"{DECODE} --tp", "4 attention heads do not divide among 3 processes; start a number that divides"),
        (3, DECODE, "3 processes were started, each of which would do the same; add --tp"),
        (3, f"{DECODE} --device-map auto", "3 processes were started"),
        (3, f"{DECODE} --device-map auto --tp", "give one of them"),
        (3, "evaluate --pair tiny", "specdec evaluate runs in one process; start it without torchrun"),
        (3, "train target --preset tiny --out OUT", "specdec train runs in one process"),
        (3, TRAIN, "a batch of 4 rows does not divide among 3 processes; make it a multiple, such as --set batch=3"),
        (3, f"{TRAIN} --set batch=3 --fsdp", "a target in shares (fsdp) does not write its answers while it trains"),
        (3, f"{TRAIN} --set batch=3 --device cpu", "the 3 processes do not find each other"),
        (3, "generate-data tiny --out OUT --tokens 10 --device-map auto", "a device map serves one process"),
        (1, f"{DECODE} --tp", "tp needs several processes; start them with torchrun"),
        (1, f"{DECODE} --device-map everywhere", "unknown way to spread a target 'everywhere'"),
        (1, f"{DECODE} --device-map auto --device cpu", "a device map chooses the devices by itself"),
        (1, f"{TRAIN} --fsdp --set regenerate_chats=0", "fsdp needs several processes"),
    ],
    indirect=["several"],
)
def test_what_cannot_be_done_is_said_in_a_sentence(several, line, said, tmp_path, capsys):
    assert cli.main(line.replace("OUT", str(tmp_path / "out")).split()) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1 and not (tmp_path / "out").exists()


def test_missing_packages_and_backends_are_said_in_a_sentence(monkeypatch, several):
    monkeypatch.setattr(torch.distributed, "is_gloo_available", lambda: False)
    pytest.raises(specdec.SpecdecError, ranks.join).match("this PyTorch has no gloo for 3 processes")
    monkeypatch.setattr(torch.distributed, "is_available", lambda: False)
    pytest.raises(specdec.SpecdecError, ranks.join).match("has no torch.distributed")
    monkeypatch.delenv("WORLD_SIZE")
    monkeypatch.setattr(spread.importlib.util, "find_spec", lambda name: None)
    missing = pytest.raises(specdec.SpecdecError, specdec.load_pair, "tiny", spread="auto")
    missing.match("needs the package accelerate; pip install accelerate")


def test_other_ranks_say_nothing(several, monkeypatch, capfd):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(cli, "FIRST_WORD_S", 0.0)

    def fail(args):
        raise specdec.SpecdecError("what rank 0 says as well")

    for call, status in ((lambda args: print("twice") or print("twice", file=sys.stderr), 0), (fail, 2)):
        monkeypatch.setattr(cli, "_decode", call)
        monkeypatch.setitem(cli.COMMANDS, "decode", ("", call, cli.COMMANDS["decode"][2]))
        assert cli.main(["decode", "Hello", "--pair", "tiny"]) == status
        assert capfd.readouterr() == ("", "")
