#!/bin/bash
# netid.sh: the netids "rdma" and "rdma6" at libtirpc's boundary, with a stock rpcbind and unmodified programs: entries
# and addresses, registration, look-up, rpcinfo, NETPATH, a wrong setting, RPCRDMA_REDIRECT; nothing changes for
# programs that do not ask for it. Needs root for a private network.
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
if [ -z "${NETID_IN_NS:-}" ]; then
    why=$(bash "$here/ns.sh" --possible) || { echo "skip  netid.sh ($why)"; exit 0; }
    NETID_IN_NS=1 exec bash "$here/ns.sh" bash "${BASH_SOURCE[0]}"
fi
. "$here/lib.sh"
# This name is the tests', not the library's, which refuses settings that it does not know.
cd "$scratch" || exit 1
program=536870997    # 0x20000055

# check NAME EXPECTED COMMAND...: the command's standard output and error must match an extended regular expression.
check() {
    local name=$1 expected=$2; shift 2
    "$@" >out 2>&1
    if echo "$(tr '\n' ' ' <out)" | grep -Eq -- "$expected"; then ok "$name"; else FAIL "$name" out; fi
}
rows() { rpcinfo | awk -v p=$program '$1 == p { print $3 " " $4 }' | LC_ALL=C sort | tr '\n' ' '; }
uaddr() { rpcinfo | awk -v p=$program -v n="$1" '$1 == p && $3 == n { print $4 }'; }
# serve NAME VARIABLE=VALUE... -- ARGUMENTS: starts a server with the library; $server is its pid.
serve() {
    local settings=()
    while [ "$1" != -- ]; do settings+=("$1"); shift; done; shift
    log=$scratch/server.log start_ready "${preloaded[@]}" "${settings[@]}" ./netid serve "$@" ||
        FAIL "server $* starts" "$scratch/server.log"
}
run() { "${preloaded[@]}" "$@"; }

cc -Wall -Wextra -o netid "$top/c-tests/netid.c" $(pkg-config --cflags --libs libtirpc) 2>cc.log ||
    { FAIL "netid.c compiles" cc.log; closing; }

check "the entries, their addresses and descriptors" '^$' run ./netid entries
check "without the library there is no such netid" 'nconf != NULL' ./netid entries
if ! command -v valgrind >/dev/null; then
    skip "valgrind: entries" "not installed"
elif run valgrind -q --error-exitcode=9 ./netid entries 2>valgrind.log; then
    ok "valgrind: entries"
else
    FAIL "valgrind: entries" valgrind.log
fi

serve -- rdma
check "svc_create registers both netids" '^rdma 0\.0\.0\.0\.[0-9.]+ rdma6 ::\.[0-9.]+ $' rows
check "clnt_create by netid" '^rdma: RPC: Success' run ./netid call 127.0.0.1 1 rdma
check "clnt_create over IPv6" '^rdma6: RPC: Success' run ./netid call ::1 1 rdma
check "another version is found, and refused by the server" '^rdma: RPC: Program/version mismatch' \
    run ./netid call 127.0.0.1 7 rdma
at=127.0.0.1$(uaddr rdma | sed 's/^0\.0\.0\.0//')
check "rpcb_getaddr" "^${at//./\\.} \$" run ./netid getaddr 127.0.0.1 1
check "rpcinfo -T rdma, version given" 'version 1 ready' run rpcinfo -T rdma 127.0.0.1 $program 1
check "rpcinfo -T rdma, any version" 'version 1 ready' run rpcinfo -T rdma 127.0.0.1 $program
check "rpcinfo -T rdma6" 'version 1 ready' run rpcinfo -T rdma6 ::1 $program
check "rpcinfo -a" 'version 1 ready' run rpcinfo -a "$at" -T rdma $program 1
rpcinfo -T tcp 127.0.0.1 >dump.tcp
run rpcinfo -T rdma 127.0.0.1 >dump.rdma 2>&1
cmp -s dump.tcp dump.rdma && ok "rpcinfo -T rdma lists what -T tcp lists" || FAIL "rpcinfo -T rdma lists" dump.rdma
stop "$server"
check "svc_unreg removes the rows" '^$' rows

