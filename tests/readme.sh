#!/bin/bash
# readme.sh: does what the pages in docs/ and the manual pages tell a user to do: a staged install, the C example linked by
# pkg-config and by hand, rpcrdma-run, and the texts that a user sees when something is wrong.
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
export RPCRDMA_PROVIDER=auto    # as a user has it
if [ -z "${README_IN_NS:-}" ] && bash "$here/ns.sh" --possible >/dev/null; then
    README_IN_NS=1 exec bash "$here/ns.sh" bash "${BASH_SOURCE[0]}"
fi
. "$here/lib.sh"
cd "$scratch" || exit 1
chmod 755 "$scratch"    # for the ordinary user
program=536870997    # 0x20000055, of c-tests/netid.c

# check NAME EXPECTED COMMAND...: the command's standard output and error must match an extended regular expression.
check() {
    local name=$1 expected=$2; shift 2
    "$@" >out 2>&1
    if echo "$(tr '\n' ' ' <out)" | grep -Eq -- "$expected"; then ok "$name"; else FAIL "$name" out; fi
}

# A stage whose place is the one that the installed files name: nothing has to stand in for anything.
stage=$scratch/stage
if make -s -C "$top" install PREFIX="$stage" SYSCONFDIR="$stage/etc" >install.log 2>&1; then ok "make install"; else FAIL "make install" install.log; fi
for file in lib/librpcrdma.so.0 lib/librpcrdma.so include/rpcrdma.h lib/pkgconfig/rpcrdma.pc bin/rpcrdma-run \
    share/man/man7/rpcrdma.7 share/man/man1/rpcrdma-run.1 share/man/man5/rpcrdma.conf.5 \
    share/man/man5/rpcrdma-bindings.5 share/man/man3/clnt_rdma_create.3 share/man/man3/rpcrdma_clnt_reverse.3 \
    share/man/man3/rpcrdma_clnt_peer.3 share/man/man3/rpcrdma_svc_run.3; do
    [ -r "$stage/$file" ] || FAIL "install: $file is missing"
