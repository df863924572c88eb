#!/bin/bash
# differ.sh [SECONDS [SEED]]: random plans of what clients and servers do (c-tests/differ.c), from SEED (1) on, for SECONDS (10).
# They must see the same over stock tcp and over rdma, through shared memory and over software iWARP.
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# When a program unregisters, that must not reach the machine's own rpcbind.
if [ -z "${DIFFER_IN_NS:-}" ] && NO_RPCBIND=1 bash "$here/ns.sh" --possible >/dev/null; then
    NO_RPCBIND=1 DIFFER_IN_NS=1 exec bash "$here/ns.sh" bash "${BASH_SOURCE[0]}" "$@"
fi
. "$here/lib.sh"
seconds=${1:-10} seed=${2:-1} together=10
cd "$scratch" || exit 1

cc -g -O1 -pthread -Wall -Wextra -Werror -Wno-cast-function-type -o differ "$top/c-tests/differ.c" \
    $(pkg-config --cflags --libs libtirpc) 2>cc.log || { FAIL "differ.c compiles" cc.log; closing; }

# plans NAME COMMAND...: writes what these plans print to the file NAME, sorted.
plans() {
    local name=$1 status; shift
    timeout -k 5 "$(patient 300)" "$@" "$seed" $((seed + together - 1)) >unsorted 2>err
    status=$?
    sort -s -k1,1 unsorted >"$name"
    [ "$status" -eq 0 ] && [ ! -s err ] && return
    echo "seed $(tail -n 1 "$name" | sed 's/^0*\([0-9]*\).*/\1/') or the next: $*" >>err
    FAIL "$name: the plans from seed $seed on end well and in silence (status $status)" err
}
of_seed() { grep "^$(printf '%010d' "$1")\." "$2"; }

until=$((EPOCHSECONDS + seconds)) count=0 differ=
while :; do
    plans tcp ./differ tcp
    for provider in local iwarp; do
        plans $provider "${preloaded[@]}" RPCRDMA_PROVIDER=$provider ./differ rdma
        cmp -s tcp $provider && continue
        differ=yes
        for ((one = seed; one < seed + together; one++)); do
            of_seed $one tcp >expected; of_seed $one $provider >got
            # The plans after one that hangs or dies print nothing.
            { [ -s got ] && ! cmp -s expected got; } || continue
            { diff expected got | grep -m 1 '^<' || echo "< nothing"
              diff expected got | grep -m 1 '^>' || echo "> nothing"
              echo "again: bash tests/differ.sh 0 $one"; } >why
            FAIL "$provider: seed $one is as over tcp" why
        done
    done
    count=$((count + together)) seed=$((seed + together))
    [ $EPOCHSECONDS -lt $until ] || break
done
[ -n "$differ" ] || for provider in local iwarp; do ok "$provider: $count random plans are seen as over tcp"; done
closing
