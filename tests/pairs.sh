#!/bin/bash
# pairs.sh [PAIR ...]: Debian's own RPC programs, unmodified, over tcp and over RDMA.
#
# Each pair of a server and its client runs in a private network with a stock rpcbind. First both are stock: that
# output is the reference. Then the client is moved and the server is not (it must fall back to tcp); then the server
# is moved, and a moved and a stock client call it at the same time on the same port. All outputs must be equal, the
# log must say what was spoken (both are on one host: shared memory, unless the server runs as a user of its own), and
# rpcinfo must show the server under netid rdma.
# Servers that have both udp and tcp on one port are moved from udp, too: stock clients of tcp must not notice, and the port
# also speaks RDMA.
#
# PAIRS_STOCK=1 stops after the stock part. Needs root. Prints "N passed, N failed, N skipped" last.
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
export RPCRDMA_PROVIDER=auto    # as a user has it
. "$here/lib.sh"
PATH=$PATH:/usr/sbin:/sbin

all_pairs=(rpcinfo_statd showmount_mountd showmount_mountd_daemon quota_rquotad quota_rquotad_daemon ogdi_gltpd yp_ypserv)

# A pair sets: packages (what must be installed), program and version, server (the command), clients (one command per
# line), wanted (what the stock output must contain); and may create files. Everything under /var is a private tmpfs.
nfs_files() {
    mount -t tmpfs tmpfs /var/lib/nfs
    mkdir -p /var/lib/nfs/sm /var/lib/nfs/sm.bak /var/lib/nfs/v4recovery /srv
    : >/var/lib/nfs/rmtab
    echo '/srv 127.0.0.0/8(rw,sync,wdelay,hide,nocrossmnt,secure,root_squash,no_all_squash,no_subtree_check,secure_locks,acl,no_pnfs,anonuid=65534,anongid=65534,sec=sys,rw,secure,root_squash,no_all_squash)' >/var/lib/nfs/etab
    chown -R statd /var/lib/nfs/sm /var/lib/nfs/sm.bak 2>/dev/null
}
pair_rpcinfo_statd() {
    # It runs as a user of its own, from whom root's clients take no memory.
    packages='rpc.statd rpcinfo' program=100024 version=1 udp=yes through='software iWARP'
    nfs_files
    server='rpc.statd -F -L -p 12050'
    clients='rpcinfo -T tcp 127.0.0.1 100024 1
rpcinfo -T tcp 127.0.0.1 100024
rpcinfo -a 127.0.0.1.47.18 -T tcp 100024 1'
    by_name='rpcinfo -T rdma 127.0.0.1 100024 1
rpcinfo -T rdma 127.0.0.1 100024
rpcinfo -a 127.0.0.1.47.18 -T rdma 100024 1'
    wanted='program 100024 version 1 ready and waiting'
}
pair_showmount_mountd() {
    packages='rpc.mountd showmount' program=100005 version=3 udp=yes
    nfs_files
    server='rpc.mountd -F -p 12048 -N 4'
    clients='showmount -e --no-headers 127.0.0.1
showmount -a 127.0.0.1'
    wanted='/srv'
}
pair_showmount_mountd_daemon() {
    pair_showmount_mountd
    server='rpc.mountd -p 12048 -N 4' daemon=rpc.mountd
}
pair_quota_rquotad() {
    packages='rpc.rquotad perl' program=100011 version=2 udp=yes
    perl -MQuota -e 1 2>/dev/null || packages+=' libquota-perl'
    server='rpc.rquotad -F -p 12875'
    clients='perl -MQuota -e "Quota::rpcpeer(0,1,2000);Quota::rpcquery(q(127.0.0.1),q(/x),0);print(Quota::strerr(),qq(\n))"'
    wanted='Quotas not enabled, no quota for this user'
}
pair_quota_rquotad_daemon() {
    pair_quota_rquotad
    server='rpc.rquotad -p 12875' daemon=rpc.rquotad
}
pair_ogdi_gltpd() {
    packages='gltpd ogdi_info' program=536870913 version=1
    server='gltpd'
    clients='ogdi_info -u gltp://127.0.0.1/vrf/nonexistent'
    wanted="Can't open CAT file"
}
pair_yp_ypserv() {
    packages='ypserv ypcat ypmatch' program=100004 version=2
    mount -t tmpfs tmpfs /var/yp
    mkdir /var/yp/testdom
    printf '255.0.0.0 127.0.0.0\n' >/var/yp/securenets
    for i in $(seq 2000); do echo "key$i value number $i of a map that is long enough to need more than one message $((i * 7919))"; done |
        /usr/lib/yp/makedbm - /var/yp/testdom/big.map
    server='ypserv -f -p 12011'
    clients='ypcat -k -d testdom -h 127.0.0.1 big.map
ypmatch -d testdom -h 127.0.0.1 key7 big.map
ypmatch -k -d testdom -h 127.0.0.1 key1999 key1 big.map'
    wanted='key1999 value number 1999'
}

