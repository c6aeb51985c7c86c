"""What every test shares: no network, no screen, one thread, a home for results of its own."""

import os
import tempfile

# Before anything imports torch. Tiny tensors are fastest on one thread.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["MPLBACKEND"] = "Agg"
# every worker of pytest-xdist reads this file, so each has a home of its own
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


# Files whose tests measure time: one after the other. Those that start kernels or a browser too.
CLOCK = ("test_calibrate", "test_bench", "test_clock", "test_overhead", "test_tuning")
KERNEL = ("workbook/", "browser/", "test_recipes", "test_examples", "notebooks/")


def pytest_collection_modifyitems(items):
    """Groups for `--dist loadgroup`: each runs in one worker."""
    for item in items:
        if any(name in item.nodeid for name in CLOCK):
            item.add_marker(pytest.mark.xdist_group("clock"))
        elif any(name in item.nodeid for name in KERNEL):
            item.add_marker(pytest.mark.xdist_group("kernel"))


def pytest_collection_finish():
    """What was imported so far stays: the garbage collector need not go through it again."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish():
    shutil.rmtree(os.environ["SPECDEC_HOME"], ignore_errors=True)
