"""The helpers of these tests lie beside them."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent))
