#!/bin/bash
# figures.sh: the page of figures that `rpcrdma stat` reads costs a null call, at either end, at most 1 % of its instructions.
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
. "$here/../lib.sh"
command -v valgrind >/dev/null || { skip "the cost of the page of figures" "valgrind is not installed"; closing; }
if ! ONLY='null 0' bash "$top/bench/instructions.sh" rdma unwatched >"$scratch/table" 2>&1; then
    FAIL "instructions are counted" "$scratch/table"; closing
fi
# over call bytes client server allocations
for end in client:4 server:5; do
    read -r with without <<<"$(awk -v column="${end#*:}" '{ n[$1] = $column } END { print n["rdma"], n["unwatched"] }' "$scratch/table")"
    name="a null call at the ${end%:*}: $with instructions, $without without the page"
    if [ "${without:-0}" -gt 0 ] && [ $(((with - without) * 100)) -le "$without" ]; then ok "$name"; else FAIL "$name" "$scratch/table"; fi
done
closing
