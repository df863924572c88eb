#!/bin/sh
# exports.sh LIBRARY: is what the library exports what exports.txt lists, and what it needs what it may need?
set -u
here=$(dirname "$0")
library=$1
status=0

nm -D --defined-only --with-symbol-versions "$library" |
    awk '$2 != "A" { print $3 }' | LC_ALL=C sort |
    diff -u "$here/exports.txt" - || { echo "FAIL  exports of $library" >&2; status=1; }

dynamic=$(readelf -dW "$library")
for needed in $(echo "$dynamic" | sed -n 's/.*(NEEDED).*\[\(.*\)\]/\1/p'); do
    case $needed in
    libtirpc.so.3 | libc.so.6 | libgcc_s.so.1 | ld-linux*) ;;
    *) echo "FAIL  $library needs $needed" >&2; status=1 ;;
    esac
done
# Without it, a program that loads libtirpc by a plugin would find our names and no functions behind them.
for must in 'NEEDED.*\[libtirpc.so.3\]' 'SONAME.*\[librpcrdma.so.0\]' 'FLAGS_1.*NODELETE'; do
    echo "$dynamic" | grep -q "$must" || { echo "FAIL  $library: readelf -d shows no $must" >&2; status=1; }
done
# An import without version could be bound to the old RPC inside glibc.
unversioned=$(nm -D --undefined-only --with-symbol-versions "$library" |
    awk '$1 == "U" && $2 !~ /@/ { print $2 }')
[ -z "$unversioned" ] || { echo "FAIL  $library imports without version: $unversioned" >&2; status=1; }
[ "$status" -eq 0 ] && echo "ok    exports of $library"
exit "$status"
