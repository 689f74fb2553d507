#!/usr/bin/env bash
# Copies what `run_studies.sh OUT COSTS` left into the folders of the studies: results, report, best configuration, trials and real runs, no databases.
# Usage, in the repository root:  bash studies/h200/collect_studies.sh OUT
set -euo pipefail
for folder in "$1"/*/; do
  name=$(basename "$folder")
  [[ -f studies/$name/study.yaml && -f $folder/results.json ]] || { echo "left out: $name"; continue; }
  for file in results.json report.html best.yaml trials.csv live.json; do
    if [[ -f $folder/$file ]]; then cp "$folder/$file" "studies/$name/"; else rm -f "studies/$name/$file"; fi
  done
  echo "studies/$name: $(python3 -c 'import json, sys; print(json.load(open(sys.argv[1]))["headline"])' "$folder/results.json")"
done
