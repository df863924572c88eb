#!/bin/bash
# nfs.sh: the NFS version 3 server and client of the examples, which know only libtirpc, with files of awkward
# sizes, symbolic links and a directory of many pages: stock over tcp, over netid rdma on a fixed port, and as
# programs for tcp that are moved. Each with results in libtirpc's memory and in a buffer of the client's (-P).
#
# As root it runs in a private network: the first leg finds its server by rpcbind, the second one on port 20049. For
# an ordinary user all servers take free ports.
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
if [ -z "${NFS_IN_NS:-}" ] && bash "$here/ns.sh" --possible >/dev/null; then
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

# serve NAME LISTEN PREFIX...: starts a server with a directory of its own. Sets nfs, the client's command with that prefix.
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
# expect NAME STATUS COMMAND...: the client must fail, and print STATUS.
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
        if "${nfs[@]}" $own 127.0.0.1 check -N "$names" -L "$links" "${sizes[@]}" >out 2>client.log; then
            ok "$what: $(cat out)"
        else
            cat client.log >>out; FAIL "$what" out
        fi
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

# rule 123: a server that may be called with RPCSEC_GSS can be reached over TCP too. A moved one can, on the same port.
if serve both "-n tcp -a 127.0.0.1" "${moved[@]}"; then
    nfs=("${nfs[@]:${#moved[@]}}")
    if "${nfs[@]}" 127.0.0.1 check -N 3 -L 5 1 70001 >out 2>&1; then ok "a stock client at a moved server"; else FAIL "a stock client at a moved server" out; fi
    stop "$server"
fi

# Four threads of the server serve six clients, by rdma and by its other transport.
if serve threads "-n rdma -a 127.0.0.1 -t 4" "${preloaded[@]}"; then
    clients=()
    for i in 1 2 3 4 5 6; do
        "${nfs[@]}" 127.0.0.1 check -N 300 -L 1,255,1023 0 1 4096 65537 1048577 3000001 >"client.$i" 2>&1 & clients+=($!)
    done
    bad=0
    for i in 1 2 3 4 5 6; do
        wait "${clients[i - 1]}" || { bad=$i; break; }
    done
    if [ "$bad" = 0 ]; then ok "six clients at once of a server with four threads: $(cat client.1)"
    else FAIL "six clients at once of a server with four threads" "client.$bad"; fi
    wait "${clients[@]}"
    stop "$server"
fi

