#!/bin/bash
# inside.sh: what XDR procedures do with the very handle that they run for (c-tests/inside.c); run plainly, with the address
# sanitizer, and under valgrind.
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
. "$here/lib.sh"
cd "$scratch" || exit 1
build=$(dirname "$LIBRPCRDMA")

# compile PROGRAM COMPILER [FLAG...]
compile() {
    "$2" -g -O1 -pthread -Wall -Wextra -Werror -Wno-cast-function-type -o "$1" "$top/c-tests/inside.c" "${@:3}" \
        -I"$top/include" $(pkg-config --cflags libtirpc) \
        -L"$build" -Wl,-rpath,"$build" -lrpcrdma $(pkg-config --libs libtirpc) 2>cc.log
}
compile inside cc || { FAIL "inside.c compiles" cc.log; closing; }
report plain ./inside
report "version two" env RPCRDMA_VERSION=2 ./inside
if ! command -v clang >/dev/null; then
    skip "with the address sanitizer" "no clang with its sanitizers is installed"
elif compile inside-asan clang -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer; then
    # The library is not instrumented: the sanitizer finds uses of freed memory by the library, and errors of the program.
    report asan env ASAN_OPTIONS=detect_leaks=0 ./inside-asan
elif grep -q 'libclang_rt\|asan' cc.log; then
    skip "with the address sanitizer" "no clang with its sanitizers is installed"
else
    FAIL "inside.c compiles with clang" cc.log
fi
if command -v valgrind >/dev/null; then
    report valgrind env RPCRDMA_POLL=0 valgrind -q --error-exitcode=9 --child-silent-after-fork=no --fair-sched=try ./inside
else
    skip "under valgrind" "not installed"
fi
closing
