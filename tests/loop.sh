#!/bin/bash
# loop.sh: svc_run(3) (c-tests/loop.c): libtirpc's own, and the library's over tcp and over rdma; run plainly, and under valgrind.
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
. "$here/lib.sh"
cd "$scratch" || exit 1

cc -g -O1 -pthread -Wall -Wextra -Werror -Wno-cast-function-type -o loop "$top/c-tests/loop.c" \
    $(pkg-config --cflags --libs libtirpc) 2>cc.log || { FAIL "loop.c compiles" cc.log; closing; }
report stock ./loop tcp
report tcp "${preloaded[@]}" ./loop tcp own
report rdma "${preloaded[@]}" ./loop rdma own
report 'many, tcp' "${preloaded[@]}" ./loop tcp own many
report many "${preloaded[@]}" ./loop rdma own many
if command -v valgrind >/dev/null; then
    report valgrind "${preloaded[@]}" RPCRDMA_POLL=0 valgrind -q --error-exitcode=9 --fair-sched=try ./loop rdma own
else
    skip "under valgrind" "not installed"
fi
closing
