#!/bin/bash
# races.sh [SECONDS]: looks for data races with the thread sanitizer: threads that serve (c-tests/workers.c), and threads that
# call, are called back and end beside service loops (c-tests/back.c, loads of SECONDS (5) each).
#
# The sanitizer is a feature of unstable Rust, which RUSTC_BOOTSTRAP enables in the stable compiler too. The standard library is
# not recompiled: c-tests/locks.c stands in for its locks.
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
. "$here/../lib.sh"
cd "$scratch" || exit 1
seconds=${1:-5}
target=x86_64-unknown-linux-gnu
runtime=$(rustc --print sysroot 2>/dev/null)/lib/rustlib/$target/lib/librustc-stable_rt.tsan.a
[ -r "$runtime" ] || { skip "data races" "this Rust has no thread sanitizer"; closing; }
command -v clang >/dev/null || { skip "data races" "clang is not installed"; closing; }

# What must not be reported: libtirpc reads the pad of opaque data into a static array; and the sanitizer does not see the fence
# before the compiled standard library drops a shared value.
cat >suppressions <<'END'
race:xdr_bytes
race:drop_slow
END
# said WHAT COMMAND...
said() { local what=$1; shift; "$@" >out 2>&1 || { FAIL "$what" out; closing; }; }
said "the library, for the sanitizer" env RUSTC_BOOTSTRAP=1 \
    RUSTFLAGS="-Zsanitizer=thread -Cunsafe-allow-abi-mismatch=sanitizer" CARGO_TARGET_DIR="$top/target/races" \
    "${CARGO:-cargo}" build --locked --manifest-path "$top/Cargo.toml" --target $target
library=$top/target/races/$target/debug/librpcrdma.a
stands_for=()
while read -r name own; do
    symbol=$(nm "$library" 2>/dev/null | awk -v name="$name" '$1 == "U" && $2 ~ name "$" { print $2; exit }')
    [ -n "$symbol" ] || { FAIL "the standard library has $name"; closing; }
    stands_for+=("-Wl,--wrap=$symbol" "-Wl,--defsym=__wrap_$symbol=$own")
done <<'END'
3std3sys4sync5mutex5futex.*Mutex14lock_contended mutex_lock_contended
3std3sys4sync7condvar5futex.*Condvar4wait condvar_wait
3std3sys4sync7condvar5futex.*Condvar12wait_timeout condvar_wait_timeout
END
said "locks.c compiles" clang -g -O1 -Wall -Wextra -Werror -fsanitize=thread -fPIC -c "$top/c-tests/locks.c"
said "the library is linked" clang -shared -o librpcrdma.so.0 locks.o "${stands_for[@]}" -Wl,-soname,librpcrdma.so.0 \
    -Wl,--whole-archive "$library" -Wl,--no-whole-archive -Wl,--version-script="$top/src/exports.map" -Wl,--gc-sections \
    -Wl,-z,nodelete -Wl,-z,now -Wl,--as-needed -ltirpc -lgcc_s -lrt -lpthread -ldl -lc
ln -s librpcrdma.so.0 librpcrdma.so
for program in workers back; do
    # shellcheck disable=SC2046
    said "$program.c compiles" clang -g -O1 -fsanitize=thread -DOPENS_FILES -pthread -c "$top/c-tests/$program.c" -I"$top/include" \
        $(pkg-config --cflags libtirpc)
    # shellcheck disable=SC2046
    said "$program is linked" clang -o "$program" "$program.o" -rdynamic -Wl,--whole-archive "$runtime" -Wl,--no-whole-archive \
        -L. -Wl,-rpath,"$PWD" -lrpcrdma $(pkg-config --libs libtirpc) -lstdc++ -lpthread -ldl -lrt -lm -lgcc_s
done

# races NAME COMMAND...: the command must succeed, and the sanitizer report nothing.
races() {
    local name=$1; shift
    TSAN_OPTIONS="suppressions=$PWD/suppressions report_signal_unsafe=0 report_thread_leaks=0 die_after_fork=0" \
        timeout -k 5 "$(patient 600)" "$@" >out 2>&1
    local status=$?
    if [ "$status" -eq 0 ] && ! grep -q ThreadSanitizer out; then ok "$name: no data race"; else FAIL "$name (status $status)" out; fi
}
races "threads that serve" ./workers
for loop in svc_run loop; do races "calls back beside $loop, ${seconds} s" ./back $loop "$seconds"; done
closing
