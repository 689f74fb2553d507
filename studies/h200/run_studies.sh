#!/usr/bin/env bash
# The studies on one GPU host: searched on the digital twin with cost records that were measured before, their finalists then run for real in one
# process on one loaded model. Each part has a time limit, and the next begins whatever became of it.
# Usage, in the repository root with the project importable:  bash studies/h200/run_studies.sh OUT [COSTS [search confirm]]
#   COSTS  folder with the cost records that the studies name (studies/h200). Of run_measure.sh, costs and traffic measure stage_costs.json,
#          offline_costs that of its name, dense dense_high dense_resident dense_resident_high the dense_costs_*.json. A study that lacks one is left out
# The part search needs no GPU: run it elsewhere first, with the same OUT, and here only what is left is done.
# ONLY: names of studies; REAL_S: whole seconds of all real runs together; LOAD_S: those of loading the model and writing the files. STUDIES (a folder of
# smaller ones), SECONDS_RUN, ROUNDS, TRIALS, MOST_STREAMS and SET ("key=value ...", for the search) make it small for a try.
set -uo pipefail
out=$1 costs=${2:-studies/h200}; shift $(($# < 2 ? $# : 2)); parts=${*:-search confirm}
export PYTHONUNBUFFERED=1 PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} KINETO_LOG_LEVEL=99 OMP_NUM_THREADS=${OMP_NUM_THREADS:-2}
export REAL_S=${REAL_S:-200}
has() { [[ " $parts " == *" $1 "* ]]; }
mkdir -p "$out/h200"; cp "$costs"/*costs*.json "$out/h200/" # beside the studies, as they name them
studies=()
known="latency_80ms capacity_slo pareto graph_buckets offline_bucket"
for part in $parts; do [[ $part == search || $part == confirm ]] || { echo "== no such part: $part; allowed are search and confirm"; exit 2; }; done
for name in ${ONLY:-$known}; do
  [[ " $known " == *" $name "* && -f ${STUDIES:-studies}/$name/study.yaml ]] || { echo "== left out: $name, no such study; allowed are $known"; continue; }
  mkdir -p "$out/$name"; cp "${STUDIES:-studies}/$name/study.yaml" "$out/$name/"
  missing=$(grep -o '\.\./h200/[a-z0-9_]*\.json' "$out/$name/study.yaml" | while read -r file; do [[ -f $out/$name/$file ]] || echo "$file"; done)
  if [[ $missing ]]; then echo "== left out: $name, no" $missing; else studies+=("$name"); fi
done
((${#studies[@]})) || exit 1
search() { # name...: all at once, since none of them measures time
  local name pids=() sets=(); for name in ${SET:-}; do sets+=(--set "$name"); done
  for name in "$@"; do
    timeout -k 5 "${SEARCH_S:-500}" python3 -m workbench.cli tune "$out/$name" ${TRIALS:+--trials "$TRIALS"} "${sets[@]}" \
      >"$out/$name/search.log" 2>&1 &
    pids+=($!)
  done
  wait "${pids[@]}"
  for name in "$@"; do echo "== search $name"; grep -v '^results:' "$out/$name/search.log" | tail -n 4; done
}
has search && search "${studies[@]}"
if has confirm; then
  begin=$SECONDS
  timeout -k 5 "$((REAL_S + ${LOAD_S:-120}))" python3 studies/h200/run_studies.py "$out" "${studies[@]}" >"$out/real.log" 2>&1
  echo "== real runs: exit $?, $((SECONDS - begin)) s"; grep -v '^ *$' "$out/real.log" | tail -n "${LINES_SHOWN:-60}"
fi
exit 0
