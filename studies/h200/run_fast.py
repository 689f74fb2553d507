"""The fast step's table on one GPU: measure, save the record.

python studies/h200/run_fast.py OUT_FOLDER [model]
"""

from __future__ import annotations

import sys
from pathlib import Path

from workbench.measure.fast_table import run_fast_table

if __name__ == "__main__":
    record = run_fast_table(*sys.argv[2:3], report=lambda line: print(line, flush=True))
    record.save(Path(sys.argv[1]) / "fast_step.json")
    for row in record.rows:
        print({key: value for key, value in row.items() if key != "top_kernels"})
        for kernel in row.get("top_kernels", ()):
            print("   ", f"{kernel['calls_per_step']:6.1f} {kernel['ms_per_step']:8.4f} ms", kernel["name"][:110])
