#!/usr/bin/env bash
# The five studies on one GPU host: searched on the digital twin with cost records that were measured before, their finalists then run for real in one
# process on one loaded model. Each part has a time limit, and the next begins whatever became of it.
# Usage, in the repository root with the project importable:  bash studies/h200/run_studies.sh OUT COSTS [search confirm]
#   COSTS  folder with stage_costs.json, stage_costs_1120ms.json and offline_costs.json, and no other cost records. The parts costs, costs_high,
#          traffic, traffic_high and offline_costs of run_measure.sh measure them; without offline_costs.json the offline study is left out
# The part search needs no GPU: run it elsewhere first, with the same OUT, and here only what is left is done.
# REAL_S: seconds of all real runs together; LOAD_S: those of loading the model and writing the files. STUDIES (a folder of smaller ones), SECONDS_RUN,
# ROUNDS, TRIALS, MOST_STREAMS and SET ("key=value ...", for the search) make it small for a try.
set -uo pipefail
out=$1 costs=$2; shift 2; parts=${*:-search confirm}
studies=(latency_80ms capacity_slo pareto graph_buckets)
export PYTHONUNBUFFERED=1 PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} KINETO_LOG_LEVEL=99 OMP_NUM_THREADS=${OMP_NUM_THREADS:-2}
export REAL_S=${REAL_S:-200}
[[ -f $costs/offline_costs.json ]] && studies+=(offline_bucket)
has() { [[ " $parts " == *" $1 "* ]]; }
for name in "${studies[@]}"; do mkdir -p "$out/$name"; cp "${STUDIES:-studies}/$name/study.yaml" "$out/$name/"; done
search() { # name...: all at once, since none of them measures time
  local name pids=() sets=(); for name in ${SET:-}; do sets+=(--set "$name"); done
  for name in "$@"; do
    timeout -k 5 "${SEARCH_S:-500}" python3 -m workbench.cli tune "$out/$name" --costs "$costs" ${TRIALS:+--trials "$TRIALS"} "${sets[@]}" \
      >"$out/$name/search.log" 2>&1 &
    pids+=($!)
  done
  wait "${pids[@]}"
  for name in "$@"; do echo "== search $name"; grep -v '^results:' "$out/$name/search.log" | tail -n 4; done
}
has search && search "${studies[@]}"
if has confirm; then
  begin=$SECONDS
  timeout -k 5 "$((REAL_S + ${LOAD_S:-120}))" python3 studies/h200/run_studies.py "$out" "$costs" >"$out/real.log" 2>&1
  echo "== real runs: exit $?, $((SECONDS - begin)) s"; grep -v '^ *$' "$out/real.log" | tail -n "${LINES_SHOWN:-60}"
fi
exit 0
