#!/usr/bin/env bash
# Prints `--changed-since COMMIT`, the merge base with the upstream branch, where anything differs from it.
set -uo pipefail
for upstream in '@{upstream}' origin/main; do
    base=$(git merge-base HEAD "$upstream" 2>/dev/null) && break
done
[ -n "${base:-}" ] || exit 0
if [ "$base" != "$(git rev-parse HEAD)" ] || [ -n "$(git status --porcelain)" ]; then
    echo "--changed-since $base"
fi
