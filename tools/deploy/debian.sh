# shellcheck shell=bash
# Packages of Debian, for the scripts beside this one, which source it.

quiet_apt() { apt-get -o DPkg::Lock::Timeout=300 -o APT::Sandbox::User=root -qq "$@" >/dev/null; }

# apt COMMAND... : once more with new lists where it fails, for they may be missing, or older than what there is.
apt() { quiet_apt "$@" || { quiet_apt update && quiet_apt "$@"; }; }
