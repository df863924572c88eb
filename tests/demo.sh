#!/bin/bash
# demo.sh: the demo does what the README says, as root (netid "rdma", rpcbind) and as an ordinary user (fixed ports).
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
. "$here/lib.sh"

try() { # NAME COMMAND...
    local name=$1; shift
    if "$@" >"$scratch/out" 2>&1 && grep -q '^placed ' "$scratch/out"; then ok "$name"; else FAIL "$name" "$scratch/out"; fi
    grep -E '^(transport|tcp |rdma |placed )' "$scratch/out" | sed 's/^/      /'
}

try "demo as $(id -un)" bash "$top/examples/demo.sh"
if [ "$(id -u)" -eq 0 ]; then
    # The checkout may lie where nobody else may look.
    copy=$scratch/copy
    mkdir "$copy" "$copy/build" "$copy/tmp"
    cp -r "$top/examples" "$top/tests" "$copy" && cp "$LIBRPCRDMA" "$copy/build/librpcrdma.so.0"
    chmod -R a+rX "$scratch" && chmod 777 "$copy/tmp"
    try "demo as an ordinary user" setpriv --reuid 65534 --regid 65534 --clear-groups \
        env -u LIBRPCRDMA HOME=/nonexistent TMPDIR="$copy/tmp" bash "$copy/examples/demo.sh"
else
    skip "demo as root" "this is $(id -un)"
fi
closing
