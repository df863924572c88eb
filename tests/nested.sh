#!/bin/bash
# nested.sh: dispatch routines that run the service loop, or jump out of it (c-tests/nested.c): over stock tcp, with the library's
# svc_run and with the program's own loop; threads with a CLIENT each or one for all; and under valgrind.
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
. "$here/lib.sh"
cd "$scratch" || exit 1

cc -g -O1 -pthread -Wall -Wextra -Werror -Wno-cast-function-type -o nested "$top/c-tests/nested.c" \
    $(pkg-config --cflags --libs libtirpc) 2>cc.log || { FAIL "nested.c compiles" cc.log; closing; }
report stock ./nested tcp
for provider in local iwarp; do
    for way in '' turns shared 'shared turns'; do
        # shellcheck disable=SC2086
        report "$provider${way:+, }$way" "${preloaded[@]}" RPCRDMA_PROVIDER=$provider ./nested rdma $way
    done
done
for way in again 'again turns' stops leaks; do
    # shellcheck disable=SC2086
    report "$way" "${preloaded[@]}" ./nested rdma $way
done
if command -v valgrind >/dev/null; then
    for way in '' shared; do
        # shellcheck disable=SC2086
        report "valgrind${way:+, }$way" "${preloaded[@]}" valgrind -q --error-exitcode=9 --fair-sched=try ./nested rdma $way
    done
else
    skip "under valgrind" "not installed"
fi
closing