# What an independent decoder sees: Read chunks in WRITE and SYMLINK, Write chunks in READ and READLINK, and no others.
captured() {
    local tool
    [ -n "${NFS_IN_NS:-}" ] || { skip "a capture" "needs root for a private network"; return; }
    for tool in dumpcap tshark; do command -v $tool >/dev/null || { skip "a capture" "$tool is not installed"; return; }; done
    serve captured "-n rdma -a 127.0.0.1 -p 20049" "${preloaded[@]}" RPCRDMA_CRC=yes RPCRDMA_INLINE=4096 || return
    capture_start "$scratch/nfs.pcap" "tcp port 20049" || { FAIL "dumpcap starts" "$scratch/nfs.pcap.log"; return; }
    "${nfs[@]}" -P 127.0.0.1 check -N 300 -L "$links" "${sizes[@]}" >out 2>&1 || FAIL "the captured check" out
    capture_stop || FAIL "packets were dropped" "$scratch/nfs.pcap.log"
    stop "$server"
    # A message with Read chunks is dissected only up to its header; data.data is the rest.
    read_frames -r nfs.pcap -Y 'rpcordma && tcp.dstport == 20049' -T fields -E separator=/t -E aggregator=, \
        -e rpcordma.msg_type -e rpcordma.reads_count -e rpcordma.writes_count -e rpcordma.reply_count \
        -e rpcordma.position -e rpcordma.rdma_length -e rpc.procedure -e data.data >calls
    read_frames -r nfs.pcap -Y 'rpcordma && tcp.srcport == 20049' -T fields -E separator=/t -E aggregator=, \
        -e rpcordma.msg_type -e rpcordma.reads_count -e rpc.procedure >replies
    awk -F'\t' '
        function hex(s,   i, n) { for (i = 1; i <= length(s); i++) n = n * 16 + index("0123456789abcdef", substr(s, i, 1)) - 1; return n }
        {
            split($7, p, ","); procedure = $2 > 0 ? hex(substr($8, 41, 8)) : p[1]
            calls[procedure]++
            if ($1 != 0) bad("a Call that is no RDMA_MSG")
            if ($2 > 0) {
                read[procedure]++
                if ($2 != 1 || $3 > 0) bad("more than one chunk of arguments")
                split($6, lengths, ",")
                if (hex(substr($8, 2 * ($5 - 4) + 1, 8)) != lengths[1]) bad("a Read chunk that is not its item")
            }
            if ($3 > 0) written[procedure]++
            if ($4 > 0) reply[procedure]++
        }
        function bad(what) { print "call " NR ": " what ": " $0; wrong++ }
        function show(what, n,   i) { printf "%s:", what; for (i = 0; i < 22; i++) if (i in n) printf " %s %d of %d", name[i], n[i], calls[i]; print "" }
        END {
            split("GETATTR SETATTR LOOKUP ACCESS READLINK READ WRITE CREATE MKDIR SYMLINK MKNOD REMOVE RMDIR RENAME LINK READDIR READDIRPLUS FSSTAT FSINFO PATHCONF COMMIT", name, " ")
            show("Read chunks", read); show("Write lists", written); show("Reply chunks", reply)
            for (i in read) if (i != 7 && i != 10) { print "a Read chunk in procedure " i; wrong++ }
            for (i in written) if (i != 5 && i != 6) { print "a Write list in procedure " i; wrong++ }
            # 4095 and more do not fit inline; the longest two are written in two and three calls.
            if (read[7] != 12 || read[10] != 1) { print "Read chunks: " read[7] " WRITEs, " read[10] " SYMLINKs"; wrong++ }
            if (written[5] != calls[5] || written[6] < 10) { print "Write lists: " written[5] " READLINKs, " written[6] " READs"; wrong++ }
            exit wrong > 0
        }' calls >found
    if [ $? -eq 0 ]; then ok "tshark finds chunks for exactly the eligible items"; else FAIL "chunks for exactly the eligible items" found; fi
    sed 's/^/      /' found
    if awk -F'\t' '$2 > 0 { exit 1 }' replies && [ -s replies ]; then ok "no reply has a Read list"; else FAIL "no reply has a Read list" replies; fi
}
captured

# How much is copied for one WRITE and one READ of 1 MiB, by the library's own count. The READ is made with -P.
copies() {
    local what before after client at_server
    cc -O2 -shared -fPIC -o copies.so "$top/bench/copies.c" || { FAIL "copies.c builds"; return; }
    head -c 16M /dev/urandom >large
    serve copies "-n rdma -a 127.0.0.1" env LD_PRELOAD="$PWD/copies.so:$LIBRPCRDMA" COPIES="$PWD/at.server" || return
    nfs=(env COPIES="$PWD/at.client" "${nfs[@]/COPIES=*/COPIES_OF_SERVER=}")
    counted() { rm -f at.server; kill -USR1 "$server"; wait_for 10 test -s at.server; cut -d' ' -f2 at.server; }
    for what in 'put large large' '-P get large back'; do
        set -- $what
        before=$(counted)
        if [ "$1" = put ]; then "${nfs[@]}" 127.0.0.1 "$@" 2>err; else "${nfs[@]}" -P 127.0.0.1 get large back 2>err; fi || FAIL "copies: $what" err
        after=$(counted)
        client=$(($(cut -d' ' -f2 at.client) / 16)) at_server=$(((after - before) / 16))
        echo "      ${what% large*}: bytes copied per MiB: client $client, server $at_server"
        if [ "$1" = put ]; then
            [ "$client" -lt 4096 ] && [ "$at_server" -le $((1048576 + 4096)) ]
        else
            [ "$client" -lt 4096 ] && [ "$at_server" -lt 4096 ]
        fi && ok "copies of $what" || FAIL "copies of $what"
    done
    cmp -s large back && ok "what was copied is right" || FAIL "what came back is not what was sent"
    stop "$server"
}
copies

# What the server must do, whatever the transport.
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

    # A handle belongs to the file and not to its name, survives a restart, and is never reused for another file.
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
    skip "a full disk" "needs root, and a mount of its own"
fi
closing
