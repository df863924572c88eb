#!/bin/bash
# check.sh [LEG...]: the legs of the C tests; without arguments those that a change must pass.
#
#   tcp        stock libtirpc: the tests themselves are right
#   redirect   programs that know only "tcp", moved by RPCRDMA_REDIRECT
#   rdma       programs that name netid "rdma", the library preloaded
#   placed     rdma, with bindings that have the tests' data placed directly
#   two        rdma, in RPC-over-RDMA Version Two
#   threads    rdma, and four threads of the server serve
#   local      rdma, through shared memory
#   linked     rdma, linked through pkg-config with a staged install
#   asan       rdma, built by clang with the address and undefined-behaviour sanitizers
#   valgrind   rdma, client and server under valgrind
#
# Longer, and by name only:
#   local-threads    local, and four threads of the server serve
#   local-asan       local under the sanitizers
#   local-valgrind   local under valgrind
#   helgrind         rdma, what threads share, client and server under valgrind's helgrind
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
scratch=$(mktemp -d "${TMPDIR:-/tmp}/rpcrdma.XXXXXX")
trap 'rm -rf "$scratch"' EXIT
failed=0

leg() { # NAME COMMAND...
    local name=$1 start=$SECONDS; shift
    if "$@" >"$scratch/$name" 2>&1; then
        echo "ok    C tests, $name: $(tail -n 1 "$scratch/$name") ($((SECONDS - start)) s)"
    else
        failed=$((failed + 1))
        grep -v '^ok' "$scratch/$name"
        echo "FAIL  C tests, $name"
    fi
    # Reports what was skipped, with the reason.
    grep '^skip' "$scratch/$name" | sed 's/.*(\(.*\))$/\1/' | sort | uniq -c | sed 's/^/      skipped:/'
}

run() { bash "$here/run.sh" "$@"; }
linked() {
    make -s -C "$here/.." install DESTDIR="$scratch/stage" PREFIX=/usr/local && STAGED=$scratch/stage run linked
}
asan() { RPCRDMA_POLL=0 CC=clang run "${1:-rdma}" asan; }
valgrind() { RPCRDMA_POLL=0 run "${1:-rdma}" valgrind; }
local-threads() { THREADS=4 run local; }
local-asan() { asan local; }
local-valgrind() { valgrind local; }
# Both ends: threads of a program on CLIENTs of their own and on one that they share, and a server of four threads.
helgrind() {
    RPCRDMA_POLL=0 THREADS=4 run rdma helgrind calls_of_two_threads_overlap several_clients_on_one_descriptor \
        auth_of_the_programs_own_sees_one_call_at_a_time descriptor_is_closed_when_anothers_call_has_ended
}
# lacks LEG: prints what the leg needs that is not installed. clang's sanitizers are a package of their own.
lacks() {
    case $1 in
    *asan)
        echo 'int main(void) { return 0; }' | clang -fsanitize=address,undefined -xc -o "$scratch/try" - 2>/dev/null ||
            echo "no clang with its sanitizers is installed"
        ;;
    *valgrind | helgrind) type -P valgrind >/dev/null || echo "valgrind is not installed" ;;
    esac
}

[ $# -gt 0 ] || set -- tcp redirect rdma placed two threads local linked asan valgrind
for name in "$@"; do
    lacking=$(lacks "$name")
    [ -z "$lacking" ] || { echo "skip  C tests, $name ($lacking)"; continue; }
    case $name in
    tcp | redirect | rdma | placed | two | threads | local) leg "$name" run "$name" ;;
    linked | *asan | *valgrind | helgrind | local-threads) leg "$name" "$name" ;;
    *) sed -n '2,19s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2; exit 2 ;;
    esac
done
[ "$failed" -eq 0 ]
