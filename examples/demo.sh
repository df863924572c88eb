#!/bin/bash
# demo.sh: copies a tree of files to a server and back, over tcp, then over RDMA, then over RDMA with a text binding that
# lets the data be placed directly; with the same binaries of a file service that knows only libtirpc (fileservice/).
# Compares what arrived.
#
# As root it runs in a private network with an rpcbind of its own, and the programs ask for netid "rdma" by name. As
# an ordinary user the programs use a port and go on asking for "tcp"; RPCRDMA_REDIRECT moves them.
#
# Environment: DEMO_FILES (300) small files and one of DEMO_MIB (64) MiB.
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
if [ -z "${DEMO_IN_NS:-}" ] && bash "$here/../tests/ns.sh" --possible >/dev/null; then
    DEMO_IN_NS=1 exec bash "$here/../tests/ns.sh" bash "${BASH_SOURCE[0]}"
fi
. "$here/../tests/lib.sh"

die() { echo "demo: $*" >&2; exit 1; }
[ -r "$LIBRPCRDMA" ] || die "$LIBRPCRDMA is missing: run make first"
cd "$scratch" || exit 1

echo "Building the file service against libtirpc alone ..."
cp "$here"/fileservice/* .
for part in -h:fileservice.h -c:xdr.c -l:clnt.c -m:svc.c; do
    rpcgen -M ${part%%:*} -o ${part#*:} fileservice.x || die "rpcgen failed"
done
flags="-O2 -I. $(pkg-config --cflags libtirpc)"
libs=$(pkg-config --libs libtirpc)
cc $flags -o fileserver fileserver.c svc.c xdr.c $libs || die "cannot build the server"
cc $flags -o filecopy filecopy.c clnt.c xdr.c $libs || die "cannot build the client"
if ldd fileserver filecopy | grep -q rpcrdma; then die "these programs should not know librpcrdma"; fi

echo "Making a tree: ${DEMO_FILES:=300} small files and one of ${DEMO_MIB:=64} MiB ..."
mkdir tree
head -c "${DEMO_MIB}M" /dev/urandom >tree/big
for ((i = 0; i < DEMO_FILES; i++)); do
    directory=tree/d$((i % 7))/e$((i % 3))
    mkdir -p "$directory"
    tail -c +$((i * 1000 + 1)) tree/big | head -c $((i * i % 70000)) >"$directory/file$i"
done
# One line that stands for every name and every byte of a tree.
sum() { (cd "$1" && find . -type f -print0 | sort -z | xargs -0 sha256sum && find . -type d | sort) | sha256sum; }
want=$(sum tree)

# run NAME NETID PREFIX...: serves an empty directory, copies the tree there and back. Sets there, back (seconds).
run() {
    local name=$1 netid=$2 where=127.0.0.1 listen=() line
    shift 2
    [ -n "${DEMO_IN_NS:-}" ] || listen=(-a 127.0.0.1 -p 0)
    mkdir "served-$name"
    start_ready "$@" ./fileserver -n "$netid" "${listen[@]}" -d "served-$name" || die "$name: no server"
    [ "$port" = 0 ] || where=$where:$port
    copy() { "$@" 2>>"$log" || { cat "$log" >&2; die "$name: the copy failed"; }; }
    line=$(copy "$@" ./filecopy -n "$netid" "$where" tree) || exit 1
    there=$(awk '{ print $5 }' <<<"$line")
    line=$(copy "$@" ./filecopy -n "$netid" -r "$where" "back-$name") || exit 1
    back=$(awk '{ print $5 }' <<<"$line") bytes=$(awk '{ print $3 }' <<<"$line")
    stop "$server"
    [ "$(sum "served-$name")" = "$want" ] || die "$name: what the server holds is not what was sent"
    [ "$(sum "back-$name")" = "$want" ] || die "$name: what came back is not what was sent"
}
# row NAME: one line of the table.
row() {
    awk -v n="$1" -v b="$bytes" -v t="$there" -v r="$back" 'BEGIN {
        m = b / 1048576; printf "%-10s %10.1f %10.3f %10.0f %10.3f %10.0f\n", n, m, t, m / t, r, m / r }'
}

echo "Copying ..."
log=$scratch/tcp.log
run tcp tcp env
table=$(row tcp)
log=$scratch/rdma.log
if [ -n "${DEMO_IN_NS:-}" ]; then
    over_rdma=(rdma "${preloaded[@]}" RPCRDMA_LOG=info)
else
    over_rdma=(tcp "${moved[@]}" RPCRDMA_LOG=info RPCRDMA_FALLBACK=no)
fi
run rdma "${over_rdma[@]}"
table+=$'\n'$(row rdma)
run placed "${over_rdma[@]}" RPCRDMA_BINDINGS="$here/fileservice/fileservice.conf"
table+=$'\n'$(row placed)

echo
printf '%-10s %10s %10s %10s %10s %10s\n' transport MiB 'there s' MiB/s 'back s' MiB/s
echo "$table"
echo
spoke_rdma "$log" || { cat "$log" >&2; die "nothing in the log says that the second run was RDMA"; }
echo "From the log of the second run: $(grep -Ei "$rdma_line" "$log" | tail -n 1)"
echo "placed: over RDMA with the bindings of examples/fileservice/fileservice.conf at both ends"
echo "All six copies are equal to the original: sha256 ${want%% *}"
