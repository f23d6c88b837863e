# Sourced by the other scripts: find a Python, make virtual environments, say what is going on.

stage() { printf '\n== %s\n' "$*"; }

fail() {
  printf '%s\n' "$@" >&2
  exit 1
}

# python_between LOWEST HIGHEST: a Python of a release from LOWEST to HIGHEST (3.x, only x), with venv.
# $PYTHON comes first, then python3, then whatever python3.x there is, pyenv's included.
python_between() {
  local candidate
  for candidate in ${PYTHON:-} python3 python3.{13,12,11,10,9} "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.*/bin/python3; do
    if "$candidate" -c "import ensurepip, sys, venv; sys.exit(not (3, $1) <= sys.version_info[:2] <= (3, $2))" \
      2>/dev/null; then
      printf '%s' "$candidate"
      return
    fi
  done
  fail "No Python 3.$1 to 3.$2 with the venv module is here." \
    "Set PYTHON to one; on Debian and Ubuntu: apt-get install python3-venv."
}

# environment FOLDER PYTHON REQUIREMENT...: a virtual environment, made anew only when what is asked for
# has changed.
environment() {
  local folder=$1 python=$2
  shift 2
  local wanted
  wanted=$(printf '%s\n' "$("$python" -VV)" "$@" "$(cksum pyproject.toml)")
  [ "$(cat "$folder/made-for" 2>/dev/null)" = "$wanted" ] && return
  stage "$folder: $*"
  rm -rf "$folder"
  "$python" -m venv "$folder"
  "$folder/bin/python" -m pip install --quiet --upgrade pip
  "$folder/bin/python" -m pip install --quiet "$@"
  printf '%s\n' "$wanted" >"$folder/made-for"
}
