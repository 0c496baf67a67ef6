#!/usr/bin/env bash
# The documentation of every minor release beside that of this commit: ci/docs_versions.sh OUT. Of each minor release the
# newest tag v1.2.3 is built, from its own sources, as OUT/1.2/; this commit as OUT/dev/. OUT's first page leads to the
# newest release, or to dev where there is none. Needs all tags, and mike; nothing is pushed.
set -euo pipefail
cd "$(dirname "$0")/.."
out=$(realpath -m "$1")
here=$(git rev-parse HEAD)
tree=$(mktemp -d)
trap 'git worktree remove --force "$tree"' EXIT
export GIT_COMMITTER_NAME=docs GIT_COMMITTER_EMAIL=docs@localhost
git worktree add --quiet --detach "$tree" "$here"
git update-ref -d refs/heads/docs-versions

deploy() { # a commit, and the name of its version
    git -C "$tree" checkout --quiet --detach "$1"
    (cd "$tree" && mike deploy --branch docs-versions "$2")
}

newest=dev
# The last patch of each minor release, in the order of versions.
while read -r minor tag; do
    deploy "$tag" "$minor"
    newest=$minor
done < <(git tag --list 'v[0-9]*' --sort version:refname | sed -nE 's/^v([0-9]+\.[0-9]+)\.[0-9]+$/\1 &/p' |
    awk '{ if (!($1 in last)) order[++n] = $1; last[$1] = $2 } END { for (i = 1; i <= n; i++) print order[i], last[order[i]] }')
deploy "$here" dev
(cd "$tree" && mike set-default --branch docs-versions "$newest")
mkdir -p "$out"
git archive docs-versions | tar -x -C "$out"
