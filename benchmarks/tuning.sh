#!/usr/bin/env bash
# How the embedded default's step size and λ were chosen: by the validation accuracy of seeds that
# are used for nothing else. benchmarks/results/tuning_RATE.json (ten minutes on one core).
set -euo pipefail
cd "$(dirname "$0")/.."
for rate in 0.1 0.2; do
    perfed compare digits-groups --set training.learning_rate=$rate --seeds 1000-1002 --json \
        --set evaluate_every=40 --out "runs/tuning-$rate" \
        -a local -a scaffold \
        -a perfed-ckt,clusters=3,weight=0.5 -a perfed-ckt,clusters=3,weight=1.0 \
        -a perfed-ckt,clusters=3,weight=2.0 > "benchmarks/results/tuning_$rate.json"
done
