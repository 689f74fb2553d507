#!/usr/bin/env bash
# Everything that the graphed and the resident step claim on a GPU, each part under a time limit, going on after a failure.
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
# Several processes, since an illegal access ends a CUDA process; together, since none of them measures time.
jobs=("test_decoder_beside_graphs.py" "test_graphed_equality.py:not large_gpu" "test_graphed_equality.py:large_gpu"
  "test_graphed_safety.py:not compile" "test_graphed_safety.py:compile" "test_graphed_two_gpus.py"
  "test_pipelines_gpu.py:rnnt and not 320ms" "test_pipelines_gpu.py:320ms" "test_pipelines_gpu.py:not rnnt"
  "test_resident_gpu.py:equals_nemo" "test_resident_gpu.py:crowd or bitwise" "test_resident_gpu.py:ten_thousand"
  "test_resident_load_gpu.py" "test_resident_int8_gpu.py")
all_tests() {
  local number file select status=0 pids=()
  for number in "${!jobs[@]}"; do
    IFS=: read -r file select <<<"${jobs[$number]}"
    timeout -k 5 "${TESTS_S:-240}" python3 -m pytest "tests/gpu/$file" ${select:+-k "$select"} -q -p no:cacheprovider --timeout=200 -rA \
      --tb=short -W ignore >"$out/.tests$number.log" 2>&1 &
    pids+=($!)
  done
  for pid in "${pids[@]}"; do wait "$pid" || status=1; done
  for number in "${!jobs[@]}"; do
    echo "=== ${jobs[$number]}"; sed "s#$PWD/##g; s#/[^ :]*/site-packages/##g" "$out/.tests$number.log"; rm "$out/.tests$number.log"
  done
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
