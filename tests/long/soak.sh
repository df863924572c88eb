#!/bin/bash
# soak.sh [MINUTES [DEVICE [SEED]]]: `make soak MINUTES=n DEVICE=iwarp|local`; without DEVICE over both.
#
# Eight honest clients of mixed shapes with checked contents, and three servers with four service threads, all of them
# processes of their own, among faults (c-tests/soak.h): proxies before each server cut, delay, throttle, half-close and
# alter half of the connections; one server is killed every 20 seconds, one has hardly any descriptors and memory; a client is
# killed again and again, and where memory is shared it rewrites that; hostile clients run beside them
# (tests/bad_peers/soak.rs).
#
# Prints the calls so far every five minutes; then calls, outcomes, the longest call, and what servers and clients hold at rest,
# at the beginning and the end. No call may be wrong, lost or doubled, or end later than a second after its timeout, not counting
# the time that its thread waits for a processor; no call may fail unless a fault affects it; no process may crash or grow.
#
# SOAK_SECONDS is another length. SOAK_KEEP=DIR keeps the processes' records, SOAK_LOG=LEVEL is what the library logs there,
# SOAK_VERBOSE=yes prints the memory over time, LOAD_GDB=yes shows where processes hang, SOAK_SLOW=MS where they are when a call
# takes that long though no fault affects it.
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
if [ $# -lt 2 ]; then
    status=0
    for device in iwarp local; do bash "${BASH_SOURCE[0]}" "${1:-1}" $device || status=1; done
    exit $status
fi
# In a private network nobody else uses its ports.
if [ -z "${SOAK_IN_NS:-}" ] && bash "$here/../ns.sh" --possible >/dev/null; then
    SOAK_IN_NS=1 NO_RPCBIND=1 exec bash "$here/../ns.sh" bash "${BASH_SOURCE[0]}" "$@"
fi
. "$here/../lib.sh"
minutes=$1 device=$2 seed=${3:-$(date +%Y%m%d)}
seconds=${SOAK_SECONDS:-$((minutes * 60))}
[ -r "$LIBRPCRDMA" ] || { FAIL "$LIBRPCRDMA is missing"; closing; }
# SOAK_LOAD and SOAK_BAD_PEERS: the programs, if they have been compiled already.
load=${SOAK_LOAD:-$scratch/build/load}
[ -n "${SOAK_LOAD:-}" ] || make -s -C "$top/c-tests" OUT="$scratch/build" "$load" >"$scratch/log" 2>&1 ||
    { FAIL "the soak compiles" "$scratch/log"; closing; }
# The hostile clients; SOAK_HOSTILE=no leaves them out.
hostile=()
if [ "${SOAK_HOSTILE:-}" != no ]; then
    program=${SOAK_BAD_PEERS:-}
    if [ -z "$program" ]; then
        (cd "$top" && "${CARGO:-cargo}" test --locked $(bash tests/packages.sh features) --test bad_peers --no-run) >"$scratch/log" 2>&1 ||
            { FAIL "the hostile clients are built" "$scratch/log"; closing; }
        program=$(cd "$top" && realpath "$(sed -n 's/.*Executable.*(\(.*\))$/\1/p' "$scratch/log")")
    fi
    hostile=(-H "$program")
fi
# Linux's siw (6.1.192, 7.3.4) corrupts its list of listeners when a listening process is killed while others connect
# (siw_destroy_listen), and that crashes the kernel.
[ "$device" != siw ] || hostile+=(-k 0)
results=${SOAK_KEEP:-$scratch/soak}
mkdir -p "$results"
echo "      soak: $seconds seconds over $device, seed $seed"

"$load" soak -D "$device" -t "$seconds" -s "$seed" -d "$results" -l "$LIBRPCRDMA" -b "$top/c-tests/load.conf" \
    "${hostile[@]}" 2>"$results/soak.log" | while IFS= read -r line; do
        # Printed at once; over siw everything is, since the kernel may not survive the end of the servers.
        case $line in
        so\ far*) echo "      $line" ;;
        *) echo "$line" >>"$scratch/out"; [ "$device" != siw ] || echo "      $line" ;;
        esac
    done
status=${PIPESTATUS[0]}
# Calls that were refused among faults fill the library's log: complaints come after them, where they are noticed.
grep -h ' error: ' "$results"/*.log >"$scratch/said"
grep -hv ' error: ' "$results"/*.log >>"$scratch/said"
grep -v '^hostile: [0-9]* [a-z]' "$scratch/said" >"$scratch/told"
told=$scratch/told
while IFS= read -r line; do
    case $line in
    ok*) ok "$device: ${line#ok    }" ;;
    FAIL*) FAIL "$device: ${line#FAIL  }" "$told"; told= ;;
    *) echo "$line" ;;
    esac
done <"$scratch/out"
awk '/^hostile: [0-9]+ [a-z]/ { count = $2; $1 = $2 = ""; sum[$0] += count }
    END { for (kind in sum) text = text (text ? "," : "") " " sum[kind] kind
        if (text) print "      conversations with hostile clients:" text }' "$scratch/said"
[ "$status" -le 1 ] || FAIL "$device: the soak comes to its end (status $status)" "$scratch/said"
if grep -q 'defect in librpcrdma\|panicked' "$scratch/said"; then FAIL "$device: no defect is told" "$scratch/said"; fi
closing
