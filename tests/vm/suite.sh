#!/bin/bash
# suite.sh [PATH...]: the C tests over RDMA devices, in a guest: the programs of the leg "rdma", the same tests as over software
# iWARP; of the legs "placed" and "two" what these are about, calls and their data; and c-tests/nested.c. For the paths see
# guest.sh; default: those of verbs. Run by `make check-vm`.
. "$(dirname "${BASH_SOURCE[0]}")/guest.sh"
[ $# -gt 0 ] || set -- verbs/rxe verbs/siw
if [ -z "${IN_GUEST:-}" ]; then
    # Compiled here, where that is much faster. The library's own tests for a device are run in the guest too.
    make -s -C "$top/c-tests" || { FAIL "the C tests are built"; closing; }
    cc -O1 -pthread -Wall -Wextra -Werror -Wno-cast-function-type -o "$top/build/c-tests/nested" "$top/c-tests/nested.c" \
        $(pkg-config --cflags --libs libtirpc) || { FAIL "nested.c is built"; closing; }
    (cd "$top" && "${CARGO:-cargo}" test --locked --lib --no-run >/dev/null 2>&1) || { FAIL "the library's tests are built"; closing; }
fi
run_in_guest "the C tests on RDMA devices" 1200 "${BASH_SOURCE[0]}" "$@"

# 16 MiB both ways, and fifty connections, are more than the usual limit of 8 MiB.
ulimit -l unlimited
mkdir -p /run/rpcbind
must rpcbind -w
device_up
unit=$(find "${CARGO_TARGET_DIR:-$top/target}/debug/deps" -name 'rpcrdma-*' -type f -perm -1 -printf '%T@ %p\n' | sort -n | tail -n 1 | cut -d ' ' -f 2)
if VERBS_ADDRESS=$address timed timeout "$(patient 300)" "$unit" --ignored --test-threads=1 on_a_device >"$scratch/unit" 2>&1 && grep -q ' [1-9][0-9]* passed' "$scratch/unit"; then
    ok "$path: the contract of a queue pair, and both directions under load ($(seconds))"
else
    FAIL "$path: the contract of a queue pair, and both directions under load ($(seconds))" "$scratch/unit"
fi
# The private network of run.sh would have no device; in the guest everything is private anyway.
calls='^(payload|every_length|result|reply|fixed|array|string|linked|union|argument|timeout|late|many|batch|several|eight|server_|svc_destroy|fifty)'
export SUITE_OUT=$top/build/c-tests
for leg in rdma placed two; do
    tests=()
    [ $leg = rdma ] || mapfile -t tests < <("$SUITE_OUT/suite" --list | grep -E "$calls")
    RPCRDMA_MAX_REPLY=17M SUITE_SLOW=1 SUITE_IN_NS=1 SUITE_ADDRESS=$address timed bash "$top/c-tests/run.sh" $leg "${tests[@]}" >"$scratch/suite" 2>&1
    passed_all=$?
    grep '^FAIL' -A 8 "$scratch/suite" | sed 's/^/      | /'
    if [ $passed_all -eq 0 ]; then ok "$path: C tests, $leg: $(tail -n 1 "$scratch/suite") ($(seconds))"
    else FAIL "$path: C tests, $leg: $(tail -n 1 "$scratch/suite") ($(seconds))"; fi
    grep '^skip' "$scratch/suite" | sed 's/.*(\(.*\))$/\1/' | sort | uniq -c | sed 's/^/      skipped:/'
done
cd "$scratch" || exit 1
for way in '' turns shared 'shared turns'; do
    # shellcheck disable=SC2086
    report "$path${way:+, }$way" "${preloaded[@]}" RPCRDMA_PROVIDER=verbs "$SUITE_OUT/nested" rdma "$address" $way
done
device_down
closing
