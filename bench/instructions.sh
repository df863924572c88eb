#!/bin/bash
# instructions.sh [WAY...]: instructions in user space for each call, at either end, over tcp (stock libtirpc) and rdma (the
# library preloaded): the difference of two runs under callgrind, one with twice as many calls as the other, so that
# what happens once does not count; and how often a call has memory allocated, both ends together. It hardly varies from run to run, whatever else the machine does.
#
# A third WAY is unwatched: rdma without the page of figures that `rpcrdma stat` reads.
#
# Nothing spins (RPCRDMA_POLL=0). COUNT=n: calls of the shorter run. ONLY='null 0': calls of this kind and length only.
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
. "$here/../tests/lib.sh"
[ -r "$LIBRPCRDMA" ] || { echo "instructions: $LIBRPCRDMA is missing: run make first" >&2; exit 1; }
command -v valgrind >/dev/null || { echo "instructions: valgrind is not installed" >&2; exit 1; }
[ $# -gt 0 ] || set -- tcp rdma
count=${COUNT:-1000}
cc -O2 -Wall -Wextra -Werror -Wno-cast-function-type -pthread $(pkg-config --cflags libtirpc) -o "$scratch/bench" \
    "$here/bench.c" $(pkg-config --libs libtirpc) || exit 1

# As long as each other, nearly: where the stack begins, and what memset(3) and others do, depends on that.
declare -A with=([tcp]=env [rdma]="${preloaded[*]} RPCRDMA_POLL=0 RPCRDMA_STATS=yes"
    [unwatched]="${preloaded[*]} RPCRDMA_POLL=0 RPCRDMA_STATS=no")

# total FILE: all instructions of a process.
total() { awk '$1 == "totals:" || $1 == "summary:" { n = $2 } END { print n }' "$1"; }

# allocated FILE: how often it has asked for memory.
allocated() {
    awk '/^c?fn=/ { id = $1; sub(/^c?fn=/, "", id); if (NF > 1) name[id] = $2; callee = name[id] }
         /^calls=/ && callee ~ /^(malloc|calloc|realloc)$/ { n += substr($1, 7) }
         END { print n + 0 }' "$1"
}

# run WAY OP SIZE CALLS: sets client, service and allocations, those of both.
run() {
    local callgrind=(valgrind -q --tool=callgrind) netid=${1/unwatched/rdma}
    start_ready ${with[$1]} "${callgrind[@]}" --callgrind-out-file="$scratch/server" "$scratch/bench" server "$netid" ||
        { echo "instructions: no server on $1" >&2; exit 1; }
    ${with[$1]} "${callgrind[@]}" --callgrind-out-file="$scratch/client" "$scratch/bench" calls "$netid" "$port" "$2" "$3" "$4" ||
        { echo "instructions: $* failed" >&2; exit 1; }
    stop "$server"
    client=$(total "$scratch/client") service=$(total "$scratch/server")
    allocations=$(($(allocated "$scratch/client") + $(allocated "$scratch/server")))
}

printf '%-9s %-6s %8s %10s %10s %11s\n' over call bytes client server allocations
kinds=('null 0' 'write 4096' 'read 4096' 'write 65536' 'read 65536')
for what in "${ONLY:-${kinds[@]}}"; do
    for way in "$@"; do
        # shellcheck disable=SC2086
        run "$way" $what "$count"
        before=("$client" "$service" "$allocations")
        # shellcheck disable=SC2086
        run "$way" $what $((2 * count))
        # shellcheck disable=SC2086
        printf '%-9s %-6s %8s %10d %10d %11s\n' "$way" $what $(((client - before[0]) / count)) \
            $(((service - before[1]) / count)) "$(awk "BEGIN { printf \"%.2f\", ($allocations - ${before[2]}) / $count }")"
    done
done
