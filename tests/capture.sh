#!/bin/bash
# capture.sh: what an independent reader makes of the bytes. Runs part of the C tests over netid rdma in a private
# network, with CRCs forced on, captures the loopback and has tshark decode it: MPA, DDP and RDMAP, RPC-over-RDMA,
# RPC. Every CRC must be good, nothing may be malformed, and none of our RPCs may have gone over plain TCP.
#
#   capture.sh                  needs root for a private network, dumpcap and tshark
#   capture.sh --check FILE     judges an existing capture
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
if [ "${1:-}" != --check ] && [ -z "${SUITE_IN_NS:-}" ] && why=$(bash "$here/ns.sh" --possible); then
    export SUITE_IN_NS=1
    exec bash "$here/ns.sh" bash "${BASH_SOURCE[0]}"
fi
. "$here/lib.sh"

# All kinds of messages, but not all sizes: tshark takes its time.
tests=(clnt_create_finds_the_server payload_{to_the_server,from_the_server,both_ways}_{0,1,3,4095,4096,4097,65536,1048576}
    reply_of_unforeseen_length fixed_arrays linked_lists strings arguments_from_temporaries timeout_leaves_the_handle_usable
    late_reply_is_skipped late_reply_does_not_touch_the_callers_memory batch_of_three_one_way_calls
    several_clients_on_one_descriptor calls_of_two_threads_overlap unknown_program_version_and_procedure
    errors_that_the_server_reports auth_none_and_auth_sys child_of_the_server_may_reply serves_svc_tli_create_svc_run
    server_that_exits_right_after_its_reply_has_replied server_killed_during_a_call gss_integrity)

if [ "${1:-}" = --check ]; then
    capture=$2
else
    [ -n "${SUITE_IN_NS:-}" ] || { skip capture "$why"; closing; }
    for tool in dumpcap tshark; do command -v $tool >/dev/null || { skip capture "$tool is not installed"; closing; }; done
    [ -r "$LIBRPCRDMA" ] || { FAIL "$LIBRPCRDMA is missing"; closing; }
    capture=$scratch/lo.pcap
    capture_start "$capture" || { FAIL "dumpcap does not start" "$capture.log"; closing; }
    if RPCRDMA_CRC=yes bash "$here/../c-tests/run.sh" rdma "${tests[@]}" >"$scratch/suite.out" 2>&1; then
        ok "captured suite: $(tail -n 1 "$scratch/suite.out")"
    else
        FAIL "captured suite" "$scratch/suite.out"
    fi
    if capture_stop; then ok "no packet dropped"; else FAIL "packets were dropped" "$capture.log"; fi
fi

# Root's clients take reserved ports, of which there are few: a pair of ports may be used twice, and tshark 4.0 then reads
# the second MPA Request as an FPDU of the first connection. So the n-th use of each pair is read from a file of its own.
read_frames -r "$capture" -Y 'tcp.flags.syn == 1 && tcp.flags.ack == 0' -T fields -e tcp.stream -e tcp.srcport -e tcp.dstport |
    awk '!($1 in seen) { seen[$1] = 1; print ++n[$2 " " $3], $1 }' | sort -n >"$scratch/uses"
read_capture() {
    local use streams
    for use in $(cut -d' ' -f1 "$scratch/uses" | uniq); do
        streams=$(awk -v use="$use" '$1 == use { printf "%s%s", sep, $2; sep = "," }' "$scratch/uses")
        [ -r "$scratch/use.$use" ] || read_frames -r "$capture" -Y "tcp.stream in {$streams}" -w "$scratch/use.$use"
        read_frames -r "$scratch/use.$use" "$@"
    done
}
read_capture -V -O iwarp_mpa >"$scratch/mpa.txt"
good=$(grep -c 'Good CRC32' "$scratch/mpa.txt")
bad=$(grep -c 'Bad CRC32' "$scratch/mpa.txt")
fpdus=$(grep -c 'ULPDU length' "$scratch/mpa.txt")

# One row per frame: which layers, streams, opcodes and chunk lists it holds.
fields=(tcp.stream tcp.srcport tcp.dstport iwarp_rdma.opcode rpcordma.msg_type rpcordma.reads_count
    rpcordma.writes_count rpcordma.reply_count rpc.msgtyp _ws.malformed _ws.expert.severity tcp.flags.syn iwarp_mpa.req
    iwarp_mpa.rep iwarp_mpa.fpdu)
read_capture -T fields -E separator=/t -E aggregator=, $(printf -- '-e %s ' "${fields[@]}") -e frame.protocols >"$scratch/rows"
count() { awk -F'\t' "$1 { n++ } END { print n + 0 }" "$scratch/rows"; }
requests=$(count '$13 != ""')
replies=$(count '$14 != ""')
messages=$(count '$5 != ""')
over_rdma=$(count '$16 ~ /rpcordma:.*rpc/ || ($5 != "" && $9 != "")')
malformed=$(count '$10 != ""')
# Only rpcbind may use plain RPC over TCP.
plain=$(count '$9 != "" && $5 == "" && $4 == "" && $2 != "" && $2 != 111 && $3 != 111')

echo "frames $(wc -l <"$scratch/rows"), MPA Requests $requests, Replies $replies, FPDUs $fpdus (CRC good $good, bad $bad)"
echo "RDMAP opcodes: $(awk -F'\t' '{ k = split($4, o, ","); for (i = 1; i <= k; i++) n[o[i]]++ }
    END { for (c in n) printf "%s x %d  ", c, n[c] }' "$scratch/rows")"
echo "RPC-over-RDMA messages $messages, decoded as RPC $over_rdma; types: $(awk -F'\t' '{ k = split($5, t, ","); for (i = 1; i <= k; i++) n[t[i]]++ }
    END { for (c in n) printf "%s x %d  ", c, n[c] }' "$scratch/rows")"

check() { if [ "$2" "$3" "$4" ]; then ok "$1"; else FAIL "$1 ($2)"; fi; }
check "MPA handshakes are decoded" "$requests" -gt 0
check "every MPA Request has its Reply" "$requests" -eq "$replies"
check "FPDUs are decoded" "$fpdus" -gt 0
check "every FPDU has a good CRC" "$good" -eq "$fpdus"
check "no FPDU has a bad CRC" "$bad" -eq 0
check "RPC-over-RDMA messages are decoded" "$messages" -gt 0
check "RPC is decoded inside them" "$over_rdma" -gt 0
check "no frame is malformed" "$malformed" -eq 0
check "no RPC of ours went over plain TCP" "$plain" -eq 0
closing
