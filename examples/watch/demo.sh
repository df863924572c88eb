#!/bin/bash
# demo.sh: a watch service (watchd.c, watch.c) calls its clients back over their own connections, and goes on doing so
# after it was killed and started again. Needs no root and no rpcbind.
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
. "$here/../../tests/lib.sh"
die() { echo "demo: $*" >&2; [ ! -s "$log" ] || cat "$log" >&2; exit 1; }
log=$scratch/log
[ -r "$LIBRPCRDMA" ] || die "$LIBRPCRDMA is missing: run make first"
cd "$scratch" || exit 1

echo "Building the watch service, linked with the library ..."
cp "$here"/*.[cx] .
for part in -h:watch.h -c:xdr.c -l:clnt.c -m:svc.c; do
    rpcgen -M ${part%%:*} -o ${part#*:} watch.x || die "rpcgen failed"
done
# What pkg-config --cflags --libs rpcrdma says where the library is installed.
flags="-O2 -I. -I$top/include $(pkg-config --cflags libtirpc)"
libs="-L$(dirname "$LIBRPCRDMA") -Wl,-rpath,$(dirname "$LIBRPCRDMA") -l:librpcrdma.so.0 $(pkg-config --libs libtirpc)"
cc -w $flags -c clnt.c xdr.c svc.c || die "cannot build what rpcgen wrote"
warnings="-Wall -Wextra -Werror -Wno-cast-function-type"
cc $warnings $flags -o watchd watchd.c clnt.o xdr.o svc.o $libs || die "cannot build the server"
cc $warnings $flags -o watch watch.c clnt.o xdr.o $libs || die "cannot build the client"

serve() { start_ready ./watchd -h 127.0.0.1 -p "$1" || die "no server"; }
set_value() { ./watch -h 127.0.0.1 -p "$port" -s "$1" "$2" 2>>"$log" || die "cannot set $1"; }
lines=0
# told LINE...: each watcher prints these lines next.
told() {
    local line fd
    for line in "$@"; do
        for fd in "$taker" "$fetcher"; do
            read -r -t "$(patient 30)" -u "$fd" got || got=nothing
            [ "$got" = "$line" ] || die "a watcher says \"$got\", and not \"$line\""
            lines=$((lines + 1))
        done
    done
}

serve 0
set_value colour red
exec {taker}< <(exec ./watch -h 127.0.0.1 -p "$port" colour size 2>>"$log")
watchers=($!)
exec {fetcher}< <(exec ./watch -h 127.0.0.1 -p "$port" -f colour size 2>>"$log")
watchers+=($!)
children+=("${watchers[@]}")
told "colour = red"    # so they have registered
set_value colour green
set_value size 12
set_value colour blue
told "colour = green" "size = 12" "colour = blue"
echo "Two watchers were called back, one of which called forward meanwhile."

kill -9 "$server"; wait "$server" 2>/dev/null
serve "$port"
set_value size 13
told "size = 13"
echo "They have come back to a new server, and were called back again."

for pid in "${watchers[@]}" "$server"; do
    kill "$pid"
    wait "$pid" || die "a signal does not end a program properly: status $?"
done
echo "The watch service told two watchers $lines values over their own connections, the last after a restart"
