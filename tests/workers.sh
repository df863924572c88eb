#!/bin/bash
# workers.sh: rpcrdma_svc_run(3), servers of several threads (c-tests/workers.c); run plainly, with the address sanitizer, and
# under valgrind.
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
. "$here/lib.sh"
cd "$scratch" || exit 1
build=$(dirname "$LIBRPCRDMA")

# compile PROGRAM COMPILER [FLAG...]
compile() {
    "$2" -g -O1 -pthread -Wall -Wextra -Werror -Wno-cast-function-type -o "$1" "$top/c-tests/workers.c" "${@:3}" \
        -I"$top/include" $(pkg-config --cflags libtirpc) \
        -L"$build" -Wl,-rpath,"$build" -lrpcrdma $(pkg-config --libs libtirpc) 2>cc.log
}
compile workers cc || { FAIL "workers.c compiles" cc.log; closing; }
report plain ./workers
if compile workers-asan clang -fsanitize=address,undefined -fno-sanitize-recover=all -static-libsan; then
    # What a server leaves allocated when it ends does not matter.
    report asan env ASAN_OPTIONS=detect_leaks=0 ./workers-asan
else
    skip "with the address sanitizer" "no clang with its sanitizers is installed"
fi
# libtirpc reads an entry beyond its table when it looks for a connection to close.
cat >libtirpc.supp <<'END'
{
   destroy_idle
   Memcheck:Addr4
   obj:*/libtirpc.so.*
   obj:*/libtirpc.so.*
   fun:svc_getreq_common
}
END
if command -v valgrind >/dev/null; then
    report valgrind env RPCRDMA_POLL=0 valgrind -q --error-exitcode=9 --fair-sched=try --suppressions=libtirpc.supp \
        ./workers
else
    skip "under valgrind" "not installed"
fi
closing
