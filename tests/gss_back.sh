#!/bin/bash
# gss_back.sh: calls back with RPCSEC_GSS and a KDC of their own (c-tests/gss_back.c), also under valgrind: rule 144.
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
. "$here/lib.sh"
cd "$scratch" || exit 1
pkg-config --exists krb5-gssapi && [ -x "$(PATH=$PATH:/usr/sbin command -v krb5kdc)" ] ||
    { skip "calls back with RPCSEC_GSS" "no Kerberos"; closing; }
build=$(dirname "$LIBRPCRDMA")
if ! cc -g -Wall -Wextra -Werror -Wno-cast-function-type -o gss_back "$top/c-tests/gss_back.c" -I"$top/include" \
    $(pkg-config --cflags libtirpc krb5-gssapi) -L"$build" -Wl,-rpath,"$build" -lrpcrdma $(pkg-config --libs libtirpc) 2>cc.log; then
    FAIL "gss_back.c compiles" cc.log
    closing
fi
if ! PATH=$PATH:/usr/sbin bash "$top/c-tests/kdc.sh" "$scratch/kdc" >kdc.env; then
    FAIL "a KDC starts" kdc/log
    closing
fi
. ./kdc.env
children+=("$(cat kdc/pid)")
for tool in '' 'valgrind -q --error-exitcode=9 --child-silent-after-fork=yes'; do
    [ -z "$tool" ] || command -v valgrind >/dev/null || { skip "under valgrind" "not installed"; continue; }
    # shellcheck disable=SC2086
    timeout "$(patient 100)" env ${tool:+RPCRDMA_POLL=0} $tool ./gss_back >out 2>err
    status=$?
    while read -r line; do ok "${line#ok    }${tool:+, under valgrind}"; done <out
    [ "$status" -eq 0 ] && [ ! -s err ] || FAIL "calls back with RPCSEC_GSS${tool:+, under valgrind} (status $status)" err
done
closing
