"""Where data of other people lies that is not in the repository: $SPIRULA_SHARED, else ../shared of the checkout. Tests without it skip visibly."""
import os
from pathlib import Path

import pytest

SHARED = Path(os.environ.get("SPIRULA_SHARED") or Path(__file__).resolve().parents[2] / "shared")
DATA = SHARED / "data"
ROBUSTNESS = DATA / "robustness"
needs_robustness = pytest.mark.skipif(not ROBUSTNESS.is_dir(), reason=f"{ROBUSTNESS} is not there (SPIRULA_SHARED names another place)")
