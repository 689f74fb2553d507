"""Chooses about 60 of the held-out clips and copies them, with manifest and licences, into the package.

The ten longest come first; the rest are spread evenly over the durations, each text once. Every chosen clip is in
`human_test.jsonl`, hence never trained on.

    python studies/demo_model/ship_speech.py human/speech human/root
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

HERE = Path(__file__).parent
SHIPPED = HERE.parents[1] / "workbench" / "data" / "speech"
CLIPS = 60
LONG_CLIPS = 13
COPYRIGHT = Path("usr/share/doc/asterisk-core-sounds-en/copyright")


def choose(rows: list[dict]) -> list[dict]:
    """At most `CLIPS` rows: the longest, then an even spread over the durations of the others, no text twice."""
    unique = list({row["text"]: row for row in rows}.values())
    unique.sort(key=lambda row: -row["duration"])
    chosen, rest = unique[:LONG_CLIPS], unique[LONG_CLIPS:]
    wanted = min(CLIPS - len(chosen), len(rest))
    spread = [rest[index * len(rest) // wanted] for index in range(wanted)]
    return sorted(chosen + spread, key=lambda row: row["id"])


def licence_text(copyright_file: Path) -> str:
    """The text of CC-BY-SA-3.0 as the package's copyright file carries it."""
    paragraphs = copyright_file.read_text().split("\nLicense: CC-BY-SA-3.0\n")
    # The name alone closes each `Files:` paragraph; only the paragraph with the full text goes on with indented lines.
    full = next(part for part in paragraphs[1:] if part.startswith(" THE WORK"))
    lines = []
    for line in full.splitlines():
        if line and not line.startswith(" "):
            break
        lines.append("" if line.strip() == "." else line[1:])
    return "\n".join(lines).strip() + "\n"


def main() -> None:
    """Command line: the folder of FLAC files with manifest, and the unpacked packages."""
    parser = argparse.ArgumentParser()
    parser.add_argument("speech", type=Path)
    parser.add_argument("packages", type=Path)
    arguments = parser.parse_args()
    held_out = {json.loads(line)["id"] for line in (HERE / "human_test.jsonl").read_text().splitlines()}
    rows = [json.loads(line) for line in (arguments.speech / "manifest.jsonl").read_text().splitlines()]
    chosen = choose([row for row in rows if row["id"] in held_out])
    SHIPPED.mkdir(parents=True, exist_ok=True)
    for row in chosen:
        shutil.copyfile(arguments.speech / row["audio_filepath"], SHIPPED / row["audio_filepath"])
    (SHIPPED / "manifest.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chosen))
    (SHIPPED / "LICENSE-CC-BY-SA-3.0.txt").write_text(licence_text(arguments.packages / COPYRIGHT))
    print(f"{len(chosen)} clips, {sum(row['duration'] for row in chosen):.0f} s")


if __name__ == "__main__":
    main()
