"""Sets how OpenMP's threads wait for each other, before torch is loaded.

Waiting threads sleep after some microseconds and free the cores. By default they spin for so long that one
other busy process makes decoding ten times as slow. Existing settings are respected. Of 1,000 to 40,000 spins,
3,000 costs an idle machine nothing and a busy one little (SmolLM2, two cores, ten interleaved rounds).
"""

import os
import sys

SETTINGS = {"GOMP_SPINCOUNT": "3000", "KMP_BLOCKTIME": "1"}
_decided = os.environ.keys() & {"OMP_WAIT_POLICY", *SETTINGS}
too_late = "torch" in sys.modules and not _decided and "OMP_NUM_THREADS" not in os.environ
if not _decided:
    os.environ.update(SETTINGS)
