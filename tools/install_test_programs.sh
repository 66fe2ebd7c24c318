#!/bin/sh
# Installs the programs that some tests talk to: a browser, Prometheus's promtool, Redis. Where they cannot be had, those
# tests skip and say so. Nothing of the product needs them.
set -u
missing=""
command -v chromium >/dev/null || missing="$missing chromium"
command -v promtool >/dev/null || missing="$missing prometheus"
command -v redis-server >/dev/null || missing="$missing redis-server"
[ -n "$missing" ] || exit 0
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    echo "not installed, so their tests skip:$missing (Debian has packages of these names)"
    exit 0
fi
echo "installing for tests:$missing"
# Debian's scripts start no service where policy-rc.d exists; where it does not, they are asked not to.
export DEBIAN_FRONTEND=noninteractive RUNLEVEL=1
apt-get update -qq >/dev/null 2>&1
# shellcheck disable=SC2086
apt-get install -y -qq --no-install-recommends $missing >/dev/null 2>&1 || echo "could not install:$missing"
exit 0
