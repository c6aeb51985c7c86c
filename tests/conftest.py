"""What every test shares: no network, no screen, one thread, and a home for results that is not the checkout."""

import os
import tempfile

# Before anything imports torch. Tiny tensors are fastest on one thread, whose sums are also the same everywhere.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["MPLBACKEND"] = "Agg"
os.environ["SPECDEC_HOME"] = tempfile.mkdtemp(prefix="specdec-tests-")
os.environ["SPECDEC_CACHE"] = os.path.join(os.environ["SPECDEC_HOME"], "cache")
os.environ["SPECDEC_CONFIG"] = os.path.join(os.environ["SPECDEC_HOME"], "config")

import gc  # noqa: E402
import shutil  # noqa: E402

import pytest  # noqa: E402

from specdec import machine  # noqa: E402

machine.ENOUGH_CORES = -1e9  # what else this machine does is no matter to a test


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A fresh SPECDEC_HOME for one test."""
    monkeypatch.setenv("SPECDEC_HOME", str(tmp_path))
    monkeypatch.setenv("SPECDEC_CONFIG", str(tmp_path / "config"))
    return tmp_path


@pytest.fixture(scope="session")
def tiny():
    """The shipped tiny pair in float32, for all tests that leave it as it is."""
    from specdec.models.load import load_pair

    return load_pair("tiny", dtype="float32", device="cpu")


def pytest_collection_finish():
    """What was imported so far stays: the garbage collector need not go through it again and again."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish():
    shutil.rmtree(os.environ["SPECDEC_HOME"], ignore_errors=True)
