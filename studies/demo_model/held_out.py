"""Copies the held-out clips that the package does not ship, so that a training run can report on the whole held-out set.

python studies/demo_model/held_out.py human/speech out_folder
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

from ship_speech import HERE, SHIPPED


def ids(path: Path) -> set[str]:
    """The clip ids of a manifest."""
    return {json.loads(line)["id"] for line in path.read_text().splitlines()}


def main() -> None:
    """Command line: folder of FLAC files with manifest, and where to copy."""
    speech, out = Path(sys.argv[1]), Path(sys.argv[2])
    wanted = ids(HERE / "human_test.jsonl") - ids(SHIPPED / "manifest.jsonl")
    lines = (speech / "manifest.jsonl").read_text().splitlines()
    kept = [line for line in lines if json.loads(line)["id"] in wanted]
    for line in kept:
        name = json.loads(line)["audio_filepath"]
        shutil.copyfile(speech / name, out / name)
    (out / "manifest.jsonl").write_text("".join(line + "\n" for line in kept))
    print(f"{len(kept)} clips")


if __name__ == "__main__":
    main()
