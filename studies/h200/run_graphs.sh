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
# Each file of tests in a process of its own, since an illegal access ends a CUDA process; together, since none of them measures time.
all_tests() {
  local file status=0 pids=()
  for file in tests/gpu/test_*.py; do
    timeout -k 5 "${TESTS_S:-240}" python3 -m pytest "$file" -q -p no:cacheprovider --timeout=200 -rA --tb=short -W ignore >"$out/.${file##*/}.log" 2>&1 &
    pids+=($!)
  done
  for pid in "${pids[@]}"; do wait "$pid" || status=1; done
  for file in tests/gpu/test_*.py; do echo "=== $file"; sed "s#$PWD/##g; s#/[^ :]*/site-packages/##g" "$out/.${file##*/}.log"; rm "$out/.${file##*/}.log"; done
  return $status
}
if has tests; then
  begin=$SECONDS; all_tests >"$out/gpu_tests.log"; echo "== gpu_tests: exit $?, $((SECONDS - begin)) s"
  grep -E "^(FAILED|ERROR|SKIPPED|E  )|passed|failed" "$out/gpu_tests.log"; grep -c ^PASSED "$out/gpu_tests.log"
fi
has mixed && part graphed_mixed "${MIXED_S:-200}" python3 tests/gpu/mixed_steps.py --steps "${MIXED_STEPS:-10000}" --out "$out/graphed_mixed.json"
has sanitizer && part sanitizer "${SANITIZER_S:-120}" compute-sanitizer --tool memcheck --error-exitcode 9 --print-limit 5 \
  python3 tests/gpu/mixed_steps.py --steps "${SANITIZER_STEPS:-60}" --layers 1 --max-batch 4
has table && part graphed_table "${TABLE_S:-240}" python3 studies/h200/run_graphs.py "$out" "${MODEL:-nemotron-0.6b}"
exit 0
