#!/usr/bin/env bash
# Profiles, cost tables, paced latency, capacity and the twin's agreement on one GPU, in one process as far as it lives, since loading the model
# takes long. Each part has a time limit (PART_S, 300 s); a part that fails, hangs or kills the process is skipped and the others go on.
# Usage, in the repository root with the project importable:  bash studies/h200/run_measure.sh OUT [parts]
# Parts, in this order: costs twin paced capacity_{fused,staged}_low costs_high capacity_{fused,staged}_high costs_eager_high capacity_nemo_high
#   costs_eager capacity_nemo_low profile.
# Only when they are named: dense dense_high dense_resident dense_resident_high, the cost tables of the studies of capacity; traffic traffic_high
#   offline_costs, those of the other studies.
# The resident engine's parts run only when they are named too, best by themselves, since rows take most of the memory: resident_step
#   capacity_resident_low capacity_resident_low_bf16 capacity_resident_high capacity_resident_high_bf16.
# TOTAL_S (1,800 s) bounds the whole; SIZES='{"model":"tiny",...}' makes it small (see the Sizes dataclass).
set -uo pipefail
out=$1; shift
parts=(${*:-costs twin paced capacity_fused_low capacity_staged_low costs_high capacity_fused_high capacity_staged_high costs_eager_high
  capacity_nemo_high costs_eager capacity_nemo_low profile})
export PYTHONUNBUFFERED=1 PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} KINETO_LOG_LEVEL=99
mkdir -p "$out"; rm -f "$out"/.tried_*; : >"$out/measure.log"
end=$((SECONDS + ${TOTAL_S:-1800}))
for _ in "${parts[@]}"; do # at most one new process a part; one that did not even begin a part will not do better
  before=$(find "$out" -name '.tried_*' | wc -l)
  left=$((end - SECONDS)); ((left > 20)) || { echo "time is up"; break; }
  timeout -k 5 "$left" python3 studies/h200/run_measure.py "$out" "${parts[@]}" >>"$out/measure.log" 2>&1 && break
  echo "== the process ended with $? after $SECONDS s; going on with the parts that are left" >>"$out/measure.log"
  (($(find "$out" -name '.tried_*' | wc -l) > before)) || break
done
rm -f "$out"/.tried_*
grep -E "^==|^[a-z_0-9]+: |Error" "$out/measure.log" | cut -c1-300; ls -l "$out"
exit 0
