#!/bin/bash
# api.sh: the library's own C API (c-tests/api.c), linked, with every compiler that is there, as C, under valgrind, and
# with wrong settings.
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
. "$here/lib.sh"
cd "$scratch" || exit 1
build=$(dirname "$LIBRPCRDMA")
version=$(sed -n 's/^version = "\(.*\)"/\1/p' "$top/Cargo.toml" | head -n 1)

# What api.c expects of Receives and calls back holds for this inline threshold.
export RPCRDMA_INLINE=4096
for compiler in gcc clang; do
    command -v $compiler >/dev/null || { skip "api.c with $compiler" "not installed"; continue; }
    if $compiler -g -pthread -Wall -Wextra -Werror -Wno-cast-function-type -o "api-$compiler" "$top/c-tests/api.c" \
        -I"$top/include" $(pkg-config --cflags libtirpc) \
        -L"$build" -Wl,-rpath,"$build" -lrpcrdma $(pkg-config --libs libtirpc) 2>cc.log; then
        report $compiler "./api-$compiler" "$version"
    else
        FAIL "api.c compiles with $compiler" cc.log
    fi
done
report version-two env RPCRDMA_VERSION=auto ./api-gcc "$version"
# Each transport that accepts is looked at then, and this one had been already.
report moved env RPCRDMA_REDIRECT=tcp ./api-gcc accepted
report wrong-variable env RPCRDMA_CREDIT=8 ./api-gcc misconfigured 'RPCRDMA_CREDIT: no such environment variable; did you mean RPCRDMA_CREDITS?'
report wrong-value env RPCRDMA_CREDITS=lots ./api-gcc misconfigured 'RPCRDMA_CREDITS="lots": must be a whole number from 1 to 4096'
# The servers are children: they have to be silent too, and report what is wrong on standard error.
if command -v valgrind >/dev/null; then
    for spoken in 1 auto; do
        report "valgrind, version $spoken" env RPCRDMA_POLL=0 RPCRDMA_VERSION=$spoken \
            valgrind -q --error-exitcode=9 --child-silent-after-fork=no \
            --leak-check=full --show-leak-kinds=definite --errors-for-leak-kinds=definite ./api-gcc "$version"
    done
else
    skip "api.c under valgrind" "not installed"
fi
closing
