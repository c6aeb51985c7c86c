"""Executes one notebook through papermill, in a kernel of this very interpreter.

Knows nothing about the book. Needs no installed kernelspec and opens no network port: the kernel talks over files
where the system can. Progress bars come out as text, on the terminal and in the stored copy.
"""

from __future__ import annotations

import os
import sys
import tempfile
import uuid
from pathlib import Path

from specdec import machine, runs

# A kernel without a screen: tqdm.auto takes text bars when its notebook module cannot be imported.
LAUNCH = (
    "import sys; sys.modules['tqdm.notebook'] = None; "
    "from ipykernel.kernelapp import launch_new_instance; launch_new_instance()"
)
BAR_INTERVAL_S = "2"


def execute(source: Path, copy: Path, parameters: dict, shown: bool = True) -> str:
    """Execute `source` with `parameters` into `copy`, which is left as far as it came when a cell fails.

    shown: progress on the terminal. Returns '' or one sentence that says what went wrong.
    """
    import papermill
    from papermill.exceptions import PapermillExecutionError

    runs.write_text(copy, source.read_text(encoding="utf-8"))  # a folder that cannot be written is known at once
    try:
        papermill.execute_notebook(
            source,
            copy,
            parameters=parameters,
            kernel_name="python3",
            cwd=source.parent,
            progress_bar=shown,
            stderr_file=sys.stderr if shown else None,
            kernel_manager_class=_kernel_manager(),
            coalesce_streams=True,  # keeps only the last state of a text progress bar
        )
    except PapermillExecutionError as error:
        first_line = str(error.evalue).strip().splitlines()[:1]
        return f"cell {error.exec_count} raised {error.ename}: {''.join(first_line)}"
    except (RuntimeError, OSError) as error:  # the kernel died or never came up
        return f"the kernel stopped ({type(error).__name__}: {error})"
    return ""


def _kernel_manager() -> type:
    """A kernel manager class whose kernels are this interpreter, over ipc where the system has it."""
    from jupyter_client import AsyncKernelManager
    from jupyter_client.kernelspec import KernelSpec
    from traitlets import CaselessStrEnum, default

    paths = [str(machine.checkout()), *filter(None, [os.environ.get("PYTHONPATH")])]
    here = KernelSpec(
        argv=[sys.executable, "-c", LAUNCH, "-f", "{connection_file}"],
        language="python",
        env={"PYTHONPATH": os.pathsep.join(paths), "TQDM_MININTERVAL": BAR_INTERVAL_S},
    )

    class Headless(AsyncKernelManager):
        transport = CaselessStrEnum(["tcp", "ipc"], "tcp" if sys.platform == "win32" else "ipc", config=True)

        @default("ip")
        def _own_file(self):  # the library's default is one name for all kernels of a folder
            return (
                os.path.join(tempfile.gettempdir(), f"specdec-{uuid.uuid4().hex}")
                if self.transport == "ipc"
                else "127.0.0.1"
            )

        @property
        def kernel_spec(self):
            return here

    return Headless
