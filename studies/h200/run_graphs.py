"""Runs what `studies/h200/run_graphs.sh` needs for the table: measure, save the record, print the Markdown tables.

python studies/h200/run_graphs.py OUT_FOLDER [model]
"""

from __future__ import annotations

import sys
from pathlib import Path

from workbench.measure.graphed_table import DOCUMENT_CELLS, HALF_CELLS, markdown_table, run_graphed_table

if __name__ == "__main__":
    out = Path(sys.argv[1])
    record = run_graphed_table(
        *sys.argv[2:3],
        cells=(*DOCUMENT_CELLS, *HALF_CELLS),
        profiled=DOCUMENT_CELLS,
        report=lambda line: print(line, flush=True),
    )
    record.save(out / "graphed_step.json")
    (out / "graphed_step.md").write_text(markdown_table(record))
    print(markdown_table(record))
