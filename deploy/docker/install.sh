#!/bin/sh
# Installs one layer of the images into /opt/prfaas: install.sh dependencies|prfaas|engine
# With wheels in /wheels only those are used; else what pip finds.
set -eu

source="--find-links /wheels"
if ls /wheels/*.whl >/dev/null 2>&1; then source="$source --no-index"; fi

# A section of pyproject.toml, one requirement a line.
requirements() {
    python3 - "$1" <<'EOF'
import sys, tomllib

with open("pyproject.toml", "rb") as file:
    project = tomllib.load(file)["project"]
print("\n".join(project["dependencies"] if sys.argv[1] == "core" else project["optional-dependencies"][sys.argv[1]]))
EOF
}

# shellcheck disable=SC2086  # options, one word each
install() { python3 -m pip --python /opt/prfaas/bin/python install --quiet -c constraints.txt $source "$@"; }

case "$1" in
dependencies) requirements core >/tmp/core.txt && install -r /tmp/core.txt ;;
engine) requirements engine >/tmp/engine.txt && install -r /tmp/engine.txt ;;
prfaas) install --no-deps . ;;
esac
# Tests that packages bring along are run by nobody here.
find /opt/prfaas/lib -path '*/site-packages/numpy/*' -name tests -type d -prune -exec rm -rf {} +
