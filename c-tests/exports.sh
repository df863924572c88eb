#!/bin/sh
# exports.sh LIBRARY: does the library export what exports.txt lists, and need only what it may need?
set -u
here=$(dirname "$0")
library=$1
status=0

nm -D --defined-only --with-symbol-versions "$library" |
    awk '$2 != "A" { print $3 }' | LC_ALL=C sort |
    diff -u "$here/exports.txt" - || { echo "FAIL  exports of $library" >&2; status=1; }

# Every program that the library is preloaded into loads what it needs. So it may not need libtirpc, nor the unwinder, except
# where src/unwind.rs has no replacement.
may="libc.so.6 ld-linux*"
readelf -hW "$library" | grep -q "Machine:.*X86-64" || may="$may libgcc_s.so.1"
dynamic=$(readelf -dW "$library")
set -f
for needed in $(echo "$dynamic" | sed -n 's/.*(NEEDED).*\[\(.*\)\]/\1/p'); do
    known=
    for name in $may; do case $needed in $name) known=yes ;; esac; done
    [ -n "$known" ] || { echo "FAIL  $library needs $needed" >&2; status=1; }
done
set +f
for must in 'SONAME.*\[librpcrdma.so.0\]' 'FLAGS_1.*NODELETE'; do
    echo "$dynamic" | grep -q "$must" || { echo "FAIL  $library: readelf -d shows no $must" >&2; status=1; }
done
# An import without a version could be bound to the old RPC inside glibc.
unversioned=$(nm -D --undefined-only --with-symbol-versions "$library" |
    awk '$1 == "U" && $2 !~ /@/ { print $2 }')
[ -z "$unversioned" ] || { echo "FAIL  $library imports without version: $unversioned" >&2; status=1; }
# A program may have functions of its own of these names, which the library would call.
everyday=$(nm -D --undefined-only "$library" | awk '$2 ~ /^(send|recv)(@|$)/ { print $2 }')
[ -z "$everyday" ] || { echo "FAIL  $library imports what programs define: $everyday" >&2; status=1; }
[ "$status" -eq 0 ] && echo "ok    exports of $library"
exit "$status"
