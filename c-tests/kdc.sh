#!/bin/bash
# kdc.sh DIRECTORY: a Kerberos realm in a directory, for one test run, with no need of root.
#
# Makes the realm SUITE.TEST with the service suite/localhost and the user suiteuser, starts krb5kdc on a free port
# and prints the environment that makes a program use all that, as lines for eval. The KDC's process id is in
# DIRECTORY/pid; the caller has to kill it.
set -eu
directory=$1
mkdir -p "$directory"
export KRB5_CONFIG=$directory/krb5.conf KRB5_KDC_PROFILE=$directory/kdc.conf
export KRB5_KTNAME=FILE:$directory/keytab KRB5CCNAME=FILE:$directory/cache

configure_kdc() {
    cat >"$directory/kdc.conf" <<END
[kdcdefaults]
    kdc_listen = ""
    kdc_tcp_listen = 127.0.0.1:$1
[realms]
    SUITE.TEST = {
        database_name = $directory/principal
        key_stash_file = $directory/stash
        acl_file = $directory/acl
    }
END
}
# Host names are taken as they are: there is no DNS to ask in a private network.
configure() {
    cat >"$directory/krb5.conf" <<END
[libdefaults]
    default_realm = SUITE.TEST
    dns_lookup_kdc = false
    dns_lookup_realm = false
    dns_canonicalize_hostname = false
    rdns = false
    udp_preference_limit = 1
    qualify_shortname = ""
[realms]
    SUITE.TEST = {
        kdc = 127.0.0.1:$1
    }
[domain_realm]
    localhost = SUITE.TEST
END
}
configure 1
configure_kdc 1
kdb5_util create -s -r SUITE.TEST -P master >"$directory/log" 2>&1
kadmin.local -r SUITE.TEST >>"$directory/log" 2>&1 <<END
addprinc -randkey suite/localhost
addprinc -pw secret suiteuser
ktadd -k $directory/keytab suite/localhost
END
# The KDC cannot say which port it took, so ports are tried until it takes one.
for _ in $(seq 20); do
    port=$((20000 + RANDOM % 12000))
    configure "$port"
    configure_kdc "$port"
    krb5kdc -n -r SUITE.TEST -P "$directory/pid" >>"$directory/log" 2>&1 </dev/null &
    pid=$!
    for _ in $(seq 100); do
        kill -0 "$pid" 2>/dev/null || break
        if kinit -c "$KRB5CCNAME" suiteuser <<<secret >>"$directory/log" 2>&1; then
            echo "$pid" >"$directory/pid"
            printf 'export KRB5_CONFIG=%q KRB5_KTNAME=%q KRB5CCNAME=%q\n' "$KRB5_CONFIG" "$KRB5_KTNAME" "$KRB5CCNAME"
            exit 0
        fi
        sleep 0.05
    done
    kill "$pid" 2>/dev/null || true
done
tail -n 20 "$directory/log" >&2
echo "kdc.sh: no KDC" >&2
exit 1
