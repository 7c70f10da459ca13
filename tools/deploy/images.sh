#!/bin/bash
# Images for the deployment tests where none can be pulled, all from Debian packages.
#   tools/deploy/images.sh bases DIR         prfaas-base (python3), prfaas-build-base (with pip), prfaas-etcd, prfaas-prometheus
#   tools/deploy/images.sh wheelhouse        fills deploy/docker/wheelhouse with pip download of all that is pinned
#   tools/deploy/images.sh build DIR         prfaas:test and prfaas-engine:test on those bases
# DIR keeps root file systems and the log of the last build. Needs docker, mmdebstrap, and python3.11 for the wheelhouse (PYTHON=).
set -euo pipefail

cd "$(dirname "$0")/../.."
# shellcheck source=tools/deploy/debian.sh
. tools/deploy/debian.sh
wheels=deploy/docker/wheelhouse
export DOCKER_BUILDKIT=1

# rootfs FILE.tar PACKAGE,...
rootfs() {
    [ -s "$1" ] && return
    mmdebstrap --quiet --variant=minbase --aptopt='Acquire::Languages "none"' \
        --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-exclude=/usr/share/man/*' \
        --dpkgopt='path-exclude=/usr/share/locale/*' --include="$2" \
        --customize-hook='rm -rf "$1"/var/lib/apt/lists/* "$1"/var/cache/apt/*' bookworm "${1%.tar}.partial.tar"
    mv "${1%.tar}.partial.tar" "$1"
}

# stand_in IMAGE PACKAGE... : the packages' files on the base, under the paths of the public image
stand_in() {
    local image=$1 scratch
    shift
    scratch=$(mktemp -d)
    chmod 755 "$scratch"
    mkdir "$scratch/debs" "$scratch/files"
    (cd "$scratch/debs" && apt download "$@")
    for package in "$scratch"/debs/*.deb; do dpkg-deb -x "$package" "$scratch/files"; done
    cat >"$scratch/Dockerfile"
    docker build --quiet -t "$image" "$scratch" >/dev/null 2>"$scratch/log" || { tail -30 "$scratch/log" >&2; return 1; }
    rm -rf "$scratch"
}

bases() {
    mkdir -p "$1"
    rootfs "$1/base.tar" ca-certificates,python3
    rootfs "$1/build-base.tar" ca-certificates,python3,python3-pip,python3-venv
    docker image inspect prfaas-base >/dev/null 2>&1 || docker import "$1/base.tar" prfaas-base >/dev/null
    docker image inspect prfaas-build-base >/dev/null 2>&1 || docker import "$1/build-base.tar" prfaas-build-base >/dev/null
    docker image inspect prfaas-etcd >/dev/null 2>&1 || stand_in prfaas-etcd etcd-server etcd-client <<'EOF'
FROM prfaas-base
COPY files/usr/bin/ /usr/local/bin/
ENV PATH=/usr/local/bin:/usr/bin:/bin
CMD ["/usr/local/bin/etcd"]
EOF
    docker image inspect prfaas-prometheus >/dev/null 2>&1 || stand_in prfaas-prometheus prometheus <<'EOF'
FROM prfaas-base
COPY files/usr/bin/ /bin/
COPY files/usr/share/prometheus/ /usr/share/prometheus/
RUN mkdir -p /prometheus && chown 65534:65534 /prometheus
ENV PATH=/usr/local/bin:/usr/bin:/bin
USER 65534:65534
WORKDIR /prometheus
ENTRYPOINT ["/bin/prometheus"]
EOF
}

# What pip chooses here, also a local build of torch that a container would not see.
wheelhouse() {
    local python=${PYTHON:-python3.11} stamp=$wheels/.complete
    if [ "$stamp" -nt constraints.txt ] && [ "$stamp" -nt pyproject.toml ]; then return; fi
    "$python" -c 'import tomllib
project = tomllib.load(open("pyproject.toml", "rb"))["project"]
print("\n".join(project["dependencies"] + project["optional-dependencies"]["engine"] + ["setuptools>=77", "wheel"]))' \
        >"$wheels/wanted.txt"
    "$python" -m pip download --quiet --only-binary :all: -c constraints.txt -d "$wheels" -r "$wheels/wanted.txt" \
        ${TORCH_WHEEL:+"$TORCH_WHEEL"}
    touch "$stamp"
}

build() {
    for target in service:prfaas:test engine:prfaas-engine:test; do
        docker build --progress plain -f deploy/docker/Dockerfile --target "${target%%:*}" -t "${target#*:}" \
            --build-arg BUILD_BASE=prfaas-build-base --build-arg BASE=prfaas-base . >"$1/build.log" 2>&1 ||
            { tail -30 "$1/build.log" >&2; return 1; }
    done
}

case ${1:-} in
bases) bases "$2" ;;
wheelhouse) wheelhouse ;;
build) build "$2" ;;
*) sed -n 2,7p "$0" >&2; exit 2 ;;
esac
