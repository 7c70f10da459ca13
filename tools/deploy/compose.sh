#!/bin/bash
# The cluster of deploy/compose.
#   tools/deploy/compose.sh up DIR      build the images and start it; returns when all is healthy
#   tools/deploy/compose.sh demo DIR    ask it the demo's prompts and show the receipts
#   tools/deploy/compose.sh down DIR    stop it and forget what it kept
# Where prepare.sh has been run for DIR, its engine and images are used.
set -euo pipefail

prepared=$2/env
cd "$(dirname "$0")/../.."
build=(--build)
if [ -f "$prepared" ]; then
    # shellcheck disable=SC1090
    . "$prepared"
    build=(--no-build)
fi
if docker compose version >/dev/null 2>&1; then compose=(docker compose); else compose=(docker-compose); fi
compose+=(-f deploy/compose/docker-compose.yml)

case ${1:-} in
up) "${compose[@]}" up --detach "${build[@]}" --wait --wait-timeout 600 ;;
demo)
    terminal=()
    [ -t 1 ] || terminal=(-T)
    "${compose[@]}" exec "${terminal[@]}" router-1 prfaas demo --endpoint http://127.0.0.1:8000
    ;;
down) "${compose[@]}" down --volumes --timeout 45 ;;
*) sed -n 2,7p "$0" >&2; exit 2 ;;
esac
