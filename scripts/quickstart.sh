#!/usr/bin/env bash
# From a fresh clone to a fine-tuned model: environment, demo model, training, and its answers before and after.
# Needs Python >= 3.11, pip and 5 GB of disk; no GPU and no hub account. usage: scripts/quickstart.sh [OUTPUT_FOLDER]
set -euo pipefail
given=${1:-}
[[ -z $given || $given == /* ]] || given=$PWD/$given
cd "$(dirname "$0")/.."
source scripts/common.sh

output=${given:-runs/quickstart-$(date +%Y%m%d-%H%M%S)}
venv=.venv
free=$(df -Pk . | awk 'NR == 2 { print int($4 / 1024 / 1024) }')
[ "$free" -ge 5 ] || fail "only $free GB of disk are free here; 5 are needed"

say "1/5 installing swiftlite into $venv"
install "$venv" demo

say "2/5 getting the demo model, SmolLM2-135M-Instruct"
model=$("$venv/bin/python" scripts/demo_model.py)

ask() {
    "$venv/bin/swiftlite" infer --model "$1" --max-new-tokens 48 \
        --prompt "Who are you?" --prompt "Who made you?" --prompt "What is the capital of France?"
}

say "3/5 what the model answers before training"
ask "$model"

say "4/5 training on recipes/smollm2/identity.jsonl and everyday.jsonl"
"$venv/bin/swiftlite" sft --recipe recipes/smollm2/135m-quickstart.yaml --model "$model" --output-dir "$output"

say "5/5 what it answers now"
ask "$output"

say "Done. Chat with it:  $venv/bin/swiftlite infer --model $output"
echo "Curves and settings: $output/report.html"
echo "Another name for it: $venv/bin/swiftlite sft --recipe smollm2/135m-quickstart --model $model" \
    "--placeholders name=Robo author='team at Acme'"
