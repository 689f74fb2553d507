"""Runs the parts of `studies/h200/run_measure.sh` that have not been tried yet, each under its own time limit.

python studies/h200/run_measure.py OUT_FOLDER part...

A part leaves `.tried_PART` in OUT before it begins. One that hangs beyond its limit, or leaves the GPU unusable, ends the process with a code other
than 0; the shell script then starts it again for the parts that are left. `SIZES` (JSON) replaces fields of `Sizes`.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import traceback
from pathlib import Path

from workbench.measure.campaign import Campaign, sizes_from

LOAD_S = 120

if __name__ == "__main__":
    out, limit_s = Path(sys.argv[1]), float(os.environ.get("PART_S", "300"))
    campaign = Campaign(
        sizes_from(json.loads(os.environ.get("SIZES", "{}"))), out, lambda line: print(line, flush=True)
    )
    left = [part for part in sys.argv[2:] if not (out / f".tried_{part}").exists()]
    if left:
        faulthandler.dump_traceback_later(LOAD_S, exit=True)
        campaign.load()
    for part in left:
        tried = out / f".tried_{part}"
        tried.touch()
        faulthandler.dump_traceback_later(limit_s, exit=True)
        print(f"== {part}", flush=True)
        try:
            campaign.run(part)
        except Exception:
            traceback.print_exc()
            if not campaign.usable():
                sys.exit(3)
        faulthandler.cancel_dump_traceback_later()
