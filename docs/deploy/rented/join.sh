#!/bin/sh
# A rented container with outgoing connections only joins a swarm through volunteers' relays, and joins again after each
# restart: name this script as the container's start command, with a volume at MOLINK_HOME.
#
#   MOLINK_INITIAL_PEERS   address of a living peer, from its line `Invite others:` (needed)
#   MOLINK_HOME            folder that outlives the container: program, identity, measurements, weights (/workspace/molink)
#   MOLINK_SOURCE          what pip is to install: a folder, or the URL of an archive (the folder that this script lies in)
#   MOLINK_RETRY_S         seconds before it begins again after a failure, twice as many after the next one (5)
#   MOLINK_MEMORY, MOLINK_NAME, ...  any other option of `molink-peer join`, as everywhere
set -eu

: "${MOLINK_INITIAL_PEERS:?give the address of a living peer, from its line \`Invite others:\`}"
home=${MOLINK_HOME:-/workspace/molink}
here=$(cd "$(dirname "$0")/../../.." && pwd)
source=${MOLINK_SOURCE:-$here}
export MOLINK_INITIAL_PEERS
export MOLINK_STATE_DIR="$home/state"
export MOLINK_STORE_DIR="$home/weights"

mkdir -p "$home"
if ! [ -x "$home/venv/bin/molink-peer" ]; then
    echo "Installing into $home/venv"
    # The image's own torch is the one that fits its GPU.
    python3 -m venv --system-site-packages "$home/venv"
    "$home/venv/bin/pip" install --quiet "$source"
fi

stopped=
peer=
# Once: sessions that run go on elsewhere. Again: at once. The shell must outlive the peer, whose volume goes with it.
stop() {
    stopped=yes
    [ -z "$peer" ] || kill -TERM "$peer" 2>/dev/null || true
}
trap stop INT TERM HUP

wait_s=${MOLINK_RETRY_S:-5}
while [ -z "$stopped" ]; do
    started=$(date +%s)
    "$home/venv/bin/molink-peer" join --relay on --offer-relay off --on-battery serve --wait 600 &
    peer=$!
    status=0
    wait "$peer" || status=$?
    while kill -0 "$peer" 2>/dev/null; do # a signal ends `wait`, not the peer
        status=0
        wait "$peer" || status=$?
    done
    [ -z "$stopped" ] || exit "$status"
    case $status in
    0) exit 0 ;; # it was told to leave
    2) exit 2 ;; # settings that are wrong stay so
    esac
    # What ended soon is begun again ever later, what ran for a while at once.
    if [ $(($(date +%s) - started)) -gt 300 ]; then wait_s=${MOLINK_RETRY_S:-5}; fi
    echo "The peer ended with status $status; again in $wait_s s" >&2
    sleep "$wait_s" &
    wait $! || true
    wait_s=$((wait_s < 300 ? wait_s * 2 : 300))
done
