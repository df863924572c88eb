#!/bin/bash
# demo.sh: a file service and its client, which know only libtirpc (fileservice/): small files and a large one are copied to
# the server and back, and calls that do nothing are made; over tcp, over software iWARP as it would be between two hosts,
# and through memory that two processes of one host share, the last two also with a text binding that has the data placed
# directly. The same binaries each time. Compares what arrived.
#
# As root it runs in a private network with an rpcbind of its own, and the programs ask for netid "rdma" by name. As
# an ordinary user the programs use a port and go on asking for "tcp"; RPCRDMA_REDIRECT moves them.
#
# Each figure is the median of DEMO_ROUNDS (3). The files are in memory (/dev/shm) if there is room.
#
# Environment: DEMO_FILES (1000) small files, one of DEMO_MIB (64) MiB, DEMO_CALLS (10000), DEMO_ROUNDS.
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
if [ -z "${DEMO_IN_NS:-}" ] && bash "$here/../tests/ns.sh" --possible >/dev/null; then
    DEMO_IN_NS=1 exec bash "$here/../tests/ns.sh" bash "${BASH_SOURCE[0]}"
fi
. "$here/../tests/lib.sh"

die() { echo "demo: $*" >&2; exit 1; }
[ -r "$LIBRPCRDMA" ] || die "$LIBRPCRDMA is missing: run make first"
cd "$scratch" || exit 1
: "${DEMO_FILES:=1000}" "${DEMO_MIB:=64}" "${DEMO_CALLS:=10000}" "${DEMO_ROUNDS:=3}"

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

echo "Making $DEMO_FILES small files and one of $DEMO_MIB MiB ..."
files=$scratch
room=$(df --output=avail -k /dev/shm 2>/dev/null | tail -n 1)
if [ "${room:-0}" -gt $(((4 * DEMO_MIB + 256) * 1024)) ] && memory=$(mktemp -d /dev/shm/rpcrdma.XXXXXX); then
    files=$memory
    trap 'rm -rf "$files"; clean_up' EXIT
fi
mkdir "$files/small" "$files/large"
head -c "${DEMO_MIB}M" /dev/urandom >"$files/large/file"
for ((i = 0; i < DEMO_FILES; i++)); do
    directory=$files/small/d$((i % 7))/e$((i % 3))
    mkdir -p "$directory"
    tail -c +$((i * 1000 + 1)) "$files/large/file" | head -c $((i * i % 70000)) >"$directory/file$i"
done
# One line that stands for every name and every byte of a tree.
sum() { (cd "$files/$1" && find . -type f -print0 | sort -z | xargs -0 sha256sum && find . -type d | sort) | sha256sum; }
declare -A want
for part in small large; do want[$part]=$(sum $part); done

# run NAME NETID PREFIX...: a line of the table. An empty directory is served for each part, which is copied there and back in
# each round.
run() {
    local name=$1 netid=$2 where part round listen=()
    shift 2
    local prefix=("$@")
    [ -n "${DEMO_IN_NS:-}" ] || listen=(-a 127.0.0.1 -p 0)
    client() { # WHAT ARGUMENT...: notes its seconds.
        local what=$1 line; shift
        line=$("${prefix[@]}" ./filecopy -n "$netid" "$@" 2>>"$log") || { cat "$log" >&2; die "$name: the client failed"; }
        awk -v what="$what" '{ print what, $(NF - 1) }' <<<"$line" >>seconds
    }
    : >seconds
    for part in small large; do
        mkdir "$files/served"
        start_ready "$@" ./fileserver -n "$netid" "${listen[@]}" -d "$files/served" || die "$name: no server"
        where=127.0.0.1
        [ "$port" = 0 ] || where=$where:$port
        for ((round = 0; round < DEMO_ROUNDS; round++)); do
            client "$part-there" "$where" "$files/$part"
            client "$part-back" -r "$where" "$files/back"
            [ $part = small ] || client calls -c "$DEMO_CALLS" "$where"
        done
        stop "$server"
        [ "$(sum served)" = "${want[$part]}" ] || die "$name: what the server holds is not what was sent"
        [ "$(sum back)" = "${want[$part]}" ] || die "$name: what came back is not what was sent"
        rm -r "$files/served" "$files/back"
    done
    sort -k1,1 -k2,2n seconds | awk -v name="$name" -v mib="$DEMO_MIB" -v calls="$DEMO_CALLS" '
        { all[$1, ++count[$1]] = $2 }
        function of(what) { return all[what, int((count[what] + 1) / 2)] }
        END {
            printf "%-22s %9.3f %9.3f %11.0f %11.0f %11.0f\n", name, of("small-there"), of("small-back"),
                mib / of("large-there"), mib / of("large-back"), calls / of("calls")
        }'
}

if [ -n "${DEMO_IN_NS:-}" ]; then
    over_rdma=(rdma "${preloaded[@]}" RPCRDMA_LOG=info)
else
    over_rdma=(tcp "${moved[@]}" RPCRDMA_LOG=info RPCRDMA_FALLBACK=no)
fi
binding=RPCRDMA_BINDINGS=$here/fileservice/fileservice.conf
echo
printf '%-22s %19s %23s %11s\n' '' "$DEMO_FILES small files" "one file of $DEMO_MIB MiB" calls
printf '%-22s %9s %9s %11s %11s %11s\n' transport 'there s' 'back s' 'there MiB/s' 'back MiB/s' 'a second'
log=$scratch/tcp.log
run tcp tcp env
log=$scratch/iwarp.log
run 'software iWARP' "${over_rdma[@]}" RPCRDMA_PROVIDER=iwarp
run '... placed' "${over_rdma[@]}" RPCRDMA_PROVIDER=iwarp "$binding"
spoke_rdma "$log" || { cat "$log" >&2; die "nothing in the log says that this was RDMA"; }
log=$scratch/memory.log
run 'shared memory' "${over_rdma[@]}" RPCRDMA_PROVIDER=auto
run '... placed' "${over_rdma[@]}" RPCRDMA_PROVIDER=auto "$binding"
grep -q 'goes over rdma.*shared memory' "$log" || { cat "$log" >&2; die "nothing in the log says that memory was shared"; }
echo
echo "From the log: $(grep -hEi "$rdma_line" "$scratch/iwarp.log" | tail -n 1)"
echo "              $(grep -hEi "$rdma_line" "$scratch/memory.log" | tail -n 1)"
echo "placed: with the binding of examples/fileservice/fileservice.conf at both ends"
echo "What the last round has left, there and back, is equal to the originals: sha256 ${want[small]%% *} and ${want[large]%% *}"
