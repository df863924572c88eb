#!/bin/bash
# load.sh [CALLS [SEED [TRANSPORT...]]]: a load of many clients, threads and servers at once, over tcp and over RDMA.
#
# The seed determines CALLS calls (1200) of three client processes with four threads each: calls of 0 to 16 MiB, with
# timeouts from 1 ms, on their own and on shared CLIENTs and AUTHs, one-way calls, calls back, to servers of which some are
# healthy, one is slow, one hangs, one hangs again and again, one dies and returns; over connections that are slow, and
# that are cut, half closed and stalled; with 1 to 4096 credits and Receives of several lengths. The same calls are made
# over stock tcp and then over each transport: rdma, moved (RPCRDMA_REDIRECT=tcp), two (Version Two), placed (with a
# binding). Calls that do not race must end as they did over tcp, with the contents that follow from the seed; calls that
# race must end in one of the possible ways; no call may end later than a second after its timeout; and descriptors and
# memory must come back, and all servers still serve.
#
# On a machine that is busy with other things the second is longer: a thread of each client that only sleeps tells by how
# much. TEST_PATIENCE=3 makes it three seconds from the start. LOAD_TABLE=yes prints a table for each transport,
# LOAD_VERBOSE=yes what the processes held; LOAD_KEEP=DIR keeps the clients' records. LOAD_LOG=LEVEL has every process log
# to that folder, and LOAD_GDB=yes shows where processes hang. c-tests/load.h tells more.
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# In a private network its connections can be slowed, and nothing else uses its ports.
if [ -z "${LOAD_IN_NS:-}" ] && bash "$here/ns.sh" --possible >/dev/null; then
    LOAD_IN_NS=1 NO_RPCBIND=1 exec bash "$here/ns.sh" bash "${BASH_SOURCE[0]}" "$@"
fi
. "$here/lib.sh"
PATH=$PATH:/usr/sbin:/sbin
calls=${1:-1200} seed=${2:-1}
shift $(($# > 2 ? 2 : $#))
[ $# -gt 0 ] || set -- rdma moved two placed
[ -r "$LIBRPCRDMA" ] || { FAIL "$LIBRPCRDMA is missing"; closing; }
make -s -C "$top/c-tests" OUT="$scratch/build" "$scratch/build/load" >"$scratch/log" 2>&1 ||
    { FAIL "the load compiles" "$scratch/log"; closing; }
load=$scratch/build/load
results=${LOAD_KEEP:-$scratch}

# Connections to one server are slow: the kernel slows them where it can, otherwise a proxy does.
slow_port=20100 slow=(-f $slow_port) slowed='by netem'
slow_down() {
    [ -n "${LOAD_IN_NS:-}" ] &&
        tc qdisc add dev lo root handle 1: prio bands 4 priomap 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 &&
        tc qdisc add dev lo parent 1:4 handle 40: netem delay 1ms 500us rate 400mbit limit 100000 &&
        tc filter add dev lo parent 1: protocol ip u32 match ip dport $slow_port 0xffff flowid 1:4 &&
        tc filter add dev lo parent 1: protocol ip u32 match ip sport $slow_port 0xffff flowid 1:4
}
slow_down >/dev/null 2>&1 || slow=() slowed='by a proxy: no netem here'

# over TRANSPORT: makes the calls over it.
over() {
    mkdir -p "$results/$1"
    "$load" run -m "$1" -d "$results/$1" -n "$calls" -s "$seed" -l "$LIBRPCRDMA" -b "$top/c-tests/load.conf" \
        "${slow[@]}" >"$scratch/took" 2>"$scratch/$1.log"
    local status=$?
    [ -z "${LOAD_VERBOSE:-}" ] || cat "$scratch/$1.log"
    took=$(cat "$scratch/took")
    return $status
}

if over tcp; then
    ok "$calls calls with seed $seed over tcp ($took s; slow connections are slowed $slowed)"
else
    FAIL "$calls calls over tcp: bash tests/load.sh $calls $seed" "$scratch/tcp.log"; closing
fi
"$load" compare ${LOAD_TABLE:+-v} "$results/tcp" 2>"$scratch/log" || FAIL "what came over tcp is as the seed says" "$scratch/log"
for transport; do
    what="$transport: $calls calls end as over tcp"
    over "$transport" || { FAIL "$what: bash tests/load.sh $calls $seed $transport" "$scratch/$transport.log"; continue; }
    if "$load" compare ${LOAD_TABLE:+-v} "$results/tcp" "$results/$transport" >"$scratch/table" 2>"$scratch/log"; then
        ok "$what, and none is late ($took s)"
    else
        cat "$scratch/log" >>"$scratch/$transport.log"
        FAIL "$what, and none is late: bash tests/load.sh $calls $seed $transport" "$scratch/$transport.log"
    fi
    # The table for tcp was printed before.
    [ -z "${LOAD_TABLE:-}" ] || sed -n "/^$transport:/,\$p" "$scratch/table"
done
closing
