#!/bin/bash
# Debian's prometheus and promtool, unpacked and not installed, for the tests of rules and dashboards.
#   tools/deploy/prometheus.sh DIR     both are in DIR/bin afterwards
set -euo pipefail

[ $# = 1 ] || { sed -n 2,3p "$0" >&2; exit 2; }
# shellcheck source=tools/deploy/debian.sh
. "$(dirname "$0")/debian.sh"
mkdir -p "$1/bin"
bin=$(cd "$1/bin" && pwd)
if [ -x "$bin/prometheus" ] && [ -x "$bin/promtool" ]; then exit 0; fi

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
cd "$scratch"
apt download prometheus
dpkg-deb -x prometheus_*.deb .
cp usr/bin/prometheus usr/bin/promtool "$bin/"
