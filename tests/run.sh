#!/bin/bash
# run.sh: rpcrdma-run runs a program with the library loaded, or says why it cannot and runs nothing.
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
. "$here/lib.sh"
cd "$scratch" || exit 1
chmod 755 "$scratch"    # for the ordinary user
unset RPCRDMA_LIB LD_PRELOAD
# A copy beside the library, which it finds by itself.
mkdir "$scratch/build" && cp "$top/build/rpcrdma-run" "$LIBRPCRDMA" build/
run=$scratch/build/rpcrdma-run library=$scratch/build/librpcrdma.so.0

# check NAME STATUS EXPECTED COMMAND...: the command's standard output and error must match an extended regular expression.
check() {
    local name=$1 status=$2 expected=$3 got; shift 3
    rm -f ran; "$@" >out 2>&1; got=$?
    if [ $got -eq "$status" ] && grep -Eq -- "$expected" <<<"$(tr '\n' ' ' <out)"; then ok "$name"; else FAIL "$name (status $got)" out; fi
}
# refuses NAME STATUS EXPECTED COMMAND...: the same, and the command, which would create the file "ran", is not run.
refuses() {
    check "$@"
    [ ! -e ran ] || FAIL "$1: it runs all the same"
}

check "--help" 0 '^usage: rpcrdma-run .*--check' "$run" --help
check "--version names the library" 0 "^rpcrdma-run [0-9]+\.[0-9]+\.[0-9]+ $library \$" "$run" --version
check "no command" 125 '^usage: rpcrdma-run' "$run"
check "no command behind --" 125 '^usage: rpcrdma-run' "$run" --
check "an option that there is not" 125 '^rpcrdma-run: -x: no such option usage:' "$run" -x true
check "-- ends the options" 0 '^a b  \$ $' "$run" -- printf '%s ' 'a b' '' '$'
check "an argument like an option is the command's" 0 '^--check $' "$run" echo --check
check "the library is in the program" 0 "$library" "$run" cat /proc/self/maps
check "and in what the program runs" 0 "$library" "$run" sh -c 'cd / && cat /proc/self/maps'
check "the command's exit status" 42 '^$' "$run" sh -c 'exit 42'
check "other preloads stay" 0 "^$library:/lib/x86_64-linux-gnu/libdl.so.2 \$" \
    env LD_PRELOAD=/lib/x86_64-linux-gnu/libdl.so.2 "$run" sh -c 'echo $LD_PRELOAD'

# What the library does not understand is reported before the program runs, and by the library.
for typo in RPCRDMA_REDIRECT=tpc RPCRDMA_REDIRCT=tcp RPCRDMA_LOG=inof RPCRDMA_CREDITS=; do
    refuses "$typo" 125 "^rpcrdma-run: ${typo%%=*}.*: (must be |no such environment variable; did you mean RPCRDMA_REDIRECT\?)" \
        env "$typo" "$run" touch ran
done
printf '9 1 1 max-reply=1K\n9 1 2 arguments=itn\n' >bindings
refuses "everything that is wrong is said" 125 \
    '^rpcrdma-run: RPCRDMA_REDIRECT="tpc".* rpcrdma-run: bindings:2:17: "itn".* rpcrdma-run: none: No such file' \
    env RPCRDMA_REDIRECT=tpc RPCRDMA_BINDINGS=bindings,none "$run" touch ran
mkfifo fifo
refuses "a FIFO for bindings" 125 '^rpcrdma-run: fifo: must be a regular file' \
    timeout 20 env RPCRDMA_BINDINGS=fifo "$run" touch ran
check "--check says the same" 125 '^rpcrdma-run: RPCRDMA_REDIRECT="tpc": must be' env RPCRDMA_REDIRECT=tpc "$run" --check
check "--check of right settings" 0 '^$' env RPCRDMA_REDIRECT=tcp RPCRDMA_LOG=wire "$run" --check

# The library.
check "RPCRDMA_LIB" 0 "$LIBRPCRDMA" env RPCRDMA_LIB="$LIBRPCRDMA" "$run" cat /proc/self/maps
check "RPCRDMA_LIB, relative, and a command that goes elsewhere" 0 "^$library .*/build/librpcrdma" \
    env RPCRDMA_LIB=build/librpcrdma.so.0 "$run" sh -c 'cd / && echo $LD_PRELOAD && cat /proc/self/maps'
