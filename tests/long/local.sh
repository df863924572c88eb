#!/bin/bash
# local.sh [MINUTES [COUNT [SEED]]]: tests/local.sh for longer: MINUTES (10) in which memory is rewritten at random, half of them
# at either end; COUNT (1000) processes that are killed, at either end; a client that never answers a server's offer; and what
# 1000 idle connections take. Every day has a seed of its own, which the first line of output shows.
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
export LOCAL_LONG=yes
seed=${3:-$(date +%Y%m%d)}
echo "      seed $seed"
exec bash "$here/../local.sh" $((${1:-10} * 30)) "${2:-1000}" "$seed"
