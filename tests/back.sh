#!/bin/bash
# back.sh [SECONDS [THREADS [SEED]]]: calls back beside threads and service loops (c-tests/back.c): services that end and
# begin while a loop serves; and then, for SECONDS (3) each, THREADS (16) that create CLIENTs, serve, call, are called back,
# end service and destroy beside svc_run() and beside a loop of the program's own. Run plainly, with the address sanitizer,
# and under valgrind.
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
. "$here/lib.sh"
cd "$scratch" || exit 1
build=$(dirname "$LIBRPCRDMA")
seconds=${1:-3}
limit=$((300 + 20 * seconds))
shift $(($# > 0))

# compile PROGRAM COMPILER [FLAG...]
compile() {
    "$2" -g -O1 -pthread -Wall -Wextra -Werror -Wno-cast-function-type -o "$1" "$top/c-tests/back.c" "${@:3}" \
        -I"$top/include" $(pkg-config --cflags libtirpc) \
        -L"$build" -Wl,-rpath,"$build" -lrpcrdma $(pkg-config --libs libtirpc) 2>cc.log
}
# all NAME COMMAND...: runs every test, and both loads.
all() {
    local name=$1 beside; shift
    report "$name" "$@"
    for beside in svc_run loop; do
        report "$name" timeout -k 5 "$(patient $((3 * seconds + 90)))" "$@" $beside "$seconds" "${load[@]}"
    done
}

load=("$@")
compile back cc || { FAIL "back.c compiles" cc.log; closing; }
all plain ./back
if ! command -v clang >/dev/null; then
    skip "with the address sanitizer" "no clang with its sanitizers is installed"
elif compile back-asan clang -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer; then
    # The library is not instrumented: the sanitizer finds uses of freed memory by the library, and errors of the program.
    all asan env ASAN_OPTIONS=detect_leaks=0 ./back-asan
elif grep -q 'libclang_rt\|asan' cc.log; then
    skip "with the address sanitizer" "no clang with its sanitizers is installed"
else
    FAIL "back.c compiles with clang" cc.log
fi
if command -v valgrind >/dev/null; then
    all valgrind env RPCRDMA_POLL=0 valgrind -q --error-exitcode=9 --child-silent-after-fork=no --fair-sched=try ./back
else
    skip "under valgrind" "not installed"
fi
closing
