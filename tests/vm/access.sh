#!/bin/bash
# access.sh: who is served over tcp, software iWARP and an adapter, by the same server: the answers must be the same. In
# a guest with rxe devices, one of them towards another host (a network namespace). Run by `make check-vm`.
. "$(dirname "${BASH_SOURCE[0]}")/guest.sh"
run_in_guest "access over adapters" 900 "${BASH_SOURCE[0]}" verbs/rxe

program=$scratch/access
log=$scratch/server.log
must gcc -Wall -Wextra -Werror -Wno-cast-function-type $(pkg-config --cflags libtirpc) -o "$program" "$here/access.c" -ltirpc
must ip link set lo up
device_up
unset RPCRDMA_PROVIDER
# Another host, whose user may send datagrams and nothing else.
must modprobe veth
must ip netns add other
must ip link add veth0 type veth peer name veth1 netns other
must ip addr add 10.9.0.1/24 dev veth0
must ip link set veth0 up
must ip netns exec other ip addr add 10.9.0.2/24 dev veth1
must ip netns exec other ip link set veth1 up
must rdma link add rxe1 type rxe netdev veth0
must wait_for 10 grep -qs ACTIVE /sys/class/infiniband/rxe1/ports/1/state

# serve ADDRESS [INTERFACE]: starts a moved server of tcp, or with NETID=rdma one of that netid, on port 7700.
serve() {
    : >"$log"
    start_ready env LD_PRELOAD="$LIBRPCRDMA" RPCRDMA_LOG=info RPCRDMA_REDIRECT=tcp ${SETTINGS:-} "$program" serve "${NETID:-tcp}" "$1" 7700 ${2:-} ||
        { FAIL "a server at $1 starts" "$log"; closing; }
}
declare -A way=(
    [tcp]="env NETID=tcp" [iwarp]="env NETID=rdma LD_PRELOAD=$LIBRPCRDMA RPCRDMA_PROVIDER=iwarp"
    [verbs]="env NETID=rdma LD_PRELOAD=$LIBRPCRDMA RPCRDMA_PROVIDER=verbs RPCRDMA_CREDITS=4"
)
# call WAY ADDRESS [PROCEDURE]: prints the first word of the outcome.
call() {
    local netid=rdma; [ "$1" != tcp ] || netid=tcp
    ${way[$1]} timeout "$(patient 30)" "$program" call $netid "$2" 7700 ${3:-} >"$scratch/call" 2>&1
    sed 's/:.*//' "$scratch/call"
}
# call_for WAY OPERATION BYTES: the same for the first adapter's address.
call_for() { ${way[$1]} timeout "$(patient 60)" "$program" $2 rdma $address 7700 $3 2>&1 | sed 's/:.*//'; }
# same OUTCOME WHAT ADDRESS: the outcome is this over all three.
same() {
    local outcome=$1 what=$2 got=
    for how in tcp iwarp verbs; do got+=" $how $(call $how "$3")"; done
    if [ "$got" = " tcp $outcome iwarp $outcome verbs $outcome" ]; then ok "$what:$got"; else FAIL "$what:$got" "$log"; fi
}
forge() { ip netns exec other setpriv --reuid 65534 --regid 65534 --clear-groups python3 "$here/forge.py" 10.9.0.2 10.9.0.1 7700 "$@"; }
expect() { if [ "$2" = "$3" ]; then ok "$1: $2"; else FAIL "$1: $2 instead of $3" "$log"; fi; }

for NETID in tcp rdma; do
    serve 127.0.0.1
    if [ $NETID = tcp ]; then same refused "a moved server at 127.0.0.1, from its other address" $address
    else expect "netid rdma at 127.0.0.1, over an adapter" "$(call verbs $address)" refused; fi
    expect "netid $NETID at 127.0.0.1, forged" "$(forge 10.9.0.2 2000)" refused
    stop "$server"
done
unset NETID
serve ::1
same refused "a moved server at ::1" $address
stop "$server"
serve $address
same served "a moved server at its adapter's address" $address
same refused "and from another address of the host" 10.9.0.1
stop "$server"
serve ::ffff:$address
same served "a moved server at an IPv4-mapped address" $address
stop "$server"
serve ::
same served "a moved server at any address of both families" $address
stop "$server"

# What a socket is bound to also restricts adapters.
serve 0.0.0.0 lo
expect "a server on lo only, tcp from another host" "$(ip netns exec other env NETID=tcp timeout "$(patient 10)" "$program" call tcp 10.9.0.1 7700 | sed 's/:.*//')" refused
expect "a server on lo only, an adapter from another host" "$(forge 10.9.0.2 2000)" refused
stop "$server"
serve 0.0.0.0 veth0
expect "a server on veth0 only, an adapter there" "$(forge 10.9.0.2 2000)" answered
expect "a server on veth0 only, another adapter" "$(call verbs $address)" refused
stop "$server"