# rpcbind itself can only be reached over tcp, and nobody is told otherwise.
check "rpcbind on netid rdma: an error by name, tcp at its address" \
    'by name: RPC: Program not registered; program 100000 is rpcbind itself, which is reached over tcp.* at its address: tcp, RPC: Success its list: there' \
    run ./netid rpcbind rdma
check "and the log says so" 'program 100000 version 4 \(rpcbind\) goes over tcp' \
    run env RPCRDMA_LOG=info ./netid rpcbind rdma
for name in portmapper '100000 4'; do
    check "rpcinfo -T rdma HOST $name is an error" 'RPC: Program not registered; program 100000 is rpcbind itself' \
        run rpcinfo -T rdma 127.0.0.1 $name
done

check "not registered: the text names netid and host" \
    'RPC: Program not registered; program [0-9]+ is not registered on netid rdma at 127\.0\.0\.1, and on no other: is' \
    run ./netid call 127.0.0.1 1 rdma
serve -- tcp
check "registered for tcp only: what its server needs" \
    'not registered on netid rdma at 127\.0\.0\.1, but on tcp, tcp6: its server must run with librpcrdma, and with RPCRDMA_REDIRECT' \
    run ./netid call 127.0.0.1 1 rdma
stop "$server"
# serve_on NETID [COMMAND...]: starts a server on one netid.
serve_on() {
    local netid=$1; shift
    log=$scratch/server.log start_ready "$@" "${preloaded[@]}" ./netid serve_on "$netid" || FAIL "server on $netid starts" server.log
}
rpcinfo -d $program 1 2>/dev/null
serve_on rdma
check "registered for IPv4 only, asked for IPv6" \
    'not registered on netid rdma6 at ::1, but on rdma: its server has no IPv6 address' run ./netid call ::1 1 rdma6
check "no IPv4 address, and which netid has one" 'RPC: ::1 has no IPv4 address, as netid rdma needs it; perhaps it is there on rdma6' \
    run rpcinfo -T rdma ::1 $program 1
stop "$server"; rpcinfo -d $program 1 2>/dev/null

# Another user's row. The checkout may lie where other users cannot read it.
chmod 755 "$scratch"
cp "$LIBRPCRDMA" librpcrdma.so.0
preloaded=(env LD_PRELOAD="$scratch/librpcrdma.so.0")
moved=("${preloaded[@]}" RPCRDMA_REDIRECT=tcp)
ordinary() { echo setpriv --reuid "$1" --regid "$1" --clear-groups; }
serve_on rdma $(ordinary 1000)
check "a row of another user's: whose, and what to do" \
    'rpcbind does not register program [0-9]+ version 1 on netid rdma: it has a row for 0\.0\.0\.0\.[0-9.]+ already, of 1000, .*rpcinfo -d [0-9]+ 1' \
    run $(ordinary 1001) ./netid serve_on rdma
log=$scratch/moved.log start_ready $(ordinary 1001) "${moved[@]}" RPCRDMA_LOG=warn ./netid serve tcp || FAIL "moved beside it" moved.log
check "and of a moved server, in the log" 'warn: rpcbind does not register program [0-9]+ version 1 on netid rdma: it has a row .* of 1000' cat moved.log
stop "$server"
for child in "${children[@]}"; do stop "$child"; done
rpcinfo -d $program 1 2>/dev/null

# Out of descriptors.
log=$scratch/full.log start_ready bash -c 'ulimit -n 12; exec "$@"' - "${preloaded[@]}" RPCRDMA_LOG=warn ./netid serve rdma
check "a server out of descriptors, at its clients" \
    'no RDMA connection to .*; its server must run with librpcrdma, and have descriptors left' run ./netid many 127.0.0.1 12 rdma
check "and in its log" 'an RDMA connection is refused: Too many open files; raise its limit \(ulimit -n' cat full.log
stop "$server"; rpcinfo -d $program 1 2>/dev/null
check "unknown host" 'RPC: Unknown host; no\.such\.host\.invalid' run ./netid call no.such.host.invalid 1 rdma
check "no rpcbind" 'RPC: Port mapper failure.*no rpcbind at 127\.0\.0\.1:111' \
    env NO_RPCBIND=1 bash "$here/ns.sh" "${preloaded[@]}" ./netid call 127.0.0.1 1 rdma

check "a wrong setting: no client, and why" 'create: RPC: .*; RPCRDMA_REDIRECT="carrier-pigeon"' \
    run env RPCRDMA_REDIRECT=carrier-pigeon ./netid call 127.0.0.1 1 rdma
