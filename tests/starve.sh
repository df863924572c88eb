#!/bin/bash
# starve.sh [STEP [START]]: the library gets no memory, or no descriptor: every STEP-th (7) of its requests fails in turn, alone
# or with all that follow (c-tests/starve.c), from START (1) on; STEP 1 is all of them. Over software iWARP and shared memory.
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
if [ -z "${STARVE_IN_NS:-}" ] && NO_RPCBIND=1 bash "$here/ns.sh" --possible >/dev/null; then
    NO_RPCBIND=1 STARVE_IN_NS=1 exec bash "$here/ns.sh" bash "${BASH_SOURCE[0]}" "$@"
fi
. "$here/lib.sh"
step=${1:-7}
start=${2:-1}
cd "$scratch" || exit 1
cc -g -O1 -Wall -Wextra -Werror -fPIC -shared -fno-builtin -o starve_shim.so "$top/c-tests/starve_shim.c" -ldl 2>cc.log &&
    cc -g -O1 -pthread -Wall -Wextra -Werror -Wno-cast-function-type -o starve "$top/c-tests/starve.c" \
        $(pkg-config --cflags --libs libtirpc) -ldl 2>>cc.log || { FAIL "starve.c and its shim compile" cc.log; closing; }
starved=(env LD_PRELOAD="$scratch/starve_shim.so:$LIBRPCRDMA" RUST_BACKTRACE=0)

# Every request of a round: nothing aborts, nothing stays, and the next round is right.
for way in iwarp local 'iwarp 4'; do
    read -r device threads <<<"$way"
    for mode in round dry; do
        name="$device${threads:+, $threads service threads}, each $step. request from $start on"
        [ "$mode" = round ] || name+=", and all that follow it"
        timed=$SECONDS
        if RPCRDMA_PROVIDER=$device timeout "$(patient 600)" "${starved[@]}" ${threads:+STARVE_THREADS=$threads} ./starve $mode "$step" "$start" >out 2>err &&
            [ ! -s err ]; then
            ok "$name: $(cat out) ($((SECONDS - timed)) s)"
        else
            cat out >>err
            FAIL "$name" err
        fi
    done
done

# A connection that libtirpc accepts without memory for its record stream would be destroyed through a NULL pointer. libtirpc
# reports the lack of memory each time.
for netid in rdma tcp; do
    name="connections that libtirpc has no memory for, on netid $netid"
    if RPCRDMA_PROVIDER=iwarp RPCRDMA_REDIRECT=tcp RPCRDMA_FALLBACK=no STARVE_NETID=$netid timeout "$(patient 120)" "${starved[@]}" ./starve accept \
        >out 2>err && ! grep -qv ': xdrrec_create: out of memory$' err; then
        ok "$name: $(cat out)"
    else
        cat out >>err
        FAIL "$name" err
    fi
done

# The first requests of a process are made only once, so each needs a process of its own.
export RPCRDMA_PROVIDER=iwarp
"${starved[@]}" ./starve cold 1000000000 >out 2>err || FAIL "a process with all its memory" err
requests=$(cat out) aborted=0 refused=0 processes=0
# The requests after those of the first connection are those of a round.
for ((n = start; n <= requests; n += 3 * step)); do
    timeout "$(patient 60)" "${starved[@]}" ./starve cold "$n" >out 2>err
    status=$?
    processes=$((processes + 1))
    case $status in
    0) ;;
    # It reports that it cannot begin.
    1) refused=$((refused + 1)) ;;
    *) aborted=$((aborted + 1)); { echo "request $n, status $status:"; cat err; } >>bad ;;
    esac
done
if [ "$aborted" = 0 ]; then ok "$processes processes lack one of the $requests requests of their beginning: $refused could not begin"
else FAIL "$aborted of $processes processes that lack one of the $requests requests of their beginning" bad; fi
closing
