#!/bin/bash
# All that the compose cluster needs where Docker may be missing and no image can be pulled: an engine, stand-ins for the
# public images, and our own on top of them.   tools/deploy/prepare.sh DIR   then: . DIR/env
# As root, on Debian. PYTHON= and TORCH_WHEEL= as in the Makefile.
set -euo pipefail

mkdir -p "$1"
dir=$(cd "$1" && pwd)
here=$(cd "$(dirname "$0")" && pwd)

"$here/docker.sh" install "$dir"
"$here/docker.sh" start "$dir"
"$here/docker.sh" env "$dir" >"$dir/env"
echo "export SERVICE_IMAGE=prfaas:test ENGINE_IMAGE=prfaas-engine:test ETCD_IMAGE=prfaas-etcd PROMETHEUS_IMAGE=prfaas-prometheus" >>"$dir/env"
# shellcheck disable=SC1091
. "$dir/env"
"$here/images.sh" bases "$dir/images"
"$here/images.sh" wheelhouse
"$here/images.sh" build "$dir/images"