# The identity of the caller.
serve 0.0.0.0
expect "a caller that says who it is" "$(forge 10.9.0.2 2000)" answered
expect "a caller that claims another address" "$(forge 10.9.0.77 700)" refused
expect "a caller that claims the server's own address" "$(forge 10.9.0.1 700)" refused
stop "$server"

# A listener that the program has closed is closed to adapters too.
for NETID in tcp rdma; do
    serve 0.0.0.0
    expect "netid $NETID: served over an adapter" "$(call verbs $address 1)" served
    expect "netid $NETID: a listener that was closed, over an adapter" "$(call verbs $address)" refused
    if rdma resource show cm_id | grep -q 7700; then FAIL "netid $NETID: nothing listens any more" "$log"; else ok "netid $NETID: nothing listens any more"; fi
    stop "$server"
done
unset NETID
# So is one that the program has shut down, or binds to an interface while it is served.
serve 0.0.0.0
expect "a listener is served" "$(call verbs $address 4)" served
same refused "a listener that was shut down" $address
if rdma resource show cm_id | grep -q 7700; then FAIL "nothing listens any more" "$log"; else ok "nothing listens any more"; fi
stop "$server"
serve 0.0.0.0
expect "a listener at all interfaces" "$(call verbs $address 5)" served
expect "a listener that is bound to lo since" "$(call verbs $address)" refused
expect "a listener that is bound to lo since, tried again" "$(call verbs $address)" refused
expect "a listener that is bound to lo since, from another host" "$(forge 10.9.0.2 2000)" refused
stop "$server"
SETTINGS=RPCRDMA_REDIRECT_ADAPTERS=no
serve 0.0.0.0
expect "RPCRDMA_REDIRECT_ADAPTERS=no, tcp" "$(call tcp $address)" served
expect "RPCRDMA_REDIRECT_ADAPTERS=no, an adapter" "$(call verbs $address)" refused
stop "$server"

# Only adapters.
SETTINGS=RPCRDMA_PROVIDER=verbs
NETID=rdma serve 0.0.0.0
expect "nothing but adapters: software iWARP" "$(call iwarp $address)" refused
expect "nothing but adapters: a socket that the client has connected" "$(${way[verbs]} timeout "$(patient 30)" "$program" connected rdma $address 7700)" served
expect "nothing but adapters: the server has seen one call" "$(grep -c 'accepted .* over rdma (verbs' "$log")" 1
stop "$server"
unset SETTINGS

# A result of 1 MiB, in programs without a binding: those that may lock the memory have room for it, and none fails.
serve 0.0.0.0
# read_as LIMIT NETID NAME=VALUE...: calls as an ordinary user who may lock LIMIT KiB; prints what a call that works goes over.
chmod 755 "$scratch"
read_as() {
    local limit=$1 netid=$2; shift 2
    (ulimit -l "$limit"; exec setpriv --reuid 65534 --regid 65534 --clear-groups env LD_PRELOAD="$LIBRPCRDMA" RPCRDMA_LOG=info "$@" \
        timeout "$(patient 60)" "$program" read "$netid" $address 7700 1048576) >"$scratch/call" 2>&1
    if grep -q '^served' "$scratch/call"; then sed -n 's/.*goes over rdma to .*(\(verbs\|software iWARP\|shared memory\).*/\1/p' "$scratch/call" | tail -n 1
    else echo "failed: $(tail -n 1 "$scratch/call" | cut -c 1-300)"; fi
}
expect "1 MiB, tcp" "$(timeout "$(patient 30)" "$program" read tcp $address 7700 1048576)" served
expect "1 MiB, software iWARP" "$(read_as 64 rdma RPCRDMA_PROVIDER=iwarp)" "software iWARP"
expect "1 MiB, 8 MiB to lock" "$(read_as 8192 rdma)" "shared memory"
expect "1 MiB, 8 MiB to lock, and why" "$(grep -c 'not over verbs: 16781312 bytes for replies cannot be locked, .*a binding, RPCRDMA_MAX_REPLY' "$scratch/call")" 1
expect "1 MiB, 8 MiB to lock, a moved program" "$(read_as 8192 tcp RPCRDMA_REDIRECT=tcp RPCRDMA_FALLBACK=no)" "shared memory"
expect "1 MiB, 8 MiB to lock, nothing but adapters" "$(read_as 8192 rdma RPCRDMA_PROVIDER=verbs RPCRDMA_CREDITS=4)" verbs
expect "1 MiB, 64 MiB to lock, nothing but adapters" "$(read_as 65536 rdma RPCRDMA_PROVIDER=verbs)" verbs
expect "1 MiB, unlimited, nothing but adapters" "$(call_for verbs read 1048576)" served
expect "17 MiB, as with software iWARP" "$(call_for verbs read 17825792)" refused
# How soon the adapter answers does not matter here, only that it is tried.
tried() { read_as "$@" >"$scratch/went"; grep -q '^failed' "$scratch/went" && cat "$scratch/went" || grep -c 'not over verbs' "$scratch/call"; }
expect "1 MiB, 64 MiB to lock: not refused" "$(tried 65536 rdma)" 0
expect "1 MiB, 8 MiB to lock, and a setting: not refused" "$(tried 8192 rdma RPCRDMA_MAX_REPLY=1M)" 0
stop "$server"

