"""The choices of a test run: its fresh seed, and the amount of work it does.

One fresh seed for a whole run of the tests, besides the fixed ones: every run tries something new. The first process
chooses it. Processes that it starts, to share the work (pytest-xdist), inherit it, for they must all name their tests
alike. It stands at the head of the output, and `RDZV_TEST_SEED` sets it.
"""

import os
import random

EVERYTHING = os.environ.get("RDZV_TEST_EVERYTHING") == "1"
"""True if every case of the large families of tests runs (`.ci/run`); else each run chooses some."""

FRESH = int(os.environ.setdefault("RDZV_TEST_SEED", str(random.SystemRandom().randrange(10**6, 10**9))))
