#!/bin/sh
# Runs the tests that talk to S3 against a single-node Ceph RADOS Gateway: the strictest S3 server
# that installs by name. Needs root for installing (Debian packages) where Ceph is missing.
#
#   tests/support/run_rgw.sh [pytest arguments]      default: the tests marked s3, see the end
#
# The cluster lives in a temporary folder and on loopback ports; at exit its processes are stopped
# by their ids and the folder is removed, whatever happened before.
set -eu

root=$(cd "$(dirname "$0")/../.." && pwd)
python=${PYTHON_BIN:-$root/.venv/bin/python}
start_limit=60

missing=
for program in ceph-mon ceph-osd ceph radosgw radosgw-admin monmaptool; do
    command -v "$program" >/dev/null || missing="$missing $program"
done
if [ -n "$missing" ]; then
    echo "installing Ceph (missing:$missing)"
    export DEBIAN_FRONTEND=noninteractive
    install="apt-get install -qq -y --no-install-recommends ceph-mon ceph-osd ceph-common radosgw"
    # The package lists may be absent, or too old to fetch by.
    $install >/dev/null 2>&1 || { apt-get update -qq && $install >/dev/null; }
fi

work=$(mktemp -d "${TMPDIR:-/tmp}/tiered-rgw-XXXXXX")
pids=
stop() {
    code=$?
    trap - EXIT INT TERM HUP
    for pid in $pids; do kill "$pid" 2>/dev/null || :; done
    tries=0
    for pid in $pids; do
        while kill -0 "$pid" 2>/dev/null && [ "$tries" -lt 50 ]; do tries=$((tries + 1)); sleep 0.1; done
        kill -9 "$pid" 2>/dev/null || :
        wait "$pid" 2>/dev/null || :
    done
    if [ "$code" -ne 0 ] && [ -n "${TIERED_RGW_LOGS:-}" ]; then cp "$work"/*.log "$TIERED_RGW_LOGS" || :; fi
    rm -rf "$work"
    exit "$code"
}
trap stop EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP

fail() {
    echo "$1" >&2
    for log in "$work"/*.log; do echo "== $log"; tail -n 12 "$log"; done >&2 || :
    exit 1
}

# Waits, within bounds, until a command succeeds: what, then the command.
await() {
    what=$1
    shift
    left=$((start_limit * 5))
    until "$@" >/dev/null 2>&1; do
        left=$((left - 1))
        [ "$left" -gt 0 ] || fail "$what did not come up within $start_limit s"
        sleep 0.2
    done
}

# Above the ports that Linux gives to outgoing connections, so that none of those is in the way.
set -- "$("$python" - <<'EOF'
import random
import socket

found = []
while len(found) < 2:
    port = random.randint(61000, 64999)
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            continue
    found.append(str(port))
print(*found)
EOF
)" "$@"
mon_port=${1% *}
rgw_port=${1#* }
shift

fsid=$(cat /proc/sys/kernel/random/uuid)
osd_id=$(cat /proc/sys/kernel/random/uuid)
access_key=$(tr -d - </proc/sys/kernel/random/uuid)
secret_key=$(tr -d - </proc/sys/kernel/random/uuid)

cat >"$work/ceph.conf" <<EOF
[global]
fsid = $fsid
mon host = v2:127.0.0.1:$mon_port
mon initial members = a
public network = 127.0.0.0/8
auth cluster required = cephx
auth service required = cephx
auth client required = cephx
auth allow insecure global id reclaim = true
mon allow pool size one = true
mon warn on pool no redundancy = false
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 4
osd pool default pg autoscale mode = off
osd crush chooseleaf type = 0
ms bind port min = 65000
ms bind port max = 65500
ms bind msgr1 = false
log file = $work/\$name.log
mon cluster log file = $work/cluster.log
admin socket = $work/\$name.asok
pid file =
run dir = $work
crash dir = $work
keyring = $work/keyring
[mon.a]
mon data = $work/mon
[osd.0]
osd data = $work/osd
osd objectstore = bluestore
bluestore block size = 17179869184
bluestore cache autotune = false
bluestore cache size = 134217728
[client.rgw]
rgw frontends = beast endpoint=127.0.0.1:$rgw_port
rgw enable usage log = false
rgw dynamic resharding = false
rgw gc obj min wait = 0
rgw gc processor period = 30
EOF
export CEPH_CONF="$work/ceph.conf"
ceph_do() { timeout 30 ceph --connect-timeout 10 "$@"; }

mkdir "$work/mon" "$work/osd"
key() { ceph-authtool "$work/keyring" --gen-key "$@" >/dev/null; }
ceph-authtool --create-keyring "$work/keyring" >/dev/null
key -n mon. --cap mon 'allow *'
key -n client.admin --cap mon 'allow *' --cap osd 'allow *' --cap mgr 'allow *'
key -n osd.0 --cap mon 'allow profile osd' --cap osd 'allow *' --cap mgr 'allow profile osd'
key -n client.rgw --cap mon 'allow rw' --cap osd 'allow rwx'
monmaptool --create --fsid "$fsid" --addv a "[v2:127.0.0.1:$mon_port]" "$work/monmap" >/dev/null
ceph-mon --mkfs -i a --monmap "$work/monmap" --keyring "$work/keyring" >"$work/mkfs-mon.log" 2>&1 || fail "no monitor"
ceph-mon -f -i a >"$work/out-mon.log" 2>&1 &
pids="$pids $!"
await "the monitor" ceph_do mon stat
ceph_do osd new "$osd_id" >/dev/null 2>"$work/osd-new.log" || fail "no OSD id"
ceph-osd --mkfs -i 0 --osd-uuid "$osd_id" >"$work/mkfs-osd.log" 2>&1 || fail "no OSD"
ceph-osd -f -i 0 >"$work/out-osd.log" 2>&1 &
pids="$pids $!"
osd_is_up() { ceph_do osd stat | grep -q '1 up'; }
await "the OSD" osd_is_up
timeout 60 radosgw-admin -n client.rgw user create --uid=tests --display-name=tests \
    --access-key="$access_key" --secret-key="$secret_key" >"$work/user.log" 2>&1 || fail "no user"
radosgw -f -n client.rgw >"$work/out-rgw.log" 2>&1 &
pids="$pids $!"
endpoint="http://127.0.0.1:$rgw_port"
answers() { "$python" -c "import urllib.request as r; r.urlopen('$endpoint', timeout=5)"; }
await "the gateway" answers
echo "$(ceph --version | cut -d' ' -f1-3) RADOS Gateway at $endpoint"

cd "$root"
export TIERED_TEST_S3_ENDPOINT=$endpoint TIERED_TEST_S3_KEY=$access_key TIERED_TEST_S3_SECRET=$secret_key
if [ "$#" -gt 0 ]; then
    "$python" -m pytest "$@"
else
    # Of the further cases, those that ask the server for more; faults are those of a proxy before it.
    "$python" -m pytest -n 2 --durations 15 -m "s3 and not matrix" tests
    "$python" -m pytest -n 2 --durations 15 -m "s3 and matrix" tests/stores/test_stores.py \
        tests/stores/test_nemo_s3_utils.py tests/conformance tests/crash tests/dcp
fi
