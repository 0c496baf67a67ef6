#!/bin/bash
# bash docs/examples/elastic.sh out/elastic [steps]: three ranks on this machine, with an agent of torchrun for each
#
# An agent ends all of its ranks when one of them dies, so ranks that shall live on have another agent; on
# several machines one agent a machine is usual. Without --max-restarts nobody starts the others anew.
set -uo pipefail
PORT=${PORT:-29500}
for node in 0 1 2; do
    torchrun --nnodes 3 --node-rank "$node" --master-addr 127.0.0.1 --master-port "$PORT" --nproc-per-node 1 \
        docs/examples/elastic.py "$@" &
done
wait