check "a wrong setting: no server, and why" 'svc_create: RPC: .*; RPCRDMA_REDIRECT="carrier-pigeon"' \
    run env RPCRDMA_REDIRECT=carrier-pigeon ./netid serve rdma
serve RPCRDMA_REDIRECT=carrier-pigeon -- tcp
check "a wrong setting leaves tcp alone" '^tcp [0-9.]+ tcp6 [0-9:.]+ $' rows
stop "$server"
printf '%d 1 1 max-reply=1K\n%d 1 2 arguments=itn\n' $program $program >bindings
check "a wrong line of a binding: no client, and where" 'create: RPC: .*; bindings:2:[0-9]+: "itn": must be int' \
    run env RPCRDMA_BINDINGS=bindings ./netid call 127.0.0.1 1 rdma
serve RPCRDMA_REDIRECT=tcp RPCRDMA_BINDINGS=bindings -- tcp
check "a wrong line of a binding: nothing is moved" '^tcp [0-9.]+ tcp6 [0-9:.]+ $' rows
stop "$server"
mkfifo fifo
check "a FIFO for bindings holds up nobody" 'create: RPC: .*; fifo: must be a regular file, and is a FIFO' \
    run env RPCRDMA_BINDINGS=fifo timeout 20 ./netid call 127.0.0.1 1 rdma

for nettype in netpath circuit_n; do
    serve NETPATH=rdma -- $nettype
    check "NETPATH=rdma, svc_create($nettype)" '^rdma 0\.0\.0\.0\.[0-9.]+ $' rows
    check "NETPATH=rdma, clnt_create($nettype)" '^rdma: RPC: Success' \
        run env NETPATH=rdma ./netid call 127.0.0.1 1 $nettype
    stop "$server"
done

serve -- rdma reg
check "rpc_reg and rpc_call" '^RPC: Success 42' run ./netid rpc_call 127.0.0.1 rdma
stop "$server"

serve -- tcp
check "unasked, a server stays on its netids" '^tcp [0-9.]+ tcp6 [0-9:.]+ $' rows
check "a stock client calls it" '^tcp: RPC: Success' ./netid call 127.0.0.1 1 tcp
stop "$server"

for how in create legacy; do
    serve RPCRDMA_REDIRECT=tcp -- tcp $how
    [ "$(uaddr rdma)" = "$(uaddr tcp)" ] && [ -n "$(uaddr tcp)" ] && ok "moved ($how): same address" ||
        FAIL "moved ($how): same address"
    check "moved ($how): a stock client is served" '^tcp: RPC: Success' ./netid call 127.0.0.1 1 tcp
    check "moved ($how): by netid" '^rdma: RPC: Success' run ./netid call 127.0.0.1 1 rdma
    check "moved ($how): a moved client" '^(tcp|rdma): RPC: Success' "${moved[@]}" ./netid call 127.0.0.1 1 tcp
    stop "$server"
    check "moved ($how): rows removed, from the signal handler" '^$' rows
done

serve RPCRDMA_REDIRECT=tcp RPCRDMA_REDIRECT_PROGRAMS=100003 -- tcp
check "another program's server is not moved" '^tcp [0-9.]+ tcp6 [0-9:.]+ $' rows
stop "$server"

serve RPCRDMA_REDIRECT=udp -- udp
[ "$(uaddr rdma)" = "$(uaddr udp)" ] && [ -n "$(uaddr udp)" ] && ok "udp moved: same address" || FAIL "udp moved"
# The server's loop creates the listener at its first turn.
called() { run ./netid call 127.0.0.1 1 rdma | grep -q '^rdma: RPC: Success'; }
wait_for 10 called && ok "udp moved: by netid" || FAIL "udp moved: by netid"
check "udp moved: a stock client is served" '^udp: RPC: Success' ./netid call 127.0.0.1 1 udp
stop "$server"
check "udp moved: rows removed" '^$' rows

