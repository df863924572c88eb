#!/bin/bash
# sanitized.sh SANITIZER [LEG...]: the C tests with the library itself, Rust's standard library and the programs built for
# AddressSanitizer (address) or ThreadSanitizer (thread). Legs: iwarp, threads (four threads of the server serve), local
# (shared memory), local-threads; without arguments all of them.
#
# The sanitizers of rustc are unstable and need the standard library's sources (rustup component add rust-src);
# RUSTC_BOOTSTRAP=1 lets a stable rustc use them. Where the sources or clang are missing, this is reported and nothing runs.
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/.." && pwd)
sanitizer=${1:-}
case $sanitizer in address | thread) shift ;; *) sed -n '2,4s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2; exit 2 ;; esac
[ $# -gt 0 ] || set -- iwarp threads local local-threads

cargo=$(bash "$root/tests/packages.sh" cargo)
system=$("${RUSTC:-rustc}" --print sysroot)
triple=$("${RUSTC:-rustc}" -vV | sed -n 's/^host: //p')
runtime=$(echo "$system/lib/rustlib/$triple/lib/"librustc-*_rt."${sanitizer:0:1}"san.a)
skip() { echo "skip  C tests, $sanitizer sanitizer ($1)"; exit 0; }
[ -e "$system/lib/rustlib/src/rust/library/std" ] || skip "the sources of Rust's standard library are not installed"
[ -e "$runtime" ] || skip "rustc has no runtime of it"
type -P clang >/dev/null || skip "clang is not installed"

scratch=$(mktemp -d "${TMPDIR:-/tmp}/rpcrdma.XXXXXX")
trap 'rm -rf "$scratch"' EXIT
target=${CARGO_TARGET_DIR:-$root/target}/sanitized-$sanitizer
# A copy of the sources: `make` keeps its library in build/, and this library is for nobody else.
tar -C "$root" --exclude=./target --exclude=./build --exclude=./.git -cf - . | tar -C "$scratch" -xf -
# What the runtime defines comes from the program. Without fat LTO, which would take hours more, for the same code.
build() {
    RUSTC_BOOTSTRAP=1 RUSTFLAGS="-Zsanitizer=$sanitizer -Cforce-frame-pointers=yes" CARGO_PROFILE_RELEASE_LTO=off \
        CARGO_PROFILE_RELEASE_CODEGEN_UNITS=16 make -s -C "$scratch" CARGO="$cargo" CC=clang LDFLAGS="-Wl,-z,undefs" \
        CARGOFLAGS="--locked -Zbuild-std --target $triple --target-dir $target" TARGET="$target/$triple" "$@"
}
build install DESTDIR="$scratch/stage" PREFIX=/usr/local >"$scratch/log" 2>&1 ||
    { tail -n 20 "$scratch/log"; echo "FAIL  the library, built for the $sanitizer sanitizer"; exit 1; }
nm -D --undefined-only "$scratch/stage/usr/local/lib/librpcrdma.so.0" | grep -q " __${sanitizer:0:1}san_init" ||
    { echo "FAIL  the library is not instrumented"; exit 1; }

# Not ours: libtirpc decodes the padding of opaque data into one static buffer, over every transport; and the suite makes a
# call from a signal handler, which allocates over tcp too.
echo 'race:^xdr_opaque$
race:^xdr_bytes$
race:^xdr_string$' >"$scratch/suppressions"
export STAGED=$scratch/stage SANITIZER=$sanitizer RUNTIME=$runtime CC=clang SUITE_OUT=$scratch/programs
export TSAN_OPTIONS=suppressions=$scratch/suppressions:report_signal_unsafe=0
failed=0
for leg in "$@"; do
    case $leg in
    iwarp) environment=(RPCRDMA_PROVIDER=iwarp) ;;
    threads) environment=(RPCRDMA_PROVIDER=iwarp THREADS=4) ;;
    local) environment=(RPCRDMA_PROVIDER=local) ;;
    local-threads) environment=(RPCRDMA_PROVIDER=local THREADS=4) ;;
    *) echo "sanitized.sh: no leg $leg" >&2; exit 2 ;;
    esac
    start=$SECONDS
    if env "${environment[@]}" bash "$here/run.sh" linked sanitized >"$scratch/$leg" 2>&1; then
        echo "ok    C tests, $sanitizer sanitizer, $leg: $(tail -n 1 "$scratch/$leg") ($((SECONDS - start)) s)"
    else
        failed=$((failed + 1))
        grep -v '^ok' "$scratch/$leg"
        echo "FAIL  C tests, $sanitizer sanitizer, $leg"
    fi
done
[ "$failed" -eq 0 ]
