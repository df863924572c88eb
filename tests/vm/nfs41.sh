#!/bin/bash
# nfs41.sh [PATH...]: calls from the server to the client (RFC 8167): the back channel of NFS version 4.1 between
# the examples and the Linux kernel, in a guest for each path (guest.sh). Run by `make check-vm`.
. "$(dirname "${BASH_SOURCE[0]}")/guest.sh"
run_in_guest "the back channel of the kernel's NFS/RDMA" 300 "${BASH_SOURCE[0]}" "$@"

# Linux revokes a delegation that is not returned within the time of a lease after its recall, 10 seconds here.
soon=8000000 # microseconds
nfs41=("${preloaded[@]}" "$programs41/nfs41")
nfs41d=("${preloaded[@]}" "$programs41/nfs41d")
out=$scratch/out log=$scratch/log

# What our program has printed.
says() { grep -qx "$1" "$out"; }

# delegated WHAT [OPTION]: our client gets a delegation of $file.
files=0
delegated() {
    what="$path: our client, the kernel's server, $1"; shift
    # Linux grants no delegation of a file for which it has just recalled one.
    file=file.$((++files))
    echo one >/export/$file
    "${nfs41[@]}" "$@" $address $file 60 >"$out" 2>&1 &
    holder=$!; children+=($!)
    if wait_for 20 says 'delegation: read'; then ok "$what: a read delegation"
    else FAIL "$what: a read delegation" "$out"; fi
}
# recalled DIRECTORY LINE...: another client writes the file there, and has to wait for the delegation. Our client must have
# printed these lines.
recalled() {
    local directory=$1; shift
    if timed timeout "$(patient 60)" dd of="$directory/$file" conv=notrunc status=none <<<two && [ $micros -lt $soon ]; then
        ok "$what: the other one writes after $(seconds)"
    else
        FAIL "$what: the other one writes after $(seconds)"
    fi
    if wait $holder && [ "$(cat "$out")" = "$(printf '%s\n' "$@")" ] && [ "$(cat /export/$file)" = two ]; then
        ok "$what: $(paste -sd, "$out")"
    else
        FAIL "$what: recall" "$out"
    fi
}
# Linux sends no CB_NULL to a version 4.1 client.
delegation='delegation: read' recall=('callback: CB_RECALL' 'delegation returned')


kernels_server() {
    # With version 3 there would be lockd, with a grace period in which nothing is delegated.
    nfsd=(rpc.nfsd --no-udp --no-nfs-version 3)
    nfsd_up
    # Ends the grace period of version 4: no client will reclaim anything.
    must tee /proc/fs/nfsd/v4_end_grace <<<Y
    must mount -t nfs -o vers=4.2,proto=tcp $address:/ /mnt

    delegated "written by the kernel's client"
    if ! ss -Hltunp | grep -q "pid=$holder," && ! rdma resource show cm_id pid $holder | grep -q LISTEN; then
        ok "$what: which listens nowhere"
    else
        FAIL "$what: which listens nowhere"
    fi
    recalled /mnt "$delegation" "${recall[@]}"
    delegated "written at the server"
    recalled /export "$delegation" "${recall[@]}"
    delegated "returned within the callback" -c
    recalled /mnt "$delegation" "${recall[@]}"
    # Long enough for the lease to end if nobody renewed it.
    delegated "12 seconds later"
    sleep 12
    recalled /mnt "$delegation" "${recall[@]}"
    if [ "${path#*/}" != rxe ]; then
        delegated "a new connection"
        must ss -K dst $address dport = 20049
        if wait_for 20 says 'the back channel is on a new connection'; then ok "$what: the back channel too"
        else FAIL "$what: the back channel too" "$out"; fi
        recalled /mnt "$delegation" 'the back channel is on a new connection' "${recall[@]}"
    fi
    must umount /mnt
}

# What our server prints about a recall when all is well.
answers=('CB_NULL: answered' 'CB_RECALL: answered' 'CB_RECALL: status 0' 'delegation returned')
# ends_with LINE...: are these the last lines that our program has printed?
ends_with() { [ "$(tail -n $# "$out")" = "$(printf '%s\n' "$@")" ]; }
# asked_back: our server recalls the delegation.
asked_back() {
    echo recall >&$commands
    if timed wait_for 15 ends_with 'delegation: read' "${answers[@]}"; then
        ok "$what: $(tail -n 4 "$out" | paste -sd,) ($(seconds))"
    else
        cat "$log" >>"$out"; FAIL "$what: recall" "$out"
    fi
}

kernels_client() {
    local file=$scratch/served what="$path: the kernel's client, our server" held commands
    head -c 300001 /dev/urandom >"$file"
    mkfifo "$scratch/commands"
    exec {commands}<>"$scratch/commands"
    "${nfs41d[@]}" -p 20050 "$file" <"$scratch/commands" >"$out" 2>"$log" &
    server=$!; children+=($server)
    must wait_for 20 says 'READY 20050'
    timeout "$(patient 60)" mount -t nfs -o ro,vers=4.1,proto=rdma,port=20050 $address:/ /mnt
    if mountpoint -q /mnt && says 'session with a back channel'; then ok "$what: mount, with a back channel"
    else FAIL "$what: mount" "$out"; return; fi
    if [ "$(ls /mnt)" = served ] && cmp "$file" /mnt/served; then ok "$what: ls, cmp"; else FAIL "$what: ls, cmp"; fi
    if says 'delegation: read'; then ok "$what: a read delegation"; else FAIL "$what: a read delegation" "$out"; fi
    asked_back

    # As long as the kernel has the delegation, it opens the file by itself. It tells the server when it returns the delegation.
    what+=", the file open"
    cat /mnt/served >/dev/null
    exec {held}</mnt/served
    asked_back
    echo 3 >/proc/sys/vm/drop_caches
    if cmp "$file" - <&$held; then ok "$what: it can be read"; else FAIL "$what: it can be read"; fi
    exec {held}<&-

    if [ "${path#*/}" != rxe ]; then
        what="$path: the kernel's client, our server, a new connection"
        # The kernel returns a delegation that nobody has used for the time of a lease, unless the file is open.
        exec {held}</mnt/served
        must ss -K dst $address dport = 20050
        echo recall >&$commands
        if wait_for 20 grep -q '^CB_NULL: failed' "$out"; then ok "$what: $(tail -n 1 "$out")"
        else FAIL "$what: no recall without a connection" "$out"; fi
        ls -l /mnt >/dev/null
        if wait_for 60 says 'the back channel is on a new connection'; then ok "$what: the back channel too"
        else FAIL "$what: the back channel too" "$out"; fi
        echo recall >&$commands
        if timed wait_for 15 ends_with 'the back channel is on a new connection' "${answers[@]}"; then
            ok "$what: $(tail -n 4 "$out" | paste -sd,) ($(seconds))"
        else
            cat "$log" >>"$out"; FAIL "$what: recall" "$out"
        fi
        exec {held}<&-
    fi
    if umount /mnt && wait_for 10 ends_with 'session ended'; then ok "$path: umount"; else FAIL "$path: umount" "$out"; fi
    stop "$server"
}

device_up
must modprobe nfs
mkdir -p /mnt
kernels_server
kernels_client
device_down
closing
