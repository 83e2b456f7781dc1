import os

from tests.distributed import short_checks

pat = os.environ.get("PAT", "").split("|")
CHECKS = {k: v for k, v in short_checks.CHECKS.items() if any(p in k for p in pat)}
from tests.distributed import model_checks

CHECKS |= {k: v for k, v in model_checks.SLOW_CHECKS.items() if any(p in k for p in pat)}
