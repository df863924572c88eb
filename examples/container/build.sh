#!/bin/sh
# build.sh FOLDER: the example file service, built against libtirpc alone.
set -eu
sources=$(cd "$(dirname "$0")/../fileservice" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cp "$sources"/* "$work/"
cd "$work"
for part in -h:fileservice.h -c:xdr.c -l:clnt.c -m:svc.c; do
    rpcgen -M "${part%%:*}" -o "${part#*:}" fileservice.x
done
flags="-O2 -I. $(pkg-config --cflags libtirpc)"
cc $flags -o "$1/fileserver" fileserver.c svc.c xdr.c $(pkg-config --libs libtirpc)
cc $flags -o "$1/filecopy" filecopy.c clnt.c xdr.c $(pkg-config --libs libtirpc)
