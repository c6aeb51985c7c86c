"""The golden vectors in `golden` under SPECDEC_SHARED (default ../shared); else tests skip."""

import os
from pathlib import Path

import pytest

SHARED = Path(os.environ.get("SPECDEC_SHARED", Path(__file__).resolve().parents[3] / "shared"))
GOLDEN = SHARED / "golden"
needs_golden = pytest.mark.skipif(not GOLDEN.is_dir(), reason=f"no golden vectors in {GOLDEN}")
