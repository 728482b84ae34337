#!/usr/bin/env bash
# Two machines in one: a network namespace each, joined by a pair of virtual interfaces, and a torchrun in each.
# Needs root and iproute2. usage: scripts/two_nodes.sh PYTHON MODEL_FOLDER DATASET OUTPUT_FOLDER [flags of swiftlite sft]
set -euo pipefail
[ $# -ge 4 ] || { sed -n '2,3s/^# //p' "$0" >&2; exit 2; }
python=$1 model=$2 dataset=$3 output=$4
shift 4

first="swiftlite-a-$$" second="swiftlite-b-$$"
clean_up() {
    ip netns pids "$first" 2>/dev/null | xargs -r kill 2>/dev/null || true
    ip netns pids "$second" 2>/dev/null | xargs -r kill 2>/dev/null || true
    ip netns delete "$first" 2>/dev/null || true
    ip netns delete "$second" 2>/dev/null || true
}
trap clean_up EXIT
ip netns add "$first"
ip netns add "$second"
ip link add va netns "$first" type veth peer name vb netns "$second"
ip -n "$first" address add 10.77.0.1/24 dev va
ip -n "$second" address add 10.77.0.2/24 dev vb
for space in "$first va" "$second vb"; do
    read -r name device <<<"$space"
    ip -n "$name" link set lo up
    ip -n "$name" link set "$device" up
done

start() { # NAMESPACE INTERFACE NUMBER
    GLOO_SOCKET_IFNAME=$2 ip netns exec "$1" "$python" -m torch.distributed.run \
        --nnodes 2 --node-rank "$3" --nproc-per-node 2 --master-addr 10.77.0.1 --master-port 29511 \
        -m swiftlite sft --model "$model" --dataset "$dataset" --output-dir "$output" "${flags[@]}"
}
flags=("$@")
start "$second" vb 1 &
other=$!
start "$first" va 0
wait "$other"
