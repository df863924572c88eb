#!/bin/bash
# nfs.sh: the NFS version 3 server and client of the examples, which know only libtirpc, with files of awkward
# sizes, symbolic links and a directory of many pages: stock over tcp, over netid rdma on a fixed port, and as
# programs for tcp that are moved. Each with results in memory of libtirpc's and in a buffer of the client's (-P).
#
# As root it runs in a private network: the first leg finds its server by rpcbind, the second one on port 20049. As
# an ordinary user all servers take free ports.
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
if [ "$(id -u)" -eq 0 ] && [ -z "${NFS_IN_NS:-}" ] && unshare --net --mount --pid --fork true 2>/dev/null; then
    NFS_IN_NS=1 exec bash "$here/ns.sh" bash "${BASH_SOURCE[0]}"
fi
. "$here/lib.sh"

sizes=(0 1 3 5 399 400 401 1023 4095 4096 4097 65535 65536 65537 1048575 1048576 1048577 3000001)
links=1,2,3,4,5,255,1023,4095
names=1000

[ -r "$LIBRPCRDMA" ] || { FAIL "$LIBRPCRDMA is missing"; closing; }
built="server and client build without a warning"
make -C "$top/examples/nfs3" OUT="$scratch" >"$scratch/build" 2>&1 || { FAIL "$built" "$scratch/build"; closing; }
ok "$built"
cd "$scratch" || exit 1
mkdir outside
echo secret >outside/file

# serve NAME LISTEN PREFIX...: a server of its own directory. Sets nfs, the client's command with that prefix.
serve() {
    local name=$1 listen=$2 ports=() port mount_port; shift 2
    mkdir -p "served-$name"
    log=$scratch/$name.server
    start_ready "$@" ./nfs3d -d "served-$name" $listen || { FAIL "$name: the server starts" "$log"; return 1; }
    log=
    read -r port mount_port <<<"$port"
    [ "$port" = 0 ] || ports=(-p "$port" -m "$mount_port")
    [ -z "${listen##*-n rdma*}" ] && ports+=(-n rdma)
    nfs=("$@" ./nfs3 "${ports[@]}")
}
# expect NAME STATUS COMMAND...: the client fails, and says this.
expect() {
    local name=$1 status=$2; shift 2
    if "${nfs[@]}" 127.0.0.1 "$@" >out 2>&1; then FAIL "$name" out
    elif grep -q "$status" out; then ok "$name"; else FAIL "$name" out; fi
}
handle_of() { "${nfs[@]}" 127.0.0.1 stat "$1" | sed -n 's/^handle //p'; }
# leg NAME LISTEN PREFIX...
leg() {
    local name=$1 own what
    serve "$@" || return
    for own in '' -P; do
        what="$name: results in the client's buffer"
        [ -n "$own" ] || what="$name: results in libtirpc's memory"
        # (Here goes: a capture of this check, and what tshark must find in it.)
        if "${nfs[@]}" $own 127.0.0.1 check -N "$names" -L "$links" "${sizes[@]}" >out 2>client.log; then
            ok "$what: $(cat out)"
        else
            cat client.log >>out; FAIL "$what" out
        fi
        # (Here goes: the copy counters of server and client.)
    done
    if [ "$name" != tcp ]; then
        RPCRDMA_FALLBACK=no RPCRDMA_LOG=info "${nfs[@]}" 127.0.0.1 ls / >out 2>client.log
        if spoke_rdma client.log; then
            ok "$name: ... and it was rdma"
        else
            FAIL "$name: ... and it was rdma" client.log
        fi
    fi
    stop "$server"
}

if [ -n "${NFS_IN_NS:-}" ]; then
    leg tcp "-n tcp" env
    leg rdma "-n rdma -a 127.0.0.1 -p 20049" "${preloaded[@]}"
else
    leg tcp "-n tcp -a 127.0.0.1" env
    leg rdma "-n rdma -a 127.0.0.1" "${preloaded[@]}"
fi
leg moved "-n tcp -a 127.0.0.1" "${moved[@]}"

# What the server must do, whatever carries it.
if serve server "-n tcp -a 127.0.0.1" env; then
    head -c 3000001 /dev/urandom >original
    name=$(printf '%0255d' 7)
    if "${nfs[@]}" 127.0.0.1 put original "$name" && "${nfs[@]}" 127.0.0.1 get "$name" back &&
        cmp -s original back && cmp -s original "served-server/$name"; then ok "put and get"
    else FAIL "put and get"; fi
    expect "a name of 256 bytes is too long" NFS3ERR_NAMETOOLONG put original "x$name"
    ln -s "$scratch/outside" served-server/link
    ln -s /etc/passwd served-server/passwd
    expect "a link out of the directory is not followed to a directory" NFS3ERR_NOTDIR get link/file back
    expect "a link out of the directory is not followed to a file" NFS3ERR_INVAL get passwd back
    expect "'..' leads no further than the top" NFS3ERR_NOENT get ../outside/file back
    if [ -n "$(handle_of /)" ] && [ "$(handle_of /)" = "$(handle_of ../..)" ]; then ok "'..' of the top is the top"
    else FAIL "'..' of the top is the top"; fi

    # A handle is of the file and not of its name, over a restart, and no other's afterwards.
    mkdir served-server/directory
    echo there >served-server/directory/file
    directory=$(handle_of directory) file=$(handle_of directory/file)
    stop "$server"
    serve server "-n tcp -a 127.0.0.1" env
    with=("${nfs[@]}")
    nfs=("${with[@]}" -H "$directory")
    "${nfs[@]}" 127.0.0.1 ls / >out 2>&1
    if [ "$(sort out | tr '\n' ' ')" = ". .. file " ]; then ok "handles outlive the server"
    else FAIL "handles outlive the server" out; fi
    nfs=("${with[@]}" -H "$file")
    expect "a handle of a file is none of a directory" NFS3ERR_NOTDIR ls /
    nfs=("${with[@]}" -H "${file}00")
    expect "a handle that was never made" NFS3ERR_BADHANDLE stat /
    nfs=("${with[@]}" -H "${file%??}ff")
    expect "a handle of nothing" NFS3ERR_STALE stat /
    "${with[@]}" 127.0.0.1 rm directory/file
    echo again >served-server/directory/file
    nfs=("${with[@]}" -H "$file")
    expect "a removed file is gone, even if another has its name" NFS3ERR_STALE stat /
    stop "$server"
fi

# A full disk. tmpfs says so at once.
if [ -n "${NFS_IN_NS:-}" ] && mkdir served-full && mount -t tmpfs -o size=1M tmpfs served-full; then
    serve full "-n rdma -a 127.0.0.1" "${preloaded[@]}" &&
        expect "a full disk" NFS3ERR_NOSPC put original file
    stop "$server"
    umount served-full
else
    skip "a full disk" "needs root"
fi
closing