# call PREFIX...: runs all clients, each with the prefix. LC_ALL=C, no terminal.
call() {
    local line
    while IFS= read -r line; do
        echo "\$ ${line// -T rdma / -T tcp }"
        eval "timeout $(patient 20) $* $line" </dev/null
        echo "exit $?"
    done <<<"$list"
}
same() { # NAME GOT
    if cmp -s "$scratch/tcp" "$2"; then ok "$1"; else diff "$scratch/tcp" "$2" >"$scratch/diff"; FAIL "$1" "$scratch/diff"; fi
}
# Without a shell in between: the process that is started is the one that is killed.
start_server() { # LOG PREFIX...
    local log=$1; shift
    # shellcheck disable=SC2086
    "$@" $server </dev/null >"$log" 2>&1 &
    server_pid=$!; children+=("$server_pid")
    wait_for 10 rpcinfo -T tcp 127.0.0.1 "$program" "$version" || { FAIL "$pair: the server does not come up" "$log"; return 1; }
}
stop_server() {
    stop "$server_pid"
    # A daemon is no longer our child, but still in this process id namespace, where everything is ours.
    [ -z "$daemon" ] || kill $(pidof "$daemon") 2>/dev/null
    [ -z "$daemon" ] || wait_for 5 eval '! pidof $daemon'
    rpcinfo -d "$program" "$version" 2>/dev/null
}

run_pair() {
    pair=$1 by_name='' daemon='' udp='' through='shared memory'
    "pair_$pair"
    for tool in $packages; do
        command -v "$tool" >/dev/null || { skip "$pair" "$tool is not installed"; return; }
    done
    list=$clients

    start_server "$scratch/server.log" env || return
    call env >"$scratch/tcp" 2>&1
    if grep -qF "$wanted" "$scratch/tcp"; then ok "$pair: stock over tcp"; else FAIL "$pair: stock over tcp" "$scratch/tcp"; return; fi
    if [ -n "${PAIRS_STOCK:-}" ]; then stop_server; return; fi

    call "${moved[@]}" >"$scratch/out" 2>&1
    same "$pair: moved client, stock server" "$scratch/out"
    call "${moved[@]}" RPCRDMA_LOG=info >/dev/null 2>"$scratch/log"
    if fell_back "$scratch/log" && ! spoke_rdma "$scratch/log"; then ok "$pair: ... and it was tcp"; else FAIL "$pair: ... and it was tcp" "$scratch/log"; fi
    stop_server

    start_server "$scratch/server.log" "${moved[@]}" RPCRDMA_LOG=info || return
    if rpcinfo | awk -v p="$program" '$1 == p && $3 == "rdma" { found = 1 } END { exit !found }'; then
        ok "$pair: moved server is registered under rdma"
    else
        rpcinfo >"$scratch/rpcinfo"; FAIL "$pair: moved server is registered under rdma" "$scratch/rpcinfo"
    fi
    call "${moved[@]}" >"$scratch/out" 2>&1 & local first=$!
    call env >"$scratch/out2" 2>&1
    wait "$first"
    same "$pair: moved client, moved server" "$scratch/out"
    same "$pair: stock client at the same time on the same port" "$scratch/out2"
    call "${moved[@]}" RPCRDMA_LOG=info RPCRDMA_FALLBACK=no >/dev/null 2>"$scratch/log"
    if spoke_rdma "$scratch/log" && ! grep "$rdma_line" "$scratch/log" | grep -qv "$through"; then
        ok "$pair: ... and it was rdma, through $through"
    else
        FAIL "$pair: ... and it was rdma, through $through" "$scratch/log"
    fi
    if [ -n "$udp" ]; then
        stop_server
        start_server "$scratch/server.log" "${preloaded[@]}" RPCRDMA_REDIRECT=udp RPCRDMA_LOG=warn || return
        call env >"$scratch/out" 2>&1
        same "$pair: moved from udp, it keeps tcp" "$scratch/out"
        "${preloaded[@]}" rpcinfo -T rdma 127.0.0.1 "$program" "$version" >"$scratch/out" 2>&1
        if grep -q 'ready and waiting' "$scratch/out" && ! grep '^rpcrdma' "$scratch/server.log" >>"$scratch/out"; then
            ok "$pair: moved from udp, it is served under rdma"
        else
            FAIL "$pair: moved from udp, it is served under rdma" "$scratch/out"
        fi
    fi
    if [ -n "$by_name" ]; then
        list=$by_name
        call "${preloaded[@]}" >"$scratch/out" 2>&1
        same "$pair: netid rdma by name" "$scratch/out"
        # The request for the dump goes to rpcbind itself, whatever the netid.
        rpcinfo 127.0.0.1 >"$scratch/tcp" 2>&1
        "${preloaded[@]}" rpcinfo -T rdma 127.0.0.1 >"$scratch/out" 2>&1
        same "$pair: rpcinfo -T rdma lists what rpcbind knows" "$scratch/out"
    fi
    stop_server
}

if [ "${1:-}" = --inside ]; then
    run_pair "$2"
    exit 0
fi
why=$(bash "$here/ns.sh" --possible) || { skip pairs "$why"; closing; }
[ -n "${PAIRS_STOCK:-}" ] || [ -r "$LIBRPCRDMA" ] || { FAIL "$LIBRPCRDMA is missing"; closing; }
[ $# -gt 0 ] || set -- "${all_pairs[@]}"
for pair; do
    bash "$here/ns.sh" bash "$here/pairs.sh" --inside "$pair" >"$scratch/lines" 2>&1 </dev/null
    cat "$scratch/lines"
    p=$(grep -c '^ok ' "$scratch/lines") f=$(grep -c '^FAIL ' "$scratch/lines") s=$(grep -c '^skip ' "$scratch/lines")
    passed=$((passed + p)) failed=$((failed + f)) skipped=$((skipped + s))
    [ $((p + f + s)) -gt 0 ] || FAIL "$pair: said nothing"
done
closing