# A server that itself binds the TCP port of the same number after its udp is registered.
beside() { log=$scratch/server.log start_ready "${preloaded[@]}" RPCRDMA_REDIRECT=udp RPCRDMA_LOG=warn ./netid beside 20111 "$@"; }
for how in plain daemon workers; do
    for tcp in tcp ''; do
        name="udp moved ($how${tcp:+, with tcp on the same port})"
        beside $how $tcp && ok "$name: starts" || { FAIL "$name: starts" "$scratch/server.log"; continue; }
        wait_for 10 called && ok "$name: by netid" || FAIL "$name: by netid" "$scratch/server.log"
        [ -z "$tcp" ] || check "$name: a stock client of tcp is served" '^tcp: RPC: Success' ./netid call 127.0.0.1 1 tcp
        check "$name: a stock client of udp is served" '^udp: RPC: Success' ./netid call 127.0.0.1 1 udp
        check "$name: the rows are right" "^rdma 0\\.0\\.0\\.0\\.78\\.143 ${tcp:+tcp 0\\.0\\.0\\.0\\.78\\.143 }udp 0\\.0\\.0\\.0\\.78\\.143 \$" rows
        [ ! -s "$scratch/server.log" ] && ok "$name: no warning" || FAIL "$name: no warning" "$scratch/server.log"
        [ "$how" = plain ] && stop "$server" || kill -KILL $(pidof netid) 2>/dev/null
        wait_for 10 eval '! pidof netid'; rm -f "$scratch/server.log"
        rpcinfo -d $program 1 2>/dev/null
    done
done
start_ready ./netid listen 20111; other=$server
beside plain || FAIL "udp moved beside another's listener: starts" "$scratch/server.log"
wait_for 10 eval '[ "$(rows)" = "udp 0.0.0.0.78.143 " ]' && ok "udp moved beside another's listener: no row for rdma" ||
    FAIL "udp moved beside another's listener: no row for rdma" "$scratch/server.log"
grep -q 'not listening at 0.0.0.0:20111 beside the datagram transport: .* netid rdma is withdrawn' "$scratch/server.log" &&
    ok "udp moved beside another's listener: the log says so" || FAIL "udp moved beside another's listener: the log" "$scratch/server.log"
stop "$server"; stop "$other"
rpcinfo -d $program 1 2>/dev/null

# Only adapters: neither a socket that a program has connected or accepted, nor what a server accepts.
only="RPCRDMA_PROVIDER=verbs RPCRDMA_LOG=error"
serve -- rdma
check "a CLIENT on a connected socket" '^RPC: Success' run ./netid connected rdma
check "a transport on an accepted one" '^made' run ./netid accepted
check "a transport on an accepted one, nothing but adapters" \
    'accepted: RPC: .*; it is a TCP connection, and RPCRDMA_PROVIDER=verbs takes nothing but adapters' run env $only ./netid accepted
if [ -n "$(ls /sys/class/infiniband 2>/dev/null)" ]; then skip "nothing but adapters, without one" "this machine has one"; else
    none='this machine has no RDMA device; RPCRDMA_PROVIDER=auto does without'
    check "no adapter: a CLIENT on a connected socket" "connected: RPC: .*; no RDMA connection to [0-9.:]+: $none" \
        run env $only ./netid connected rdma
    stop "$server"
    check "no adapter: no server" "error: $none.*svc_create: RPC: .*; $none" run env $only timeout 20 ./netid serve rdma
    serve RPCRDMA_REDIRECT=tcp $only -- tcp
    check "no adapter: a moved server is there over tcp, and only there" '^tcp [0-9.]+ tcp6 [0-9:.]+ $' rows
    check "and says so" "error: program $program version 1 is not registered on netid rdma: $none" cat "$scratch/server.log"
    check "a stock client of it" '^tcp: RPC: Success' ./netid call 127.0.0.1 1 tcp
    check "no RDMA over its TCP connections" 'connected: RPC: .*; no RDMA connection to .* during the MPA startup' \
        run ./netid connected tcp
fi
stop "$server"; rpcinfo -d $program 1 2>/dev/null

# Linked instead of preloaded: the outer names keep the library needed.
if cc -o linked "$top/c-tests/netid.c" $(pkg-config --cflags libtirpc) -L"$(dirname "$LIBRPCRDMA")" \
    -Wl,-rpath,"$(dirname "$LIBRPCRDMA")" -lrpcrdma -ltirpc 2>cc.log; then
    check "linked: the entries" '^$' ./linked entries
else
    FAIL "netid.c links with -lrpcrdma -ltirpc" cc.log
fi
closing