refuses "a library that is not there" 125 '^rpcrdma-run: /does/not/exist, which RPCRDMA_LIB names: No such file' \
    env RPCRDMA_LIB=/does/not/exist "$run" touch ran
echo text >text.so
refuses "what is no library" 125 '^rpcrdma-run: the library cannot be loaded: .*text.so: file too short|invalid ELF header' \
    env RPCRDMA_LIB=text.so "$run" touch ran
refuses "another library" 125 'libdl.so.2 is not the librpcrdma of this rpcrdma-run' \
    env RPCRDMA_LIB=/lib/x86_64-linux-gnu/libdl.so.2 "$run" touch ran
for name in 'a b' a:b 'a$b'; do
    mkdir "$name" && cp build/* "$name"
    refuses "a library in \"$name\"" 125 "LD_PRELOAD cannot hold a path" "$name/rpcrdma-run" touch ran
done
ln -s 'a b/librpcrdma.so.0' link
check "a link to one in \"a b\"" 0 '/a b/librpcrdma' env RPCRDMA_LIB="$PWD/link" "$run" cat /proc/self/maps
mkdir alone && cp build/rpcrdma-run alone
[ -e /usr/local/lib/librpcrdma.so.0 ] && skip "neither built nor installed" "one is installed" ||
    refuses "neither built nor installed" 125 'neither built nor installed \(make, make install\)' alone/rpcrdma-run touch ran

# The command.
refuses "a command that is not there" 127 '^rpcrdma-run: no-such-command: No such file' "$run" no-such-command
refuses "a command that is not executable" 126 '^rpcrdma-run: ./bindings: Permission denied' "$run" ./bindings
refuses "a directory" 126 '^rpcrdma-run: /: Permission denied' "$run" /
printf '#!/bin/sh\ncat /proc/self/maps\n' >script && chmod 755 script
check "a script" 0 "$library" "$run" ./script
check "the loader, run as a program" 0 "$library" "$run" /lib64/ld-linux-x86-64.so.2 "$(command -v cat)" /proc/self/maps
echo 'int main(void) { return 0; }' >nothing.c
for flag in -static -static-pie; do
    if cc $flag -o "static$flag" nothing.c 2>cc.log; then
        refuses "a program linked with $flag" 126 "static$flag is statically linked: no library" "$run" "./static$flag"
    else
        skip "a program linked with $flag" "cc cannot"
    fi
done
if cc -m32 -nostdlib -static -Wl,-e,main -o narrow nothing.c 2>cc.log; then
    refuses "a program of another word size" 126 'narrow is a program for another processor or word size' "$run" ./narrow
else
    skip "a program of another word size" "cc cannot"
fi

if [ "$(id -u)" -ne 0 ]; then
    skip "programs with more rights than their caller" "needs root"
    closing
fi
ordinary=(setpriv --reuid 65534 --regid 65534 --clear-groups)
cp "$(type -P true)" true; chmod 4755 true
check "set-user-ID, for the owner himself" 0 '^$' "$run" ./true
if findmnt -no OPTIONS -T . | grep -q nosuid; then
    skip "programs with more rights than their caller" "nosuid here"
else
    refuses "set-user-ID" 126 './true is set-user-ID: the loader puts no library' "${ordinary[@]}" "$run" ./true
    check "set-user-ID, by the PATH" 126 '/true is set-user-ID' env PATH="$PWD:$PATH" "${ordinary[@]}" "$run" true
    check "set-user-ID, where it has no effect" 0 '^$' "${ordinary[@]}" --no-new-privs "$run" ./true
    chmod 4711 true
    refuses "set-user-ID, unreadable" 126 './true is set-user-ID' "${ordinary[@]}" "$run" ./true
    chmod 2755 true
    refuses "set-group-ID" 126 './true is set-group-ID' "${ordinary[@]}" "$run" ./true
    chmod 755 true
    if command -v setcap >/dev/null && setcap cap_net_raw+ep true 2>/dev/null; then
        refuses "capabilities of the file" 126 './true has capabilities' "${ordinary[@]}" "$run" ./true
    else
        skip "capabilities of the file" "no setcap"
    fi
fi
chmod 600 build/librpcrdma.so.0
refuses "a library that may not be read" 125 'cannot be loaded: .*librpcrdma.so.0: .*Permission denied' "${ordinary[@]}" "$run" true
closing
