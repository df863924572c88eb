#!/bin/bash
# late.sh: requests that a server puts off and answers later, beside its loop, and routines that take their time with a long call
# (c-tests/late.c); run plainly, and under valgrind. And forks in the midst of a routine (c-tests/handler.c).
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
. "$here/lib.sh"
cd "$scratch" || exit 1
build=$(dirname "$LIBRPCRDMA")
export RPCRDMA_BY_REFERENCE=yes RPCRDMA_MAX_REPLY=268435456

for program in late handler; do
    cc -g -O1 -pthread -Wall -Wextra -Werror -Wno-cast-function-type -o $program "$top/c-tests/$program.c" \
        -I"$top/include" $(pkg-config --cflags libtirpc) \
        -L"$build" -Wl,-rpath,"$build" -lrpcrdma $(pkg-config --libs libtirpc) 2>cc.log ||
        { FAIL "$program.c compiles" cc.log; closing; }
done
report tcp ./handler tcp
report plain ./late
report iwarp env RPCRDMA_PROVIDER=iwarp RPCRDMA_POLL=0 ./late pulled
report iwarp env RPCRDMA_PROVIDER=iwarp ./late much
report iwarp env RPCRDMA_PROVIDER=iwarp ./handler held
for provider in local iwarp; do
    report "$provider" env RPCRDMA_PROVIDER=$provider ./handler
    report "$provider" env RPCRDMA_PROVIDER=$provider RPCRDMA_CREDITS=4 ./late staying
    report "$provider" env RPCRDMA_PROVIDER=$provider RPCRDMA_CREDITS=96 ./late crowd
    report "$provider" env RPCRDMA_PROVIDER=$provider ./late slow
    for way in shared beside 'beside children'; do
        # shellcheck disable=SC2086
        report "$provider" env RPCRDMA_PROVIDER=$provider ./late $way
    done
done
if command -v valgrind >/dev/null; then
    for way in '' shared beside; do
        # shellcheck disable=SC2086
        report valgrind env RPCRDMA_POLL=0 valgrind -q --error-exitcode=9 --fair-sched=try ./late $way
    done
else
    skip "under valgrind" "not installed"
fi
closing
