#!/bin/bash
# back.sh [SECONDS]: tests/back.sh for longer: SECONDS (180) of each load.
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
exec bash "$here/../back.sh" "${1:-180}"
