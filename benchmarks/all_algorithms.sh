#!/usr/bin/env bash
# Every algorithm on the embedded default, three seeds: benchmarks/results/all_algorithms.json
# (about seven minutes on one core; 'python benchmarks/render.py' then puts it into the docs).
set -euo pipefail
cd "$(dirname "$0")/.."
perfed compare digits-groups --seeds 0-2 --json --out runs/all-algorithms \
    -a majority -a local \
    -a fedavg -a fedavg-ft -a fedprox -a scaffold -a feddf \
    -a per-fedavg -a ditto -a fedfomo -a hypcluster,clusters=3 \
    -a perfed-ckt,clusters=1,weight=1.0 -a perfed-ckt,clusters=2,weight=1.0 \
    -a perfed-ckt,clusters=3,weight=1.0 -a perfed-ckt,clusters=4,weight=1.0 \
    -a perfed-evidence -a perfed-kin \
    > benchmarks/results/all_algorithms.json
