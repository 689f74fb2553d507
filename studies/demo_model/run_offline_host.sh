#!/usr/bin/env bash
# Whole training on a GPU host without network, from what prepare.sh packed. A second call on the same machine, or with the
# earlier output as RESUME, goes on where the first stopped.
# Usage, in the repository root: run_offline_host.sh PACKED_FOLDER OUT_FOLDER SECONDS [RESUME_FOLDER]
# Packages that the host lacks: wheels in PACKED_FOLDER/whl, or the unpacked packages in PACKED_FOLDER/site.txz (smaller).
set -euo pipefail
packed=$1; out=$2; seconds=$3; resume=${4:-$out}
work=${DEMO_WORK:-/tmp/demo_model}; mkdir -p "$out" "$work/data"
if [ ! -d "$work/tts" ]; then
  mkdir -p "$work/site"
  if [ -f "$packed/site.txz" ]; then tar xJf "$packed/site.txz" -C "$work/site"; fi
  if [ -d "$packed/whl" ]; then
    python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target "$work/site" "$packed"/whl/*.whl
  fi
  cp -r "$packed/data/." "$work/data"
  if [ -f "$work/data/texts.tsv.xz" ]; then xz -df "$work/data/texts.tsv.xz"; fi
  tar xJf "$packed/tts.txz" -C "$work"
fi
export PYTHONPATH="$work/site:$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1
cores=$(nproc --all)  # plain nproc would obey OMP_NUM_THREADS
processes=$((cores > 16 ? 11 : cores > 6 ? cores - 5 : 1))  # training, its planner and the driver need cores of their own
python3 studies/demo_model/synthesize.py "$work/data/texts.tsv" "$work/tts" "$work/shards" --hours "${DEMO_HOURS:-24}" \
  --processes $processes > "$work/synthesis.log" 2>&1 &
speaker=$!
trap 'kill $speaker 2>/dev/null || true' EXIT
OMP_NUM_THREADS=2 python3 studies/demo_model/train.py "$work/data" --shards "$work/shards" --out "$out" \
  --seconds "$seconds" --resume "$resume" --manifest workbench/data/speech/manifest.jsonl \
  --manifest "$work/data/held_out/manifest.jsonl" 2>&1 | tee "$out/train.log" | grep -a -v -E "NeMo |nemo_logging|^ *$"
