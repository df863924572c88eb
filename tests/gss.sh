#!/bin/bash
# gss.sh: RPCSEC_GSS with a private KDC: calls back (c-tests/gss_back.c: rule 144), and a server of several threads
# (c-tests/gss_threads.c); both also under valgrind.
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
. "$here/lib.sh"
cd "$scratch" || exit 1
pkg-config --exists krb5-gssapi && [ -x "$(PATH=$PATH:/usr/sbin command -v krb5kdc)" ] ||
    { skip "RPCSEC_GSS" "no Kerberos"; closing; }
build=$(dirname "$LIBRPCRDMA")
for program in gss_back gss_threads; do
    cc -g -pthread -Wall -Wextra -Werror -Wno-cast-function-type -o $program "$top/c-tests/$program.c" -I"$top/include" \
        $(pkg-config --cflags libtirpc krb5-gssapi) -L"$build" -Wl,-rpath,"$build" -lrpcrdma $(pkg-config --libs libtirpc) 2>cc.log ||
        { FAIL "$program.c compiles" cc.log; closing; }
done
if ! PATH=$PATH:/usr/sbin bash "$top/c-tests/kdc.sh" "$scratch/kdc" >kdc.env; then
    FAIL "a KDC starts" kdc/log
    closing
fi
. ./kdc.env
children+=("$(cat kdc/pid)")
for tool in '' 'valgrind -q --error-exitcode=9 --child-silent-after-fork=yes'; do
    [ -z "$tool" ] || command -v valgrind >/dev/null || { skip "under valgrind" "not installed"; continue; }
    for program in gss_back gss_threads; do
        # shellcheck disable=SC2086
        timeout "$(patient 100)" env ${tool:+RPCRDMA_POLL=0} $tool ./$program >out 2>err
        status=$?
        while read -r line; do ok "${line#ok    }${tool:+, under valgrind}"; done <out
        [ "$status" -eq 0 ] && [ ! -s err ] || FAIL "$program${tool:+, under valgrind} (status $status)" err
    done
done
closing
