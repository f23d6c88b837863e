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

# environment FOLDER PYTHON REQUIREMENT...: a virtual environment that has what is asked for.  Nothing is
# done when the last run asked for the same; another Python makes a new one, other requirements are added.
environment() {
  local folder=$1 python=$2 version wanted
  shift 2
  version=$("$python" -VV | tr '\n' ' ')
  wanted=$(printf '%s\n' "$version" "$@" "$(sed -n '/^dependencies/,/^\[project.scripts\]/p' pyproject.toml)")
  [ "$(cat "$folder/made-for" 2>/dev/null)" = "$wanted" ] && return
  stage "$folder: $*"
  if [ "$(head -n 1 "$folder/made-for" 2>/dev/null)" != "$version" ]; then
    rm -rf "$folder"
    "$python" -m venv "$folder"
    "$folder/bin/python" -m pip install --quiet --upgrade pip
  fi
  "$folder/bin/python" -m pip install --quiet "$@"
  printf '%s\n' "$wanted" >"$folder/made-for"
}
