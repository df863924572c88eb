#!/bin/bash
# versions.sh: two versions of RPC-over-RDMA. A file service that knows only libtirpc, its client and its server each with
# Version One only, with both, and with Version Two only: they speak the highest version that both have, on one
# connection, and no call is lost. If they have none in common, the error says so, and what helps.
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
. "$here/lib.sh"
[ -r "$LIBRPCRDMA" ] || { FAIL "$LIBRPCRDMA is missing"; closing; }
cd "$scratch" || exit 1
cp "$top"/examples/fileservice/* .
for part in -h:fileservice.h -c:xdr.c -l:clnt.c -m:svc.c; do
    rpcgen -M "${part%%:*}" -o "${part#*:}" fileservice.x || { FAIL "rpcgen"; closing; }
done
flags="-O2 -I. $(pkg-config --cflags libtirpc)"
libs=$(pkg-config --libs libtirpc)
# shellcheck disable=SC2086
if ! cc $flags -o fileserver fileserver.c svc.c xdr.c $libs || ! cc $flags -o filecopy filecopy.c clnt.c xdr.c $libs; then
    FAIL "the file service compiles"; closing
fi
mkdir tree
for size in 0 1 900 1100 3900 4100 16000 70000 1100000; do head -c $size /dev/urandom >tree/$size; done
moved+=(RPCRDMA_PROVIDER=iwarp RPCRDMA_FALLBACK=no RPCRDMA_LOG=wire)

# serve SETTING...: starts a server of the empty directory `served`, with these settings.
serve() {
    rm -rf served && mkdir served
    log=$scratch/server.log
    : >"$log"
    start_ready "${moved[@]}" "$@" ./fileserver -n tcp -a 127.0.0.1 -p 0 -d served || { FAIL "a server with $*" "$log"; closing; }
}
# copy SETTING...: copies a tree to the server, with these settings. The client's messages are in client.log.
copy() { timeout "$(patient 30)" "${moved[@]}" "$@" ./filecopy -n tcp "127.0.0.1:$port" tree >out 2>client.log </dev/null; }

# spoken VERSION: the tree has arrived, and every RPC message was of that version, on one connection.
spoken() {
    local of_two of_one connections
    of_two=$(grep -c ' RDMA2_\(MSG\|NOMSG\) ' client.log)
    of_one=$(grep -c ' RDMA_\(MSG\|NOMSG\) ' client.log)
    connections=$(grep -c "$rdma_line" client.log)
    diff -r tree served >/dev/null && [ "$connections" -eq 1 ] && ! grep -q 'connecting anew' client.log || return 1
    if [ "$1" = 2 ]; then [ "$of_two" -gt 18 ] && [ "$of_one" -eq 0 ]; else [ "$of_one" -gt 18 ] && [ "$of_two" -eq 0 ]; fi
}

for server_has in 1 auto 2; do
    for client_has in 1 auto 2; do
        what="client with version $client_has, server with $server_has"
        serve RPCRDMA_VERSION=$server_has
        copy RPCRDMA_VERSION=$client_has
        status=$?
        case $client_has$server_has in
        12 | 21)
            if [ $status -ne 0 ] && [ $status -ne 124 ] && grep -v ' wire: ' client.log |
                grep -q "speaks RPC-over-RDMA versions $server_has to $server_has, not $client_has; set RPCRDMA_VERSION=auto"; then
                ok "$what: an error that helps"
            else
                FAIL "$what: an error that helps (status $status)" client.log
            fi
            continue ;;
        22 | 2auto | auto2 | autoauto) common=2 ;;
        *) common=1 ;;
        esac
        stop "$server"
        if [ $status -eq 0 ] && spoken $common; then ok "$what: version $common"
        else FAIL "$what: version $common (status $status)" client.log; fi
    done
done

# Receives of every size at both ends: each end announces what it takes, as in RFC 8797 and as in the draft.
for sizes in '1024 1024' '1024 65536' '65536 4096' '8192 262144'; do
    what="Receives of ${sizes/ / and }"
    serve RPCRDMA_VERSION=auto RPCRDMA_INLINE="${sizes#* }"
    copy RPCRDMA_VERSION=auto RPCRDMA_INLINE="${sizes% *}"
    status=$?
    stop "$server"
    told() { sed -n 's/.*RPC-over-RDMA version 2, inline \([0-9]*\) bytes out and \([0-9]*\) in.*/\1 \2/p' "$1" | tail -n 1; }
    least() { echo $(($1 > 4096 ? $1 : 4096)); }
    # shellcheck disable=SC2086
    set -- $sizes
    if [ $status -eq 0 ] && spoken 2 && [ "$(told client.log)" = "$(least $2) $(least $1)" ]; then
        ok "$what: $(told client.log) bytes out and in at the client"
    else
        FAIL "$what: $(told client.log) (status $status)" client.log
    fi
done
closing