done
if command -v mandoc >/dev/null; then
    check "the manual pages are clean" '^$' mandoc -T lint -W warning "$top"/docs/*.[1-8]
else
    skip "the manual pages are clean" "no mandoc"
fi

export PKG_CONFIG_PATH=$stage/lib/pkgconfig
sed -n '/^```c$/,/^```$/{/^```/d;p}' "$top/docs/programming.md" >hello.c
check "the example of docs/programming.md links with pkg-config" '^$' \
    cc -Wall -Wextra -Wno-cast-function-type -Werror hello.c $(pkg-config --cflags --libs rpcrdma) -o hello
check "and by hand" '^$' cc hello.c $(pkg-config --cflags libtirpc) -L"$stage/lib" -Wl,--no-as-needed -lrpcrdma \
    -Wl,--as-needed -ltirpc -o byhand
# The manual's server that calls back, and its client.
awk '/^\.Ed/ { inside = 0 } inside { gsub(/\\e/, "\\"); print >file } /^\.Bd/ { inside = 1; file = "back" ++n ".c" }' \
    "$top/docs/rpcrdma_clnt_reverse.3"
for number in 1 2; do
    check "example $number of rpcrdma_clnt_reverse(3) links" '^$' cc -Wall -Wextra -Wno-cast-function-type -Werror \
        back$number.c $(pkg-config --cflags --libs rpcrdma) -o back$number
done
sed -n '/^\.Bd/,/^\.Ed/{/^\./d;s/\\e/\\/g;p}' "$top/docs/rpcrdma_clnt_peer.3" >peer.c
check "the example of rpcrdma_clnt_peer(3) links" '^$' cc -Wall -Wextra -Wno-cast-function-type -Werror \
    peer.c $(pkg-config --cflags --libs rpcrdma) -o peer
for program_file in hello byhand; do
    check "$program_file needs the library" 'librpcrdma\.so\.0' readelf -d $program_file
done
cc -w -o netid "$top/c-tests/netid.c" $(pkg-config --cflags --libs libtirpc)
cc -w -o stock hello.c $(pkg-config --cflags --libs libtirpc)
export LD_LIBRARY_PATH=$stage/lib
run=$stage/bin/rpcrdma-run

check "rpcrdma-run finds the library that is installed" "^$stage/lib/librpcrdma.so.0 \$" "$run" sh -c 'echo $LD_PRELOAD'

# What a user sees when something is wrong.
check "a misspelt variable is named" 'RPCRDMA_REDIRCT: no such environment variable; did you mean RPCRDMA_REDIRECT' \
    env RPCRDMA_REDIRCT=tcp ./hello 127.0.0.1 $program 1
check "a wrong value is named, and what is allowed" 'RPCRDMA_INLINE="5000": must be auto, or a multiple of 1024' \
    env RPCRDMA_INLINE=5000 ./hello 127.0.0.1 $program 1
check "an unknown host" 'RPC: Unknown host; no\.such\.host\.invalid' ./hello no.such.host.invalid $program 1

if [ -z "${README_IN_NS:-}" ]; then
    check "no rpcbind, or nothing registered" 'no rpcbind at 127.0.0.1:111|is not registered on netid rdma' \
        ./hello 127.0.0.1 $program 1
    skip "the example runs" "needs root for an rpcbind of its own"
    closing
fi

check "a server that is not there" "program $program is not registered on netid rdma at 127\.0\.0\.1" \
    ./hello 127.0.0.1 $program 1
log=$scratch/server.log
start_ready "$run" env RPCRDMA_LOG=info ./netid serve rdma
check "the example" "^program $program version 1 at 127\.0\.0\.1 is ready over rdma \$" ./hello 127.0.0.1 $program 1
check "the example, linked by hand" 'is ready over rdma' ./byhand 127.0.0.1 $program 1
check "the example against stock libtirpc, preloaded" 'is ready over rdma' "$run" ./stock 127.0.0.1 $program 1
check "the example without the library" 'RPC: Unknown protocol' ./stock 127.0.0.1 $program 1
check "the example of rpcbind itself" 'program 100000 is rpcbind itself, which is reached over tcp' ./hello 127.0.0.1 100000 4
check "the client's log" '^20[0-9-]{8}T[0-9:.]{15}Z rpcrdma\[[0-9]+\] info: fd [0-9]+: program [0-9]+ version 1 goes over rdma to 127\.0\.0\.1:[0-9]+ \(shared memory, inline 262144 bytes out and 262144 in\)' \
    env RPCRDMA_LOG=info ./hello 127.0.0.1 $program 1
check "the server's log" 'info: fd [0-9]+: accepted 127\.0\.0\.1:[0-9]+ over rdma \(shared memory' cat "$log"
check "an ordinary user's client" 'is ready over rdma' \
    setpriv --reuid 65534 --regid 65534 --clear-groups ./hello 127.0.0.1 $program 1
check "a full disk for the log is told once" \
    '^[^ ]+ rpcrdma\[[0-9]+\] error: the log /dev/full cannot be written: no space left on the device; lines are lost program .* is ready over rdma $' \
    env RPCRDMA_LOG=wire RPCRDMA_LOG_FILE=/dev/full ./hello 127.0.0.1 $program 1
ln -s made.log link.log
check "root follows no link to the log" 'no log: cannot open .*link.log: it is a symbolic link, which root does not follow' \
    env RPCRDMA_LOG=wire RPCRDMA_LOG_FILE=link.log ./hello 127.0.0.1 $program 1
check "the log is its owner's alone" '^program .*ready over rdma 600 made.log $' \
    sh -c "umask 0; RPCRDMA_LOG=wire RPCRDMA_LOG_FILE=made.log ./hello 127.0.0.1 $program 1; stat -c '%a %n' made.log"
check "a log that cannot be opened" 'no log: cannot open /does/not/exist: No such file.*is ready over rdma' \
    env RPCRDMA_LOG=wire RPCRDMA_LOG_FILE=/does/not/exist ./hello 127.0.0.1 $program 1

RPCRDMA_VERSION=auto ./back1 &
back=$!; children+=("$back")
wait_for 10 ./hello 127.0.0.1 $((0x20000200)) 1
check "the examples of rpcrdma_clnt_reverse(3)" '^42 $' ./back2
check "the example of rpcrdma_clnt_peer(3)" '^16384 $' env RPCRDMA_VERSION=auto ./peer
check "the same in Version One" 'version 1.*RPCRDMA_VERSION=auto' env RPCRDMA_VERSION=1 ./peer
stop "$back"

# /etc/rpcrdma.conf, in a copy of /etc mounted over it: the mount namespace is ours.
mkdir etc && cp -a /etc/. etc/ 2>/dev/null
mount --bind etc /etc || { FAIL "a copy of /etc takes its place"; closing; }
echo 'credit = 64' >/etc/rpcrdma.conf
check "a misspelt key in the file" '/etc/rpcrdma\.conf:1:1: "credit": no such setting; did you mean credits' \
    ./hello 127.0.0.1 $program 1
printf '# moved\nlog = info # who\ncredits = 64\n' >/etc/rpcrdma.conf
check "a file that is right" 'goes over rdma.*is ready over rdma' ./hello 127.0.0.1 $program 1
rm /etc/rpcrdma.conf

# A server that died left its rows behind.
kill -9 "$server"; wait "$server" 2>/dev/null
check "the server is gone, its row is not" 'cannot connect to 127\.0\.0\.1:[0-9]+: Connection refused' \
    ./hello 127.0.0.1 $program 1

# A server that knows only tcp.
start_ready ./netid serve tcp
uaddr=$(rpcinfo | awk -v p=$program '$1 == p && $3 == "tcp" { print $4 }')
check "rdma wanted of a stock server" 'no RDMA connection to 127\.0\.0\.1:[0-9]+: .*its server must run with librpcrdma' \
    "$run" rpcinfo -a "127.0.0.1${uaddr#0.0.0.0}" -T rdma $program 1
check "fallback" 'is ready over tcp' env NETID=tcp RPCRDMA_REDIRECT=tcp ./hello 127.0.0.1 $program 1
check "fallback forbidden" 'RPCRDMA_FALLBACK=no forbids tcp' \
    env NETID=tcp RPCRDMA_REDIRECT=tcp RPCRDMA_FALLBACK=no ./hello 127.0.0.1 $program 1
stop "$server"

# A server that is stopped with a call under way: Ctrl-C ends the client at once.
start_ready "$run" ./netid serve rdma
kill -STOP "$server"
env RPCRDMA_LOG=info ./hello 127.0.0.1 $program 1 >out 2>&1 &
client=$!
wait_for 10 sh -c "ls -l /proc/$client/fd | grep -q socket:"
kill -INT "$client"
# The shell starts background children with SIGINT ignored; SIGTERM takes the same path.
kill -TERM "$client"
wait "$client"; status=$?
if [ "$status" -eq 143 ] || [ "$status" -eq 130 ]; then ok "a signal ends a call"; else FAIL "a signal ends a call ($status)" out; fi
kill -CONT "$server"
stop "$server"

check "no rpcbind, client" 'no rpcbind at 127\.0\.0\.1:111: Connection refused; is it running' \
    env NO_RPCBIND=1 bash "$here/ns.sh" ./hello 127.0.0.1 $program 1
check "no rpcbind, server" 'rpcbind does not register program [0-9]+ version 1 on netid rdma6?: no rpcbind at 127\.0\.0\.1:111: .*; is it running' \
    env NO_RPCBIND=1 bash "$here/ns.sh" "$run" ./netid serve rdma
closing
