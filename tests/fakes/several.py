"""Two processes that met by gloo, forked from the test's own so that nothing is imported again."""

import json
import multiprocessing
import os
import socket
from pathlib import Path

import torch

from specdec import ranks


def in_two(work, folder: Path) -> list:
    """What `work(folder)` returns in each of two processes, as JSON keeps it; an exception there fails the test here."""
    if torch.cuda.is_available():
        import pytest

        pytest.skip("transformers shares a target among GPUs here; these tests are about gloo on a CPU")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_rank, args=(work, folder, number, port)) for number in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(240)
    for process in processes:
        if process.is_alive():
            process.kill()
    codes = [process.exitcode for process in processes]
    assert codes == [0, 0], [(folder / f"failed-{number}").read_text() for number in range(2) if codes[number] == 1]
    return [json.loads((folder / f"rank-{number}.json").read_text()) for number in range(2)]


def _rank(work, folder: Path, number: int, port: int) -> None:
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
        import traceback

        (folder / f"failed-{number}").write_text(traceback.format_exc())
        os._exit(1)  # the other one may wait for us in a forward, and is ended from outside
    os._exit(0)
