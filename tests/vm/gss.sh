#!/bin/bash
# gss.sh [PATH...]: RPCSEC_GSS with Kerberos 5 over RDMA: the examples' NFS version 3 client and the kernel's
# server, in a guest with a KDC and rpc.svcgssd for each path (guest.sh).
#
# The other direction cannot be tested: the kernel's client has rpc.gssd create a context on a separate TCP connection,
# and uses it on the mount's; libtirpc, on which nfs3d is built, looks for a context only on the connection that created it.
. "$(dirname "${BASH_SOURCE[0]}")/guest.sh"
name="RPCSEC_GSS with the kernel's server"
pkg-config --exists krb5-gssapi && PATH=$PATH:/usr/sbin command -v krb5kdc >/dev/null ||
    { skip "$name" "krb5-kdc or libkrb5-dev is not installed"; closing; }
run_in_guest "$name" 200 "${BASH_SOURCE[0]}" "$@"

host=vm.suite.test
uid=4711
sizes=(0 1 400 401 4096 65536 1048575 1048576 2500001)

# The realm of the C suite, with nfs/$host in it; suiteuser is the user 4711.
realm_up() {
    printf '%s\n' '127.0.0.1 localhost' "$address $host" >/etc/hosts
    hostname $host
    echo "suiteuser:x:$uid:$uid::/:/bin/sh" >>/etc/passwd
    printf '%s\n' '[General]' 'Domain = suite.test' 'Local-Realms = SUITE.TEST' >/etc/idmapd.conf
    local made
    made=$(bash "$top/c-tests/kdc.sh" "$scratch/kdc" 2>"$scratch/out") || { FAIL "a KDC" "$scratch/out"; closing; }
    eval "$made"
    children+=("$(cat "$scratch/kdc/pid")")
    export KRB5_KDC_PROFILE=$scratch/kdc/kdc.conf
    must kadmin.local -r SUITE.TEST -q "addprinc -randkey nfs/$host"
    must kadmin.local -r SUITE.TEST -q "ktadd nfs/$host"
}

# nfsd for RPCSEC_GSS alone.
secure_nfsd() {
    must modprobe rpcsec_gss_krb5
    must exportfs -u '*:/export'
    must exportfs -o "rw,fsid=0,no_root_squash,insecure,no_subtree_check,async,sec=krb5:krb5i:krb5p" '*:/export'
    chmod 777 /export
    rpc.svcgssd -f >"$scratch/svcgssd.log" 2>&1 &
    children+=($!)
    # nfsd is ready when the first context can be created.
    must wait_for 10 nfs3_over_tcp krb5 stat /
}
nfs3_over_tcp() { timeout "$(patient 60)" "$programs/nfs3" -p 2049 -m 20048 -e /export -s "$1" $host "${@:2}"; }

secured() {
    local security=$1 what="$path: $1" size file wrong=
    # Linux 6.1.192 cannot decode what it has decrypted, whatever the client and the transport; 6.1.176 could.
    if ! nfs3_over_tcp $security stat / >"$scratch/out" 2>&1; then
        skip "$what" "not over tcp either, without this library: $(tail -n 1 "$scratch/out")"
        return
    fi
    if timed "${client[@]}" -s $security $host check -N 0 -L 1,255,1000 "${sizes[@]}" >"$scratch/out" 2>&1; then
        ok "$what: $(cat "$scratch/out") ($(seconds))"
    else
        FAIL "$what" "$scratch/out"
    fi
    for size in 400 65536 1048576 2500001; do
        file=$scratch/$size
        head -c $size /dev/urandom >"$file"
        "${client[@]}" -s $security $host put "$file" $size &&
            "${client[@]}" -s $security $host get $size "$scratch/got" &&
            cmp "$file" "/export/$size" && cmp "$file" "$scratch/got" || wrong+=" $size"
    done >"$scratch/out" 2>&1
    if [ -z "$wrong" ]; then ok "$what: the server's files are what was put, and what is got"
    else FAIL "$what: files of$wrong bytes" "$scratch/out"; fi
    if [ "$(stat -c %u /export/65536)" = $uid ]; then ok "$what: the server knows who made them"
    else FAIL "$what: the server knows who made them"; fi
    rm -rf /export/*

    # rule 119: data travels in chunks of its own only where no checksum and no encryption covers it.
    RPCRDMA_LOG=wire "${client[@]}" -s $security $host put "$scratch/65536" large 2>"$scratch/put"
    RPCRDMA_LOG=wire "${client[@]}" -s $security $host get large "$scratch/got" 2>"$scratch/get"
    if [ $security = krb5 ]; then
        if reduced "$scratch/put" && reduced "$scratch/get"; then ok "$what: data in chunks of their own"
        else FAIL "$what: data in chunks of their own" "$scratch/put"; fi
    elif ! reduced "$scratch/put" "$scratch/get" && grep -q '> RDMA_NOMSG' "$scratch/put"; then
        ok "$what: data within their messages"
    else
        FAIL "$what: data within their messages" "$scratch/put"
    fi
    rm -f /export/large
}

reduced() { grep -Eq 'reads \[[1-9]|writes \[\[' "$@"; }

# With verbs a call makes room for a reply of 256 KiB by default; here a reply can hold a READ's data.
export RPCRDMA_MAX_REPLY=2M
realm_up
device_up
nfsd_up
secure_nfsd
what="$path: the server takes nobody without RPCSEC_GSS"
"${client[@]}" $host mkdir directory >"$scratch/out" 2>&1
if grep -q NFS3ERR_ACCES "$scratch/out"; then ok "$what"; else FAIL "$what" "$scratch/out"; fi
for security in krb5 krb5i krb5p; do secured $security; done
device_down
closing
