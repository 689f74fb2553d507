#!/usr/bin/env bash
# Everything that the graphed encoder step claims on a GPU, each part under a time limit, going on after a failure.
# Usage, in the repository root with the project importable:  bash studies/h200/run_graphs.sh OUT [tests mixed sanitizer table]
# Writes logs and records to OUT. With two GPUs the two-GPU tests run as well.
set -uo pipefail
out=$1; shift; parts=${*:-tests mixed sanitizer table}
export PYTHONUNBUFFERED=1 PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} KINETO_LOG_LEVEL=99
mkdir -p "$out"
has() { [[ " $parts " == *" $1 "* ]]; }
part() { # name limit_s command...
  local name=$1 limit=$2 begin=$SECONDS; shift 2
  timeout -k 5 "$limit" "$@" >"$out/$name.log" 2>&1
  echo "== $name: exit $?, $((SECONDS - begin)) s"; tail -n "${LINES_SHOWN:-15}" "$out/$name.log"
}
has tests && part gpu_tests "${TESTS_S:-240}" python3 -m pytest tests/gpu -q -p no:cacheprovider --timeout=150 -rA -W ignore::DeprecationWarning ${SELECT:+-k "$SELECT"}
has mixed && part graphed_mixed "${MIXED_S:-200}" python3 tests/gpu/mixed_steps.py --steps "${MIXED_STEPS:-10000}" --out "$out/graphed_mixed.json"
has sanitizer && part sanitizer "${SANITIZER_S:-120}" compute-sanitizer --tool memcheck --error-exitcode 9 --print-limit 5 \
  python3 tests/gpu/mixed_steps.py --steps "${SANITIZER_STEPS:-60}" --layers 1 --max-batch 4
has table && part graphed_table "${TABLE_S:-240}" python3 studies/h200/run_graphs.py "$out" "${MODEL:-nemotron-0.6b}"
rm -rf "$out/traces"
exit 0
