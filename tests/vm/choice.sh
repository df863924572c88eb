#!/bin/bash
# choice.sh: which provider both ends choose, and what becomes of a connection when its device goes away, in a guest with
# an rxe device on dummy0 and, later, a siw device on dummy1. Run by `make check-vm`.
. "$(dirname "${BASH_SOURCE[0]}")/guest.sh"
run_in_guest "the choice of the provider" 300 "${BASH_SOURCE[0]}" verbs/rxe

other=192.168.78.1
log=$scratch/server.log
out=$scratch/out
mkdir -p /served
must mount -t tmpfs -o size=64m served /served
head -c 3000000 /dev/urandom >/served/file

# serve NAME=VALUE...: starts our server with these settings, on ports of its own. Its log is in $log.
serve() {
    : >"$log"
    free 20050; free 20051
    start_ready env "$@" LD_PRELOAD="$LIBRPCRDMA" RPCRDMA_LOG=info "$programs/nfs3d" -n "${netid:-rdma}" -d /served -a 0.0.0.0 -p 20050 -m 20051 ||
        { FAIL "our server starts" "$log"; closing; }
}
# fetch ADDRESS NAME=VALUE...: our client gets the file, and compares. Its log is in $out.
fetch() {
    local at=$1; shift
    rm -f "$scratch/got"
    env "$@" LD_PRELOAD="$LIBRPCRDMA" RPCRDMA_LOG=info timeout "$(patient 60)" "$programs/nfs3" -n "${netid:-rdma}" -p 20050 -m 20051 -e /served "$at" get file "$scratch/got" >"$out" 2>&1 &&
        cmp -s "$scratch/got" /served/file
}
# expect WHAT PATTERN ADDRESS NAME=VALUE...
expect() {
    local what=$1 pattern=$2; shift 2
    if fetch "$@" && { [ -z "$pattern" ] || grep -Eq "$pattern" "$out"; }; then ok "$what"; else FAIL "$what" "$out"; fi
}
# The adapter gets a quarter of a second, which is seldom enough on an emulated machine under load: one attempt must succeed.
expect_once() {
    local try
    for try in $(seq "$(patient 40)"); do
        if fetch "${@:3}" && grep -Eq "$2" "$out"; then ok "$1 (attempt $try)"; return; fi
    done
    FAIL "$1" "$out"
}
over_verbs='goes over rdma.*\(verbs device' over_iwarp='goes over rdma.*\(software iWARP' over_memory='goes over rdma.*\(shared memory'

# Without any device nothing is opened, and nothing is logged about that.
must ip link set lo up
serve RPCRDMA_PROVIDER=auto
expect "no device: shared memory" "$over_memory" 127.0.0.1 RPCRDMA_PROVIDER=auto
if grep -q adapter "$log"; then FAIL "no device: the server does not speak of adapters" "$log"; else ok "no device: the server does not speak of adapters"; fi
if fetch 127.0.0.1 RPCRDMA_PROVIDER=verbs; then FAIL "no device: verbs fails"; elif grep -q 'this machine has no RDMA device' "$out"; then ok "no device: verbs fails: $(tail -n 1 "$out")"; else FAIL "no device: verbs fails clearly" "$out"; fi
stop "$server"

device_up
unset RPCRDMA_PROVIDER
serve RPCRDMA_PROVIDER=auto
expect_once "rxe: auto takes verbs" "$over_verbs rxe0" $address RPCRDMA_PROVIDER=auto
expect "rxe: the same port serves software iWARP" "$over_iwarp" $address RPCRDMA_PROVIDER=iwarp
expect "rxe: auto, an address that no device leads to" "$over_memory" 127.0.0.1 RPCRDMA_PROVIDER=auto
grep -h 'not over verbs' "$out" | sed 's/^/      | /'
if RPCRDMA_MAX_REPLY=1M fetch $address; then ok "rxe: an ordinary user's settings are taken over verbs too"; else FAIL "rxe: with a setting" "$out"; fi
if (ulimit -l 64; exec setpriv --reuid 65534 --regid 65534 --clear-groups bash -c "$(declare -f fetch patient); scratch=/tmp out=/tmp/out programs=$programs LIBRPCRDMA=$LIBRPCRDMA; fetch $address RPCRDMA_PROVIDER=verbs; cat /tmp/out" 2>&1) | tee "$out" | grep -q 'half of RLIMIT_MEMLOCK is 32768'; then
    ok "rxe: no locked memory, a clear error: $(tail -n 1 "$out" | cut -c 1-250)"
else
    FAIL "rxe: no locked memory, a clear error" "$out"