# A process forked from one that has used the adapter: its own connections go over something else.
forked() { ${way[verbs]} RPCRDMA_MAX_REPLY=64K RPCRDMA_LOG=info "$@" timeout "$(patient 60)" "$program" fork rdma $address 7700 >"$scratch/call" 2>&1; }
serve 0.0.0.0
# The adapter gets a quarter of a second, as in choice.sh; registering little memory is quick.
for ((try = $(patient 40); try > 0; try--)); do
    forked RPCRDMA_PROVIDER=auto
    ! grep -q 'goes over rdma to .*(verbs' "$scratch/call" || break
done
expect "a child of a process that uses an adapter" "$(grep -v rpcrdma "$scratch/call" | tr '\n' ' ')" "served the same CLIENT: RPC: Success served the parent: RPC: Success "
if [ $try -gt 0 ]; then ok "and the parent went over the adapter"; else skip "and the parent went over the adapter" "it did not answer in time, ever"; fi
forked RPCRDMA_PROVIDER=verbs
expect "nothing but adapters: a child is told why" "$(grep -c 'forked from one that has used RDMA devices' <(grep '^the same CLIENT' "$scratch/call"))" 1
expect "nothing but adapters: the parent goes on" "$(grep '^the parent' "$scratch/call")" "the parent: RPC: Success"
stop "$server"

# A server that acts as other users: the kernel then refuses it what it has opened.
serve 0.0.0.0
expect "a server that changes its user: before" "$(call verbs $address)" served
expect "over an adapter the connection ends" "$(call verbs $address 3)" refused
expect "and over tcp it does not" "$(call tcp $address 3)" served
expect "and the log says why, once" "$(grep -c 'refuses this process its own devices: it has changed its user or group' "$log")" 1
nobody_listens() { ! rdma resource show cm_id | grep -q 7700; }
if wait_for 10 nobody_listens; then ok "nothing listens on adapters any more"; else FAIL "nothing listens on adapters any more" "$log"; fi
auto() { timeout "$(patient 60)" env LD_PRELOAD="$LIBRPCRDMA" "$program" call rdma $address 7700 3; }
expect "its clients go over software iWARP" "$(auto 2>&1)" served
expect "again and again" "$(auto 2>&1)" served
stop "$server"

# A CLIENT whose connection has failed leaves its share of the locked memory to the next CLIENT.
serve 0.0.0.0
mkfifo "$scratch/go"
(ulimit -l 300; exec ${way[verbs]} timeout 90 "$program" again rdma $address 7700) <"$scratch/go" >"$scratch/again" 2>&1 &
again=$!
exec 7>"$scratch/go"
must wait_for 30 grep -q . "$scratch/again"
expect "300 KiB to lock" "$(head -n 1 "$scratch/again" | sed 's/:.*//')" served
stop "$server"
serve 0.0.0.0
echo >&7
exec 7>&-
wait $again
expect "300 KiB to lock: another CLIENT beside one whose server has gone" "$(tail -n 1 "$scratch/again" | cut -c 1-200)" served
stop "$server"

# Many connections of a client that is never heard of again, and many refused requests.
SETTINGS="prlimit --memlock=2097152"
serve 0.0.0.0
held=$(forge 10.9.0.2 2000 30)
expect "many connections without a call ($held), and then a client" "$(call verbs $address)" served
expect "many connections without a call: one had to go for it" "$(grep -q 'adapters have no room' "$log" && echo yes)" yes
stop "$server"
unset SETTINGS
serve 0.0.0.0
SECONDS=0
expect "60 requests that are refused" "$(forge 10.9.0.77 700 60)" "answered 0 refused 60 silent 0"
lines=$(grep -c 'is refused' "$log")
if [ "$lines" -le $((SECONDS + 1)) ]; then ok "60 requests that are refused: $lines lines of the log in $SECONDS s"
else FAIL "60 requests that are refused: $lines lines of the log in $SECONDS s" "$log"; fi
expect "60 requests that are refused, and then a client" "$(call verbs $address)" served
stop "$server"
device_down
closing
