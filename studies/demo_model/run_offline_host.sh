#!/usr/bin/env bash
# Whole training on a GPU host without network, from what prepare.sh packed. A second call on the same machine, or with the
# earlier output as RESUME, goes on where the first stopped.
# Usage, in the repository root: run_offline_host.sh PACKED_FOLDER OUT_FOLDER SECONDS [RESUME_FOLDER]
set -euo pipefail
packed=$1; out=$2; seconds=$3; resume=${4:-$out}
work=${DEMO_WORK:-/tmp/demo_model}; mkdir -p "$work" "$out"
if [ ! -d "$work/site" ]; then
  python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target "$work/site" "$packed"/whl/*.whl
  tar xJf "$packed/tts.txz" -C "$work"
fi
export PYTHONPATH="$work/site:$PWD" PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1
cores=$(nproc --all)  # plain nproc would obey OMP_NUM_THREADS
python3 studies/demo_model/synthesize.py "$packed/data/texts.tsv" "$work/tts" "$work/shards" --hours 32 \
  --processes $((cores > 4 ? cores - 3 : 1)) > "$work/synthesis.log" 2>&1 &
speaker=$!
trap 'kill $speaker 2>/dev/null || true' EXIT
OMP_NUM_THREADS=2 python3 studies/demo_model/train.py "$packed/data" --shards "$work/shards" --out "$out" \
  --seconds "$seconds" --resume "$resume" --manifest workbench/data/speech/manifest.jsonl \
  --manifest "$packed/data/held_out/manifest.jsonl" 2>&1 | tee "$out/train.log" | grep -a -v -E "NeMo |nemo_logging|^ *$"
