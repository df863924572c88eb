#!/bin/bash
# demo.sh: the demos do what the README says, as root (netid "rdma", rpcbind) and as an ordinary user (fixed ports).
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
. "$here/lib.sh"

try() { # NAME LINE COMMAND...: the command ends well, and has said LINE.
    local name=$1 line=$2; shift 2
    if "$@" >"$scratch/out" 2>&1 && grep -q "^$line" "$scratch/out"; then ok "$name"; else FAIL "$name" "$scratch/out"; fi
    grep -E '^(transport|tcp |software |shared |\.\.\. )' "$scratch/out" | sed 's/^/      /'
}
try_both() { # USER EXAMPLES PREFIX...
    local user=$1 examples=$2; shift 2
    try "demo of copies as $user" "What the last round has left" "$@" bash "$examples/demo.sh"
    try "demo of calls back as $user" "The watch service told " "$@" bash "$examples/watch/demo.sh"
}

try_both "$(id -un)" "$top/examples" env
if [ "$(id -u)" -eq 0 ]; then
    # The checkout may lie where other users cannot read it.
    copy=$scratch/copy
    mkdir "$copy" "$copy/build" "$copy/tmp"
    cp -r "$top/examples" "$top/tests" "$top/include" "$copy" && cp "$LIBRPCRDMA" "$copy/build/librpcrdma.so.0"
    chmod -R a+rX "$scratch" && chmod 777 "$copy/tmp"
    try_both "an ordinary user" "$copy/examples" setpriv --reuid 65534 --regid 65534 --clear-groups \
        env -u LIBRPCRDMA HOME=/nonexistent TMPDIR="$copy/tmp"
else
    skip "demo as root" "this is $(id -un)"
fi
closing
