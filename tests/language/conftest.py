"""Tests here are about several tasks at once, and use the toys that lie beside the tests of each."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "tasks"))
