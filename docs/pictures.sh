#!/bin/bash
# pictures.sh: docs/pictures/*.svg, how calls travel: drawn by `rpcrdma decode` from what real programs do. They go over software
# iWARP, as between two hosts. Times are those of one run on one machine.
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
. "$here/../tests/lib.sh"
die() { echo "pictures: $*" >&2; exit 1; }
tool=${TOOL:-$top/build/rpcrdma}
[ -x "$tool" ] && [ -r "$LIBRPCRDMA" ] || die "$tool or $LIBRPCRDMA is missing: run make first"
mkdir -p "$here/pictures"
cd "$scratch" || exit 1
export RPCRDMA_LOG=wire

# number LOG CONDITION: the number of the fastest call that awk's CONDITION takes, a call a record: the first ones find other caches.
number() {
    "$tool" decode "$1" | awk -v RS= '{ n = "" } /^call / { n = $2 } /^call back / { n = $3 }
        n != "" && ('"$2"') {
            split($0, lines, "\n"); words = split(lines[1], word, " "); us = word[words - 1]; gsub(",", "", us)
            if (best == "" || us + 0 < least) { best = n; least = us + 0 }
        }
        END { print best }'
}
draw() { # NAME LOG CALLS
    [ -n "$3" ] || die "no call for $1"
    "$tool" decode --call "$3" --svg "$here/pictures/$1.svg" "$2" || die "cannot draw $1"
    echo "docs/pictures/$1.svg"
}

# made SIZE LOG: calls of this size.
made() {
    RPCRDMA_LOG_FILE=$scratch/$2 "$tool" perf --sizes "$1" --threads 1 --rounds 1 --seconds 0.02 --json >/dev/null ||
        die "rpcrdma perf fails"
}
# Where a long reply is possible, its room is a Reply chunk.
RPCRDMA_MAX_REPLY=32K made 4K inline.log
made 512K chunks.log
draw inline inline.log "$(number inline.log '/ WRITE / && /there after.*there after/')"
draw read-chunk chunks.log "$(number chunks.log '/ WRITE / && /RDMA Read of/')"
draw reply-chunk chunks.log "$(number chunks.log '/ READ / && /RDMA Write of/')"

# A server that calls back, as in examples/watch/demo.sh.
cp "$top"/examples/watch/*.[cx] .
for part in -h:watch.h -c:xdr.c -l:clnt.c -m:svc.c; do
    rpcgen -M ${part%%:*} -o ${part#*:} watch.x || die "rpcgen failed"
done
flags="-w -O2 -I. -I$top/include $(pkg-config --cflags libtirpc)"
libs="-L$(dirname "$LIBRPCRDMA") -Wl,-rpath,$(dirname "$LIBRPCRDMA") -l:librpcrdma.so.0 $(pkg-config --libs libtirpc)"
cc $flags -o watchd watchd.c clnt.c xdr.c svc.c $libs && cc $flags -o watch watch.c clnt.c xdr.c $libs || die "cannot build watch"
export RPCRDMA_LOG_FILE=$scratch/watch.log
start_ready ./watchd -h 127.0.0.1 -p 0 || die "no server"
exec {watcher}< <(exec ./watch -h 127.0.0.1 -p "$port" -f colour)
children+=($!) listener=$!
./watch -h 127.0.0.1 -p "$port" -s colour green || die "cannot set a value"
read -r -t "$(patient 30)" -u "$watcher" told && [ "$told" = "colour = green" ] || die "nobody was called back"
back='/^call back/ && !/no reply/'
# Told before the call back is answered.
answered() { [ -n "$(number watch.log "$back")" ]; }
wait_for 10 answered || die "the call back was not answered"
# The call back, and the call for the value that the client makes before it answers.
first=$(number watch.log "$back")
draw call-back watch.log "$first-$((first + 1))"
stop "$listener"
