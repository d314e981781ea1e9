# The gate and its parts. `just` comes with the environment: `uv run just check`.

packages := "core cache speculative multimodal server"

[private]
default:
    @{{ just_executable() }} --list

# The gate, in order, cheap first
check: lock format lint contracts types alone media test deps build

# uv.lock fits the pyproject files
lock:
    uv lock --check

# Formatting, checked only (`just fix` rewrites)
format:
    uv run ruff format --check

# Lint
lint:
    uv run ruff check

# Rewrite what ruff can: formatting and safe lint fixes
fix:
    uv run ruff check --fix
    uv run ruff format

# The import contracts in pyproject.toml (multimodal is not installed by default: read in place)
contracts:
    PYTHONPATH=packages/multimodal/src uv run lint-imports

# Types: basedpyright, strict on every package's src
types:
    uv run basedpyright

# Each package alone: its tests, in an environment that holds it and its dependencies only
alone *names=packages:
    #!/usr/bin/env bash
    set -euo pipefail
    for name in {{ names }}; do
        groups=(--group test)
        if [[ $name == server ]]; then groups+=(--group client); fi
        echo "--- treadle-$name alone"
        uv run --package "treadle-$name" --isolated --exact --no-default-groups "${groups[@]}" \
            pytest "packages/$name/tests"
    done

# The server with every extra: media from HTTP to the model, which no package alone can show
media:
    uv run --package treadle-server --extra all --isolated --exact --no-default-groups \
        --group test --group client \
        pytest packages/server/tests/test_media.py packages/server/tests/test_media_options.py

# All tests, or one package's in the shared environment: `just test core -k sampling`
test package="" *args:
    uv run pytest {{ if package == "" { "" } else { "packages/" + package + "/tests" } }} {{ args }}

# Each package declares what it imports and imports what it declares
deps *names=packages:
    #!/usr/bin/env bash
    set -euo pipefail
    for name in {{ names }}; do
        echo "--- treadle-$name"
        (cd "packages/$name" && uv run --project ../.. deptry src)
    done

# All wheels, then a clean import outside the workspace: first without multimodal, then with it
build:
    #!/usr/bin/env bash
    set -euo pipefail
    work=$(mktemp -d)
    trap 'rm -rf "$work"' EXIT
    uv build --quiet --all-packages --no-sources --out-dir "$work/dist"
    # The lock's versions, so that a release made elsewhere today cannot fail the gate.
    uv export --quiet --frozen --all-packages --all-extras --no-default-groups --no-hashes \
        --no-emit-workspace --output-file "$work/constraints.txt"
    cd "$work"
    uv venv --quiet clean
    install() { uv pip install --quiet --python clean --constraints constraints.txt "$@"; }
    install dist/treadle_{core,cache,speculative,server}-*.whl "mlx[cpu]; sys_platform == 'linux'"
    clean/bin/python -I - <<'PYTHON'
    from importlib import import_module, metadata
    from importlib.util import find_spec

    for name in ("core", "cache", "speculative", "server"):
        import_module(f"treadle_{name}")
        print(f"treadle-{name} {metadata.version(f'treadle-{name}')} imports")
    assert find_spec("treadle_server.cli"), "the server's wheel has no command line"
    assert find_spec("mlx_vlm") is None, "only treadle-multimodal may bring mlx-vlm"
    PYTHON
    install dist/treadle_multimodal-*.whl
    clean/bin/python -I -c 'import treadle_multimodal; print("treadle-multimodal imports")'

# Install the git hooks, which run these recipes
hooks:
    uv run prek install