fi
stop "$server"
serve RPCRDMA_PROVIDER=iwarp
expect "rxe: a server without verbs: auto goes on with software iWARP" "$over_iwarp" $address RPCRDMA_PROVIDER=auto
grep -h 'not over verbs' "$out" | sed 's/^/      | /'
stop "$server"
# What cannot be locked as a whole goes out in pieces.
: >"$log"
free 20050; free 20051
if start_ready bash -c "ulimit -l 256; exec setpriv --reuid 65534 --regid 65534 --clear-groups env RPCRDMA_PROVIDER=verbs LD_PRELOAD=$LIBRPCRDMA RPCRDMA_LOG=info $programs/nfs3d -n rdma -d /served -a 0.0.0.0 -p 20050 -m 20051"; then
    expect "rxe: a server with 256 KiB of locked memory sends megabytes" "$over_verbs" $address RPCRDMA_PROVIDER=verbs
    grep -h 'accepted' "$log" | tail -n 1 | cut -c 1-200 | sed 's/^/      | /'
    stop "$server"
else
    FAIL "rxe: a server with 256 KiB of locked memory starts" "$log"
fi
# A server and a client that know only tcp.
netid=tcp
serve RPCRDMA_PROVIDER=auto RPCRDMA_REDIRECT=tcp
if [ -n "$(rpcinfo 2>/dev/null)" ]; then skip "rxe: moved programs" "an rpcbind runs"; else
    expect "rxe: a moved client reaches a moved server" "goes over rdma" $address RPCRDMA_REDIRECT=tcp
    expect "rxe: a client of tcp is served on the same port" "" $address
fi
stop "$server"
netid=rdma

# The device goes away. rxe itself waits for every process that has it open; what used it must end at once all the same.
serve RPCRDMA_PROVIDER=verbs
(env RPCRDMA_PROVIDER=verbs LD_PRELOAD="$LIBRPCRDMA" RPCRDMA_LOG=info timeout "$(patient 60)" bash -c "while :; do $programs/nfs3 -n rdma -p 20050 -m 20051 -e /served $address get file $scratch/again || exit; done" >"$scratch/client.log" 2>&1) & client=$!
wait_for 20 grep -qs 'goes over rdma' "$scratch/client.log" || FAIL "rxe: a client works" "$scratch/client.log"
rdma link del rxe0 & del=$!
if timed wait $client; then :; fi
if [ "$micros" -lt "$(patient 15)000000" ]; then ok "rxe: the device goes, and a client ends ($(seconds)): $(tail -n 1 "$scratch/client.log" | cut -c 1-250)"; else FAIL "rxe: a client goes on without its device ($(seconds))" "$scratch/client.log"; fi
if wait_for 10 grep -Eq 'connection closed|closed: ' "$log"; then ok "rxe: the server has let its connections go: $(grep -E 'removed' "$log" | head -n 1)"; else FAIL "rxe: the server keeps its connections" "$log"; fi
stop "$server"
if timed wait $del; then ok "rxe: the device is gone when the server has ended ($(seconds))"; else FAIL "rxe: the device is not gone"; fi
must rdma link add rxe0 type rxe netdev dummy0
must wait_for 10 grep -qs ACTIVE /sys/class/infiniband/rxe0/ports/1/state

# An additional iWARP device: its ports are shared with TCP, so it is left to software iWARP.
must ip link add dummy1 type dummy
must ip link set dummy1 mtu 9000 up
must ip addr add $other/24 dev dummy1
must modprobe siw
must rdma link add siw0 type siw netdev dummy1
must wait_for 10 grep -qs ACTIVE /sys/class/infiniband/siw0/ports/1/state
serve RPCRDMA_PROVIDER=auto
expect_once "rxe and siw: auto takes verbs to the rxe device's address" "$over_verbs rxe0" $address RPCRDMA_PROVIDER=auto
expect "rxe and siw: auto shares memory at the siw device's address" "$over_memory" $other RPCRDMA_PROVIDER=auto
expect "siw by request, towards our software iWARP" "$over_verbs siw0" $other RPCRDMA_PROVIDER=verbs
stop "$server"
serve RPCRDMA_PROVIDER=verbs
expect "siw by request, at both ends" "$over_verbs siw0" $other RPCRDMA_PROVIDER=verbs
expect "software iWARP towards siw" "$over_iwarp" $other RPCRDMA_PROVIDER=iwarp
expect "rxe beside it" "$over_verbs rxe0" $address RPCRDMA_PROVIDER=verbs
stop "$server"
closing
