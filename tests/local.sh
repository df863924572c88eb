#!/bin/bash
# local.sh [SECONDS [COUNT [SEED]]]: memory that two processes of one host share (RPCRDMA_PROVIDER=local), tested with programs
# (c-tests/local.c): peers that rewrite it at random, for SECONDS (3) at either end; COUNT (40) processes that are killed, at
# either end; processes that are stopped; long calls that are given up; a server's loop that is elsewhere; other local users
# who disturb the handshake; what may be done with a segment; other users, process and network namespaces.
#
# tests/long/local.sh also gives the figures, and runs what takes longer: LOCAL_LONG=yes.
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# In a private network it can create another one beside that, and nobody else uses its names.
if [ -z "${LOCAL_IN_NS:-}" ] && bash "$here/ns.sh" --possible >/dev/null; then
    LOCAL_IN_NS=1 NO_RPCBIND=1 exec bash "$here/ns.sh" bash "${BASH_SOURCE[0]}" "$@"
fi
. "$here/lib.sh"
cd "$scratch" || exit 1
PATH=$PATH:/usr/sbin:/sbin
seconds=${1:-3} count=${2:-40} seed=${3:-1}
export RPCRDMA_PROVIDER=local

# Other users must be able to find it.
chmod 711 "$scratch"
ln -s librpcrdma.so.0 librpcrdma.so
cp "$LIBRPCRDMA" librpcrdma.so.0 || { FAIL "$LIBRPCRDMA is missing"; closing; }
# shellcheck disable=SC2046
cc -g -O1 -pthread -Wall -Wextra -Werror -Wno-cast-function-type -rdynamic -o local "$top"/c-tests/local{,_*}.c \
    -I"$top/include" $(pkg-config --cflags libtirpc) \
    -L"$scratch" -Wl,-rpath,"$scratch" -lrpcrdma $(pkg-config --libs libtirpc) 2>cc.log ||
    { FAIL "the program does not build" cc.log; closing; }

# report NAME LIMIT ARGUMENT...: passes on the lines of the program, which must succeed within LIMIT seconds.
report() {
    local name=$1 limit=$2 line why status; shift 2
    PATIENCE=$(patient 2) timeout -k 5 "$(patient "$limit")" ./local "$@" >out 2>err
    status=$?
    while read -r line; do
        case $line in
        ok*) ok "$name: ${line#ok    }" ;;
        FAIL*) FAIL "$name: ${line#FAIL  }" err ;;
        skip*) line=${line#skip  } why=${line##*(}; skip "$name: ${line% (*}" "${why%)}" ;;
        *) echo "      $line" ;;
        esac
    done <out
    [ "$status" -le 1 ] && [ ! -s err ] || FAIL "$name: ends well and in silence (status $status)" err
}
report "a client rewrites" $((seconds + 90)) random-client "$seconds" "$seed"
report "a server rewrites" $((seconds + 90)) random-server "$seconds" "$seed"
report "clients are killed" $((60 + count / 5)) kill-clients "$count" "$seed"
report "servers are killed" $((60 + count / 5)) kill-servers "$count" "$seed"
report stopped 60 stopped
report "at the client's name" 60 handshake-client
RPCRDMA_PROVIDER=auto report "another user's server" 60 another-users
report "at the server" 60 "$([ -n "${LOCAL_LONG:-}" ] && echo silent || echo handshake)-server"
report segment 60 segment
report outbox 180 outbox
report elsewhere 120 elsewhere
[ -z "${LOCAL_LONG:-}" ] || report memory 240 idle 1000

# ---- Users and namespaces ----

# goes NAME EXPECTED ADDRESS COMMAND...: a client that is started with COMMAND gets right answers from the running server through
# EXPECTED, "memory" or "no memory"; or its error contains EXPECTED.
goes() {
    local name=$1 expected=$2 address=$3; shift 3
    timeout -k 5 "$(patient 60)" "$@" ./local client "$address" "$port" >out 2>err
    case $expected in
    *memory) if grep -qx "$expected" out; then ok "$name"; else cat out >>err; FAIL "$name" err; fi ;;
    *) if grep -q "^\(none\|wrong\) .*$expected" out; then ok "$name"; else cat out >>err; FAIL "$name" err; fi ;;
    esac
}
# With SIGKILL: unshare(1), which may have started the server, lets no other signal end it.
kill_server() { kill -KILL "$server"; wait "$server" 2>/dev/null; }
# serves COMMAND...: starts a server with it.
serves() {
    log=server.log
    start_ready "$@" ./local server || { FAIL "a server: $*" server.log; return 1; }
}
refused='the peer shares no memory with us'
tell=(env RPCRDMA_LOG=info)
nobody=(setpriv --reuid=65534 --regid=65534 --clear-groups)
someone=(setpriv --reuid=4321 --regid=4321 --clear-groups)
own_processes=(unshare --pid --mount --fork --kill-child --mount-proc)

if serves "${tell[@]}"; then
    goes "the same user" memory 127.0.0.1 "${tell[@]}"
    if grep -q 'shared memory' err && grep -q 'shared memory' server.log; then
        ok "the logs of both ends say so"
    else
        cat server.log >>err; FAIL "the logs of both ends say so" err
    fi
    goes "a client that takes software iWARP only is refused" 'the peer closed the connection\|the connection was lost' \
        127.0.0.1 env RPCRDMA_PROVIDER=iwarp
    stop "$server"
fi
if serves env RPCRDMA_PROVIDER=iwarp; then
    goes "a server that knows software iWARP only: $refused" "$refused" 127.0.0.1
    goes "software iWARP at both ends" "no memory" 127.0.0.1 env RPCRDMA_PROVIDER=iwarp
    stop "$server"
