#!/bin/bash
# exceptions.sh: C++ exceptions and pthread_exit(3) out of XDR procedures and dispatch routines (c-tests/exceptions.cpp):
# over tcp with stock libtirpc, and over rdma, also with the address sanitizer and under valgrind.
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
. "$here/lib.sh"
cd "$scratch" || exit 1

command -v g++ >/dev/null || { skip "what XDR procedures and dispatch routines throw" "no C++ compiler is installed"; closing; }

# compile PROGRAM [FLAG...]
compile() {
    g++ -std=c++17 -g -O1 -pthread -Wall -Wextra -Werror -Wno-cast-function-type -o "$1" "$top/c-tests/exceptions.cpp" \
        $(pkg-config --cflags libtirpc) "${@:2}" $(pkg-config --libs libtirpc) 2>cc.log
}
# report NAME COMMAND...: passes on the lines of the program, which must succeed and write nothing to stderr.
report() {
    local name=$1 line; shift
    timeout -k 5 "$(patient 300)" "$@" >out 2>err
    local status=$?
    # The address sanitizer prints this at every swapcontext(3).
    sed -i '/ASan doesn.t fully support makecontext\/swapcontext/d' err
    while read -r line; do
        case $line in ok*) ok "$name: ${line#ok    }" ;; esac
    done <out
    [ "$status" -eq 0 ] && [ ! -s err ] || { cat out >>err; FAIL "$name: ends well and in silence (status $status)" err; }
}

compile exceptions || { FAIL "exceptions.cpp compiles" cc.log; closing; }
report tcp ./exceptions tcp
report rdma "${preloaded[@]}" ./exceptions rdma
report "version two" "${preloaded[@]}" RPCRDMA_VERSION=auto ./exceptions rdma
# Without polling, more requests are left to the loop's next turn.
report "shared memory" "${preloaded[@]}" RPCRDMA_PROVIDER=local RPCRDMA_POLL=0 ./exceptions rdma
if compile exceptions-asan -fsanitize=address,undefined -fno-sanitize-recover=all -static-libasan -static-libubsan; then
    # The library is not instrumented: the sanitizer finds uses of freed memory by the library, and errors of the program.
    # The leak checker does not understand a thread that ends in the middle of a call.
    report asan "${preloaded[@]}" ASAN_OPTIONS=detect_leaks=0 ./exceptions-asan rdma
else
    skip "with the address sanitizer" "g++ has none"
fi
if command -v valgrind >/dev/null; then
    report valgrind "${preloaded[@]}" RPCRDMA_POLL=0 valgrind -q --error-exitcode=9 --child-silent-after-fork=no \
        --fair-sched=try ./exceptions rdma
else
    skip "under valgrind" "not installed"
fi
closing
