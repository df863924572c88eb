#!/bin/bash
# starve.sh: tests/starve.sh for every single request.
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
exec bash "$here/../starve.sh" 1
