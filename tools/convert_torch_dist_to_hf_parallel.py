"""tools/convert_torch_dist_to_hf.py, which reads and writes in parallel, under the name that users of slime know."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run as a script from a clone that is not installed

if __name__ == "__main__":
    from tools.convert_torch_dist_to_hf import main

    sys.exit(main())
