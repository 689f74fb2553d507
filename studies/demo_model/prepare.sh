#!/usr/bin/env bash
# Everything that happens before a GPU is needed, on a Debian or Ubuntu machine with a network; about five minutes on two cores.
# Usage, in the repository root:  bash studies/demo_model/prepare.sh PACKED_FOLDER
# Result (about 50 MiB, for run_offline_host.sh): data/ with the human prompts as Opus, texts and held-out clips; tts.txz.
# A host that lacks Python packages also needs their wheels in PACKED_FOLDER/whl.
set -euo pipefail
packed=$(realpath -m "$1"); work=$(mktemp -d); study=studies/demo_model; mkdir -p "$packed/data/held_out"
python3 -m workbench.model.fetch_speech "$work/human"
(cd "$work" && apt-get -q download fortunes fortunes-min wamerican-small >/dev/null && for p in *.deb; do dpkg -x "$p" text; done)
export PYTHONPATH=$PWD
python3 $study/split.py "$work/human/speech/manifest.jsonl"
python3 $study/human.py "$work/human/speech" "$work/human/root" "$packed/data"
python3 $study/texts.py "$work/text/usr/share/games/fortunes" "$work/text/usr/share/dict/american-english-small" "$packed/data/texts.tsv"
python3 -m pip install -q --no-deps --target "$work/aligner" pocketsphinx==5.1.1
PYTHONPATH=$work/aligner:$PWD python3 $study/align.py "$packed/data"
python3 $study/held_out.py "$work/human/speech" "$packed/data/held_out"
bash $study/pack.sh "$work/tts"
tar cJf "$packed/tts.txz" -C "$work" tts
rm -rf "$work"
du -sh "$packed"
