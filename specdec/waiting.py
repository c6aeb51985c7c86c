"""How OpenMP's threads wait for each other, decided before torch is loaded.

Threads that wait sleep after some microseconds and leave the cores to whoever has work. By default they spin for so long that one
busy process beside makes decoding ten times as slow. Nothing changes where somebody has decided already. Of 1,000 to 40,000 spins,
3,000 is where an idle machine loses nothing and a busy one little (SmolLM2, two cores, ten interleaved rounds).
"""

import os
import sys

SETTINGS = {"GOMP_SPINCOUNT": "3000", "KMP_BLOCKTIME": "1"}
_decided = os.environ.keys() & {"OMP_WAIT_POLICY", *SETTINGS}
too_late = "torch" in sys.modules and not _decided and "OMP_NUM_THREADS" not in os.environ
if not _decided:
    os.environ.update(SETTINGS)
