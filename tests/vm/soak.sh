#!/bin/bash
# soak.sh [PATH...]: the soak (tests/long/soak.sh) over RDMA devices, in a guest: half of the clients go over the device,
# the others through proxies over software iWARP. SOAK_SECONDS (40) is how long,
# SOAK_HOSTILE=no leaves the hostile clients out. `make soak MINUTES=n DEVICE=rxe|siw`.
#
# For the paths see guest.sh; default: verbs/rxe. Linux's siw does not survive it: see docs/testing.md. When a listening process
# is killed while others connect, the kernel stops at "kernel BUG at lib/list_debug.c", so nothing is killed over siw; and siw's
# listeners vanish when a client goes away at once.
. "$(dirname "${BASH_SOURCE[0]}")/guest.sh"
[ $# -gt 0 ] || set -- verbs/rxe
# What is handed over to the guest, which has an environment of its own. Compiled here, where that is much faster.
given=$top/build/vm-soak
if [ -z "${IN_GUEST:-}" ]; then
    make -s -C "$top/c-tests" OUT="$top/build/c-tests" "$top/build/c-tests/load" || { FAIL "the soak compiles"; closing; }
    program=${SOAK_BAD_PEERS:-}
    if [ -z "$program" ] && [ "${SOAK_HOSTILE:-}" != no ]; then
        program=$(cd "$top" && "${CARGO:-cargo}" test --locked --test bad_peers --no-run 2>&1 | sed -n 's/.*Executable.*(\(.*\))$/\1/p')
        [ -n "$program" ] || { FAIL "the hostile clients are built"; closing; }
    fi
    seconds=${SOAK_SECONDS:-40}
    printf '%s=%q\n' SOAK_SECONDS "$seconds" SOAK_BAD_PEERS "${program:+$(cd "$top" && realpath "$program")}" SOAK_HOSTILE "${SOAK_HOSTILE:-}" \
        SOAK_SEED "${SOAK_SEED:-$(date +%Y%m%d)}" SOAK_VERBOSE "${SOAK_VERBOSE:-}" >"$given"
fi
run_in_guest "the soak on RDMA devices" $((${seconds:-0} + 300)) "${BASH_SOURCE[0]}" "$@"

. "$given"
ulimit -l unlimited
device_up
[ -z "$SOAK_VERBOSE" ] || export SOAK_VERBOSE
export SOAK_IN_NS=1 SOAK_SECONDS SOAK_BAD_PEERS SOAK_HOSTILE SOAK_LOAD=$top/build/c-tests/load LOAD_ADDRESS=$address TEST_PATIENCE=${TEST_PATIENCE:-3}
unset RPCRDMA_PROVIDER
if bash "$top/tests/long/soak.sh" 0 "${path#*/}" "$SOAK_SEED"; then ok "$path: the soak, $SOAK_SECONDS s"; else FAIL "$path: the soak, $SOAK_SECONDS s"; fi
device_down
closing
