#!/bin/bash
# placement.sh: a text binding places the data of an unmodified program. The file service of the demo copies MIB MiB
# there and back over RDMA, without and with its binding; a preloaded library counts what is copied in user space, and
# the log of the headers shows which chunks were used.
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
. "$here/lib.sh"
[ -r "$LIBRPCRDMA" ] || { FAIL "$LIBRPCRDMA is missing"; closing; }
cd "$scratch" || exit 1
: "${MIB:=16}"

cp "$top"/examples/fileservice/* .
for part in -h:fileservice.h -c:xdr.c -l:clnt.c -m:svc.c; do rpcgen -M ${part%%:*} -o ${part#*:} fileservice.x || exit 1; done
flags="-O2 -I. $(pkg-config --cflags libtirpc)"
libs=$(pkg-config --libs libtirpc)
cc $flags -o fileserver fileserver.c svc.c xdr.c $libs && cc $flags -o filecopy filecopy.c clnt.c xdr.c $libs &&
    cc -O2 -shared -fPIC -o copies.so "$top/bench/copies.c" || { FAIL "the programs do not build"; closing; }
mkdir tree && head -c "${MIB}M" /dev/urandom >tree/big

# run NAME BINDINGS: sets per_there, per_back to "client server": bytes copied per byte of data.
run() {
    local name=$1 prefix client before after
    mkdir "$name"
    prefix=(env LD_PRELOAD="$PWD/copies.so:$LIBRPCRDMA" RPCRDMA_REDIRECT=tcp RPCRDMA_FALLBACK=no RPCRDMA_BINDINGS="$2"
        RPCRDMA_LOG=wire)
    log=$name.server.log
    start_ready "${prefix[@]}" COPIES="$name.server" ./fileserver -n tcp -a 127.0.0.1 -p 0 -d "$name" ||
        { FAIL "$name: no server" "$log"; closing; }
    counted() { rm -f "$name.server"; kill -USR1 "$server"; wait_for 10 test -s "$name.server"; cut -d' ' -f1 "$name.server"; }
    for way in there back; do
        before=$(counted)
        "${prefix[@]}" COPIES="$name.client" ./filecopy $([ $way = there ] || echo -r) -n tcp "127.0.0.1:$port" \
            "$([ $way = there ] && echo tree || echo "$name.back")" >/dev/null 2>"$name.$way.log" ||
            { FAIL "$name: copying $way" "$name.$way.log"; closing; }
        after=$(counted)
        client=$(cut -d' ' -f1 "$name.client")
        printf -v "per_$way" '%s' "$(awk -v c="$client" -v s="$((after - before))" -v n=$((MIB << 20)) \
            'BEGIN { printf "%.3f %.3f", c / n, s / n }')"
    done
    stop "$server"
    cmp -s tree/big "$name.back/big" || FAIL "$name: what came back is not what was sent"
    printf '      %-8s copied per byte, client and server: there %s, back %s\n' "$name" "$per_there" "$per_back"
}
# about VALUE WANTED: approximately, since logging copies a little too.
about() { awk -v v="$1" -v w="$2" 'BEGIN { exit !(v > w - 0.05 && v < w + 0.05) }'; }

# Without a binding: one copy at each end, as over tcp.
run plain ''
read -r c s <<<"$per_there"
if about "$c" 1 && about "$s" 1; then ok "without a binding an argument is copied once at each end"; else FAIL "without a binding: there $per_there"; fi
if grep -q ' > RDMA_MSG .* reads \[[1-9]' plain.there.log || grep -q ' > .* writes \[\[0x' plain.back.log; then
    FAIL "chunks without a binding" plain.there.log
else
    ok "without a binding nothing is placed"
fi

run bound "$PWD/fileservice.conf"
read -r c s <<<"$per_there"
if about "$c" 0 && about "$s" 1; then ok "a bound argument is not copied at the client, and once at the server"; else FAIL "bound: there $per_there"; fi
read -r c s <<<"$per_back"
if about "$c" 1 && about "$s" 0; then ok "a bound result is not copied at the server, and once at the client"; else FAIL "bound: back $per_back"; fi
# FS_WRITE: the path "big" takes 8 bytes, so the data begins after 40 + 8 + 8 + 4 + 4 bytes.
if grep -q ' > RDMA_MSG .* reads \[64:0x[0-9a-f+x]*:1048576\]' bound.there.log; then ok "an argument travels in a Read chunk"; else FAIL "no Read chunk" bound.there.log; fi
if grep -Eq ' < RDMA_MSG .* writes \[.*:1048576' bound.back.log; then ok "a result travels in a Write chunk"; else FAIL "no Write chunk" bound.back.log; fi
last=$(grep -E ' > RDMA_(NO)?MSG ' bound.back.log | tail -n 2 | head -n 1)
if grep -Eq 'writes \[\[0x.* reply none' <<<"$last"; then ok "once the server has shown its binding, no Reply chunk is offered"; else FAIL "a Reply chunk to the end: $last"; fi

# A binding at one end only breaks nothing.
for end in client server; do
    mkdir "$end" && log=$end.log
    bound=(env LD_PRELOAD="$LIBRPCRDMA" RPCRDMA_REDIRECT=tcp RPCRDMA_FALLBACK=no RPCRDMA_LOG=warn RPCRDMA_BINDINGS="$PWD/fileservice.conf")
    plain=("${bound[@]}" RPCRDMA_BINDINGS=)
    declare -n at_server=$([ $end = server ] && echo bound || echo plain) at_client=$([ $end = client ] && echo bound || echo plain)
    start_ready "${at_server[@]}" ./fileserver -n tcp -a 127.0.0.1 -p 0 -d "$end" || { FAIL "$end: no server" "$log"; closing; }
    if "${at_client[@]}" ./filecopy -n tcp "127.0.0.1:$port" tree >/dev/null 2>>"$log" &&
        "${at_client[@]}" ./filecopy -r -n tcp "127.0.0.1:$port" "$end.back" >/dev/null 2>>"$log" &&
        cmp -s tree/big "$end.back/big"; then
        ok "a binding at the $end only"
    else
        FAIL "a binding at the $end only" "$log"
    fi
    stop "$server"
done
if grep -q 'the server has no binding' client.log; then ok "a client says that its server has no binding"; else FAIL "no word of it" client.log; fi

# A binding that is well-formed but wrong: the error leads to the binding, and not to a setting that would not help.
mkdir -p untrue && cp tree/big untrue && log=untrue.log
untrue=(env LD_PRELOAD="$LIBRPCRDMA" RPCRDMA_REDIRECT=tcp RPCRDMA_FALLBACK=no)
start_ready "${untrue[@]}" RPCRDMA_BINDINGS="$PWD/fileservice.conf" ./fileserver -n tcp -a 127.0.0.1 -p 0 -d untrue ||
    { FAIL "untrue: no server" "$log"; closing; }
for said in 'arguments=string,hyper,count results=status,data<1K>' 'arguments=string,int,count results=status,data' \
    max-reply=1K max-reply=6K; do
    echo "0x20004653 1 5 $said" >untrue.conf
    "${untrue[@]}" RPCRDMA_BINDINGS="$PWD/untrue.conf" ./filecopy -r -n tcp "127.0.0.1:$port" untrue.back >/dev/null 2>out &&
        FAIL "untrue: $said: it works" out
    if grep -q 'the most that the binding of program 536888915 version 1 at this end allows for' out &&
        ! grep -Eq 'MAX_?REPLY' out; then
        ok "an untrue binding is blamed: $said"
    else
        FAIL "an untrue binding is not blamed: $said" out
    fi
done
stop "$server"

# A line that is wrong is a wrong setting: nothing is moved, the log says why, and a client that may not go over tcp
# fails with that text.
{ cat fileservice.conf; echo '0x20004653 1 3 arguments=sting,int'; } >wrong.conf
mkdir wrong && log=wrong.log
wrong=(env LD_PRELOAD="$LIBRPCRDMA" RPCRDMA_REDIRECT=tcp RPCRDMA_LOG=error RPCRDMA_BINDINGS="$PWD/wrong.conf,$PWD/none.conf")
start_ready "${wrong[@]}" ./fileserver -n tcp -a 127.0.0.1 -p 0 -d wrong || { FAIL "wrong: no server" "$log"; closing; }
if "${wrong[@]}" ./filecopy -n tcp "127.0.0.1:$port" tree >/dev/null 2>"$log.client" && cmp -s tree/big wrong/big; then
    ok "with a wrong binding both go on over tcp"
else
    FAIL "with a wrong binding both go on over tcp" "$log.client"
fi
for end in "$log" "$log.client"; do
    if grep -q 'wrong.conf:5:[0-9]*: .*sting' "$end" && grep -q 'none.conf: No such file' "$end"; then
        ok "a wrong line and a missing file are named"
    else
        FAIL "a wrong binding is not named" "$end"
    fi
done
"${wrong[@]}" RPCRDMA_LOG=off RPCRDMA_FALLBACK=no ./filecopy -n tcp "127.0.0.1:$port" tree >out 2>&1 &&
    FAIL "with a wrong binding nobody goes over tcp who may not" out
if grep -q 'wrong.conf:5:[0-9]*: .*sting' out; then ok "who may not go over tcp is told why"; else FAIL "who may not go over tcp is not told why" out; fi
stop "$server"

# The C API.
build=$(dirname "$LIBRPCRDMA")
report() { # NAME COMMAND...
    local name=$1 line; shift
    "$@" >out 2>err
    local status=$?
    while read -r line; do ok "$name: ${line#ok    }"; done <out
    [ "$status" -eq 0 ] && [ ! -s err ] || FAIL "$name ends well and in silence (status $status)" err
}
if cc -g -Wall -Wextra -Werror -Wno-cast-function-type -o placement "$top/c-tests/placement.c" -I"$top/include" \
    $(pkg-config --cflags libtirpc) -L"$build" -Wl,-rpath,"$build" -lrpcrdma $(pkg-config --libs libtirpc) 2>cc.log; then
    # Lengths from 4097 on are placed.
    export RPCRDMA_INLINE=4096
    report placement.c ./placement
    if command -v valgrind >/dev/null; then
        report valgrind env RPCRDMA_POLL=0 valgrind -q --error-exitcode=9 --child-silent-after-fork=yes ./placement
    else
        skip "placement.c under valgrind" "not installed"
    fi
else
    FAIL "placement.c compiles" cc.log
fi
closing
