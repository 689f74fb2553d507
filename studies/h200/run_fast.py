"""The fast step's table on one GPU: measure, save the record.

python studies/h200/run_fast.py OUT_FOLDER [model] [--int8] [--lone]

--int8: a row more, one stream at 80 ms on int8 weights. --lone: only the rows of one stream at 80 ms, saved as fast_lone.json.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from workbench.measure.fast_table import FAST_CELLS, INT8_CELL, run_fast_table

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("model", nargs="?", default="nemotron-0.6b")
    parser.add_argument("--int8", action="store_true")
    parser.add_argument("--lone", action="store_true")
    options = parser.parse_args()
    cells = [cell for cell in FAST_CELLS if not options.lone or (cell.context, cell.batch) == ((56, 0), 1)]
    cells += [INT8_CELL] if options.int8 else []
    record = run_fast_table(options.model, cells, report=lambda line: print(line, flush=True))
    record.save(options.out / ("fast_lone.json" if options.lone else "fast_step.json"))
    for row in record.rows:
        print({key: value for key, value in row.items() if key != "top_kernels"})
        for kernel in row.get("top_kernels", ()):
            print("   ", f"{kernel['calls_per_step']:6.1f} {kernel['ms_per_step']:8.4f} ms", kernel["name"][:110])
