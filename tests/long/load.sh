#!/bin/bash
# load.sh [CALLS [SEED]]: tests/load.sh for longer: CALLS (100000) over each transport. Every day has a seed of its own,
# which is printed: what fails can be repeated with it.
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
export LOAD_TABLE=yes
exec bash "$here/../load.sh" "${1:-100000}" "${2:-$(date +%Y%m%d)}"