fi

# To the kernel, shared memory is a file, which the server makes.
short=(bash -c 'ulimit -f 100 && exec "$@"' -)
if serves; then
    goes "a client that may write no long files" memory 127.0.0.1 "${short[@]}"
    stop "$server"
fi
if serves "${short[@]}"; then
    goes "a server that may write no long files, and nothing but memory: $refused" "$refused" 127.0.0.1
    stop "$server"
fi
if serves env RPCRDMA_PROVIDER=auto "${short[@]}"; then
    goes "a server that may write no long files: software iWARP" "no memory" 127.0.0.1 env RPCRDMA_PROVIDER=auto
    stop "$server"
fi

# Mapping memory may be refused, by a limit or by a security module.
none=(env NO_SEGMENTS=yes RPCRDMA_PROVIDER=auto)
if serves "${none[@]}"; then
    goes "a server that cannot map what its client writes: software iWARP" "no memory" 127.0.0.1 env RPCRDMA_PROVIDER=auto
    goes "a server that cannot map what its client writes, and nothing but memory: $refused" "$refused" 127.0.0.1
    stop "$server"
fi
if serves env RPCRDMA_PROVIDER=auto; then
    goes "a client that cannot map what its server writes: software iWARP" "no memory" 127.0.0.1 "${none[@]}"
    stop "$server"
fi

users="a client of another user, a server of another user"
processes="a client with process IDs and mounts of its own, a server with them"
networks="a network namespace of its own"
if [ "$(id -u)" -ne 0 ]; then
    skip "$users" "needs root"
    skip "$processes" "needs root"
    skip "$networks" "needs root"
    closing
fi
if "${nobody[@]}" test -x "$scratch/local" 2>/dev/null; then
    if serves; then
        goes "a client of another user" memory 127.0.0.1 "${nobody[@]}"
        goes "the same, where more than memory may be used" memory 127.0.0.1 env RPCRDMA_PROVIDER=auto "${nobody[@]}"
        stop "$server"
    fi
    if serves "${someone[@]}" "${tell[@]}" RPCRDMA_PROVIDER=auto; then
        goes "a server of another user, where nothing but memory may be used" memory 127.0.0.1
        goes "a server of another user: software iWARP" "no memory" 127.0.0.1 env RPCRDMA_PROVIDER=auto
        grep -q "no memory is offered to a client that takes it from root and user 0" server.log && ok "the server's log says why" ||
            FAIL "the server's log says why" server.log
        goes "a server of the same user, who is not root" memory 127.0.0.1 env RPCRDMA_PROVIDER=auto "${someone[@]}"
        stop "$server"
    fi
    if serves "${nobody[@]}" env RPCRDMA_PROVIDER=auto; then
        goes "a server of nobody, and nobody's client" memory 127.0.0.1 env RPCRDMA_PROVIDER=auto "${nobody[@]}"
        stop "$server"
    fi
    own_users=(unshare --user)
    if ! "${own_users[@]}" true 2>/dev/null; then
        skip "a server in a user namespace of its own" "no such namespace can be made here"
    elif serves "${own_users[@]}" env RPCRDMA_PROVIDER=auto; then
        goes "a server in a user namespace of its own: software iWARP" "no memory" 127.0.0.1 env RPCRDMA_PROVIDER=auto
        goes "the same, where nothing but memory may be used" memory 127.0.0.1
        goes "a client in another one: software iWARP" "no memory" 127.0.0.1 env RPCRDMA_PROVIDER=auto "${own_users[@]}"
        stop "$server"
    fi
else
    skip "$users" "another user cannot be become, or does not find the program"
fi
if "${own_processes[@]}" true 2>/dev/null; then
    if serves; then
        goes "a client with process IDs and mounts of its own" memory 127.0.0.1 "${own_processes[@]}"
        goes "a client without /proc" memory 127.0.0.1 "${own_processes[@]}" bash -c 'mount -t tmpfs none /proc && exec "$@"' -
        stop "$server"
    fi
    if serves "${own_processes[@]}"; then
        goes "a server with process IDs and mounts of its own" memory 127.0.0.1
        kill_server
    fi
else
    skip "$processes" "no such namespace can be made here"
fi

# A network at the other end of a wire.
far() {
    [ -n "${LOCAL_IN_NS:-}" ] && ip netns add far &&
        ip link add near0 type veth peer name far0 netns far &&
        ip addr add 192.0.2.1/24 dev near0 && ip link set near0 up &&
        ip -n far addr add 192.0.2.2/24 dev far0 && ip -n far link set far0 up && ip -n far link set lo up
}
far=(ip netns exec far)
if ! far >far.log 2>&1; then
    skip "$networks" "no such namespace can be made here"
    closing
fi
if serves "${far[@]}"; then
    goes "a server with $networks: $refused" "$refused" 192.0.2.2
    goes "a server and a client in the same one" memory 192.0.2.2 "${far[@]}"
    stop "$server"
fi
if serves; then
    goes "a client with $networks: $refused" "$refused" 192.0.2.1 "${far[@]}"
    goes "a client at another address of the host" memory 192.0.2.1
    stop "$server"
fi
if serves "${far[@]}" env RPCRDMA_PROVIDER=auto; then
    goes "a server with $networks: software iWARP" "no memory" 192.0.2.2 env RPCRDMA_PROVIDER=auto
    stop "$server"
fi
if serves env RPCRDMA_PROVIDER=auto; then
    goes "a client with $networks: software iWARP" "no memory" 192.0.2.1 "${far[@]}" env RPCRDMA_PROVIDER=auto
    stop "$server"
fi
closing
