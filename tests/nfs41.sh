#!/bin/bash
# nfs41.sh: the NFS version 4.1 client and server of the examples, with each other: calls from the server to the
# client, over the connection that the client has made (RFC 8167).
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

[ -r "$LIBRPCRDMA" ] || { FAIL "$LIBRPCRDMA is missing"; closing; }
built="client and server build without a warning"
make -C "$top/examples/nfs41" OUT="$scratch" >"$scratch/build" 2>&1 || { FAIL "$built" "$scratch/build"; closing; }
ok "$built"
cd "$scratch" || exit 1

echo content >file
mkfifo commands
exec {commands}<>commands
"${preloaded[@]}" ./nfs41d -a 127.0.0.1 -p 0 file <commands >server 2>server.log &
children+=($!)
wait_for 10 grep -q READY server || { FAIL "the server starts" server.log; closing; }
port=$(sed -n 's/^READY //p' server)

# recalled NAME [OPTION]: a client takes a delegation, and the server recalls it.
recalled() {
    local name=$1 client; shift
    "${preloaded[@]}" ./nfs41 "$@" -p "$port" 127.0.0.1 file 20 >client 2>client.log &
    client=$!; children+=($client)
    wait_for 10 grep -q 'delegation: read' client || { cat client.log >>client; FAIL "$name: a delegation" client; return; }
    echo recall >&$commands
    if wait $client && [ "$(paste -sd, client)" = "$expected" ]; then ok "$name: the client: $expected"
    else cat client.log >>client; FAIL "$name: the client" client; fi
    if [ "$(tail -n 6 server | paste -sd,)" = "$answers" ]; then ok "$name: the server: $answers"
    else cat server.log >>server; FAIL "$name: the server" server; fi
}
expected='delegation: read,callback: CB_NULL,callback: CB_RECALL,delegation returned'
answers='delegation: read,CB_NULL: answered,CB_RECALL: answered,CB_RECALL: status 0,delegation returned,session ended'
recalled "returned after the callback"
answers='delegation: read,CB_NULL: answered,delegation returned,CB_RECALL: answered,CB_RECALL: status 0,session ended'
recalled "returned within the callback" -c
closing
