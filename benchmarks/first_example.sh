#!/usr/bin/env bash
# How the example of the README was chosen: by the validation accuracy of seeds that are used for
# nothing else. benchmarks/results/first_example_METHOD.json (four minutes on one core).
set -euo pipefail
cd "$(dirname "$0")/.."
mkdir -p runs
cat > runs/first-example.yaml << 'END'
rounds: 10
clients: 30
clients_per_round: 30
data: {name: digits, public: 400}
partition: {name: groups, groups: 3}
models: [mlp, {name: cnn, batchnorm: true}]
evaluate_every: 10
END
tune() {
    method=$1
    shift
    perfed tune runs/first-example.yaml -a "$method" --seeds 1000-1002 "$@" \
        --grid training.learning_rate=0.05,0.1,0.2,0.4 --out "runs/first-example-$method" > /dev/null
    cp "runs/first-example-$method/tune.json" "benchmarks/results/first_example_$method.json"
}
tune local
tune perfed-ckt --grid clients_per_round=10,30 --grid algorithm.weight=1,2,4
