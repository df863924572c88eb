#!/bin/bash
# run.sh LEG [valgrind | helgrind | asan | sanitized] [test ...]: builds and runs the C tests.
#
#   tcp        stock libtirpc alone: shows that the tests tell the truth about libtirpc
#   rdma       the library preloaded; the programs name netid "rdma"
#   redirect   the library preloaded; the programs name "tcp" and are moved by RPCRDMA_REDIRECT
#   placed     rdma, and a binding (suite.conf) has the tests' data placed directly
#   two        rdma, in RPC-over-RDMA Version Two
#   threads    rdma, and four threads of the server serve
#   local      rdma, with the device that the library takes by itself: shared memory
#   linked     linked with the library through pkg-config; STAGED names the staged install
#              (make install DESTDIR=...); the programs name "rdma"
#
# helgrind looks for races and for misuse of locks; helgrind.supp lists what it cannot know. asan instruments the programs;
# sanitized does so for a library that is instrumented too (sanitized.sh): SANITIZER names the sanitizer, and RUNTIME its runtime.
#
# As root the tests run in a private network with an rpcbind of their own. An ordinary user has no rpcbind, and tests that
# need one are skipped. Prints one line per test and "N passed, N failed, N skipped". CC chooses the compiler.
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
if [ -z "${SUITE_IN_NS:-}" ] && bash "$here/../tests/ns.sh" --possible >/dev/null; then
    SUITE_IN_NS=1 exec bash "$here/../tests/ns.sh" bash "${BASH_SOURCE[0]}" "$@"
fi
. "$here/../tests/lib.sh"

leg=${1:-tcp} tool=
shift
case ${1:-} in valgrind | helgrind | asan | sanitized) tool=$1; shift ;; esac
make_flags=() suite_flags=() environment=()
case $leg in
tcp) suite_flags=(-n tcp) ;;
rdma) suite_flags=(-n rdma -L) environment=(LD_PRELOAD="$LIBRPCRDMA") ;;
placed)
    # A shorter inline threshold, so that more messages have chunks.
    suite_flags=(-n rdma -L -B)
    environment=(LD_PRELOAD="$LIBRPCRDMA" RPCRDMA_BINDINGS="$here/suite.conf" RPCRDMA_INLINE=4096)
    ;;
two) suite_flags=(-n rdma -L) environment=(LD_PRELOAD="$LIBRPCRDMA" RPCRDMA_VERSION=2 RPCRDMA_INLINE=4096) ;;
threads) suite_flags=(-n rdma -L) environment=(LD_PRELOAD="$LIBRPCRDMA" THREADS=4) ;;
local) suite_flags=(-n rdma -L) environment=(LD_PRELOAD="$LIBRPCRDMA" RPCRDMA_PROVIDER=auto) ;;
redirect) suite_flags=(-n tcp -L -R) environment=(LD_PRELOAD="$LIBRPCRDMA" RPCRDMA_REDIRECT=tcp) ;;
linked)
    : "${STAGED:?names the staged install}"
    package=$(find "$STAGED" -name rpcrdma.pc | head -n 1)
    [ -n "$package" ] || { echo "run.sh: no rpcrdma.pc under $STAGED" >&2; exit 1; }
    PKG_CONFIG_PATH=$(dirname "$package")
    export PKG_CONFIG_PATH PKG_CONFIG_SYSROOT_DIR=
    # The .pc file names the final place; the stage stands in for it.
    libdir=$STAGED$(pkg-config --variable=libdir rpcrdma)
    includedir=$STAGED$(pkg-config --variable=includedir rpcrdma)
    export CPATH=$includedir LIBRARY_PATH=$libdir LD_LIBRARY_PATH=$libdir
    make_flags=(LINKED=yes) suite_flags=(-n rdma -L)
    ;;
*) sed -n '2,15s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2; exit 2 ;;
esac
case $leg in rdma | redirect | placed | two | threads | local) [ -r "$LIBRPCRDMA" ] || { echo "run.sh: $LIBRPCRDMA is missing" >&2; exit 1; } ;; esac

case $tool in
asan)
    # The stack frames of a cancelled thread stay marked as in use; the sanitizer itself trips over them when it frees the
    # thread's signal stack.
    make_flags+=(SANITIZE=yes) suite_flags+=(-s) environment+=(ASAN_OPTIONS=detect_leaks=0:use_sigaltstack=0)
    ;;
sanitized)
    make_flags+=(SANITIZE="${SANITIZER:?}" RUNTIME="${RUNTIME:?}")
    suite_flags+=(-s) environment+=(ASAN_OPTIONS=detect_leaks=0:use_sigaltstack=0)
    ;;
valgrind | helgrind) suite_flags+=(-s) ;;
esac
[ -z "${SUITE_IN_NS:-}" ] || suite_flags+=(-b)
[ -z "${SUITE_SLOW:-}" ] || suite_flags+=(-s)

# SUITE_OUT: where the programs have been built for this leg.
out=${SUITE_OUT:-$scratch/build}
make -s -j2 -C "$here" OUT="$out" "${make_flags[@]}" >"$scratch/build.log" 2>&1 ||
    { cat "$scratch/build.log"; exit 1; }
suite=$out/suite
command -v ${CXX:-g++} >/dev/null || skip "the header as C++" "no C++ compiler is installed"
if [ "$tool" = asan ]; then
    for program in "$suite" "$out/server"; do
        nm "$program" | grep -q ' __asan_init' || { echo "FAIL  $program is not instrumented"; exit 1; }
    done
fi
if [ "$leg" = linked ]; then
    for program in "$suite" "$out/server"; do
        readelf -d "$program" | grep -q 'NEEDED.*librpcrdma' || { echo "FAIL  $program does not need librpcrdma"; exit 1; }
    done
fi

if pkg-config --exists krb5-gssapi && [ -x "$(PATH=$PATH:/usr/sbin command -v krb5kdc)" ]; then
    if PATH=$PATH:/usr/sbin bash "$here/kdc.sh" "$scratch/kdc" >"$scratch/kdc.env"; then
        . "$scratch/kdc.env"
        children+=("$(cat "$scratch/kdc/pid")")
        suite_flags+=(-g)
    fi
fi

wrap=()
if [ "$tool" = valgrind ]; then
    wrap=(valgrind -q --error-exitcode=99 --child-silent-after-fork=no --fair-sched=try)
    environment+=(SUITE_WRAP="${wrap[*]}")
elif [ "$tool" = helgrind ]; then
    wrap=(valgrind --tool=helgrind -q --error-exitcode=99 --child-silent-after-fork=no --fair-sched=try
        --suppressions="$here/helgrind.supp")
    environment+=(SUITE_WRAP="${wrap[*]}")
fi
env "${environment[@]}" "${wrap[@]}" "$suite" "${suite_flags[@]}" "$@"
