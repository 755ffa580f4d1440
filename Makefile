# make setup | check | test | docs | shipped | spark | interop | matrix | demo | hunt | bench | notebook:
# each sets up what it needs; only Python 3.11+ and make must be there.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.ready
HUNT_MINUTES ?= 60
# What `make hunt` gives each of its stages, in minutes.
HUNT_SHARE ?= 5
CHAOS_SEED ?= 6
BENCH_OPS ?= 1000000,10000000

# Thousands of interpreters start here: what they compile is kept, whatever the environment holds.
export PYTHONDONTWRITEBYTECODE :=

PYTEST := $(BIN)/python -m pytest -q
# Tests in these folders only compute. Those of the others have real processes, sockets and disks,
# and wait for them: more run at a time than there are processors.
COMPUTE := tests/unit tests/property tests/simulation tools/bench/tests -n auto --dist worksteal
FAST := tests/unit -n auto --dist worksteal
PROCESSES := tests/integration -n 6 --dist loadgroup
STAGES := $(PYTHON) tests/gate/stages.py

.PHONY: setup size lint types imports static unit integration browser check test attacks chromium deploy-tools java docs shipped proto spark spark-all interop interop-clients remoting-clients interop-all fail-over mqadmin matrix matrix-all demo chaos hunt hunt-tests soak determinism mutants peer-fuzz clean-histories small-histories chaos-all chaos-mutants leader-kills bench bench-peers bench-spark notebook coverage clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Python 3.11 or newer is needed: make setup PYTHON=python3.11")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade -c constraints.txt "pip>=25.1"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --build-constraint constraints.txt --group dev -e .
	touch $(STAMP)

lint: setup
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m ruff check .

types: setup
	$(BIN)/python -m mypy

imports: setup
	$(BIN)/lint-imports

size: setup
	$(BIN)/python -m tests.gate.size

static: lint types imports size

# All that only computes; nothing here depends on how fast the machine is.
unit: setup
	$(PYTEST) -m "not hunt" --durations=25 $(COMPUTE)

integration: setup
	$(PYTEST) -m "not hunt" --durations=25 $(PROCESSES)

# In a process of its own: a browser leaves an event loop running, which no asyncio test bears.
browser: setup chromium
	$(PYTEST) -m "not hunt" --durations=5 tests/browser

check: setup
	@$(STAGES) unit-fast --beside static

unit-fast: setup
	$(PYTEST) -m "not slow and not hunt" $(FAST)

# Goes on after a stage that failed, and names all failures at the end.
test: setup chromium deploy-tools
	@$(STAGES) unit integration --beside static browser

# The browser tests drive Debian's chromium; without one they are skipped and say so.
chromium:
	@command -v chromium >/dev/null || { test "$$(id -u)" = 0 && command -v apt-get >/dev/null && apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium >/dev/null; } || echo "No browser, so no browser tests: install the package chromium, as root: apt-get install chromium"

# These read the files in deploy/; without them those tests are skipped and say so. helm is no package
# of Debian's: it is used where it is installed.
deploy-tools:
	@command -v promtool >/dev/null && command -v docker-compose >/dev/null && command -v haproxy >/dev/null && command -v keepalived >/dev/null || { test "$$(id -u)" = 0 && command -v apt-get >/dev/null && apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends prometheus docker-compose haproxy keepalived >/dev/null; } || echo "Some files in deploy/ are not read by their tools: as root, apt-get install prometheus docker-compose haproxy keepalived"

# Spark needs a Java runtime of version 17 or later; without one its tests are skipped and say so.
java:
	@java -version 2>&1 | grep -qE '"(1[7-9]|[2-9][0-9])' || { test "$$(id -u)" = 0 && command -v apt-get >/dev/null && apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends openjdk-17-jre-headless >/dev/null; } || echo "No Java 17, so no Spark: install a JRE 17 or later, as root: apt-get install openjdk-17-jre-headless"

# Two sessions: one of them plans or waits while the other computes.
spark: setup java
	$(PYTEST) -m "not hunt" tests/spark --durations=10 -n 2 --dist worksteal

spark-all: setup java
	$(PYTEST) tests/spark --durations=10 -n 2 --dist worksteal

# Clients that were not written here, unchanged, from the registries this machine is set to. The
# C++ client is there for x86-64 only; the others need node, Go, Java 17 with Maven, and Rust 1.85.
# Tests of one that is missing are skipped and say so. `make interop` is a round with those that are
# there soonest; `make interop-all` builds every one, a minute for the Rust client alone.
INTEROP := $(VENV)/interop
CPP_CLIENT := rocketmq==0.4.4
JS_CLIENT := ali-ons@3.12.0 urllib@2
GRPC_PYTHON_CLIENT := rocketmq-python-client==5.1.2
GRPC_NODE_CLIENT := rocketmq-client-nodejs@1.0.8
JAVA_CLIENTS := 4.9.7 5.5.0
INTEROP_TESTS := $(PYTEST) -rs --durations=10 -n 4 --dist worksteal tests/interop
PIP_INTO := -m pip install --quiet --disable-pip-version-check

interop-clients: setup
	test -x $(INTEROP)/bin/python || $(PYTHON) -m venv $(INTEROP)
	test "$$(uname -m)" != x86_64 || $(INTEROP)/bin/python $(PIP_INTO) "$(CPP_CLIENT)"
	test -x $(INTEROP)/grpc/bin/python || $(PYTHON) -m venv $(INTEROP)/grpc
	$(INTEROP)/grpc/bin/python $(PIP_INTO) "$(GRPC_PYTHON_CLIENT)"
	! command -v npm >/dev/null || test -d $(INTEROP)/node_modules/ali-ons || npm install --silent --no-audit --no-fund --no-package-lock --no-save --prefix $(INTEROP) $(JS_CLIENT) $(GRPC_NODE_CLIENT)
	! command -v mvn >/dev/null || $(MAKE) --no-print-directory $(INTEROP)/java-$(lastword $(JAVA_CLIENTS))/complete

remoting-clients: interop-clients
	! command -v go >/dev/null || $(MAKE) --no-print-directory $(INTEROP)/remoting_go
	! command -v mvn >/dev/null || $(MAKE) --no-print-directory $(JAVA_CLIENTS:%=$(INTEROP)/java-%/RemotingLoad.class) $(INTEROP)/grpc_java/GrpcClient.class $(INTEROP)/spring/SpringLoad.class

interop: interop-clients
	$(INTEROP_TESTS) -m "not hunt"

interop-all: interop-clients
	! command -v go >/dev/null || { mkdir -p $(INTEROP)/go && cp tests/interop/grpc_go/* $(INTEROP)/go && cd $(INTEROP)/go && go mod tidy -e 2>/dev/null && go build -o ../grpc_go .; }
	$(MAKE) --no-print-directory remoting-clients
	! command -v cargo >/dev/null || { mkdir -p $(INTEROP)/rust && cp -Rp tests/interop/grpc_rust/. $(INTEROP)/rust && cargo build --quiet --manifest-path $(INTEROP)/rust/Cargo.toml --target-dir $(INTEROP)/rust/target && cp $(INTEROP)/rust/target/debug/grpc_rust $(INTEROP)/grpc_rust; }
	$(INTEROP_TESTS)

# The client and mqadmin of a version; with the newest RocketMQ's proxy.
$(INTEROP)/java-%/complete: tests/interop/java/pom.xml
	rm -rf $(@D)
	mvn -q -B -f $< -Drocketmq=$* $(if $(filter $(lastword $(JAVA_CLIENTS)),$*),-Pproxy) dependency:copy-dependencies -DincludeScope=runtime -DoutputDirectory=$(abspath $(@D))
	touch $@

$(INTEROP)/grpc_java/complete $(INTEROP)/spring/complete: $(INTEROP)/%/complete: tests/interop/%/pom.xml
	rm -rf $(@D)
	mvn -q -B -f $< dependency:copy-dependencies -DincludeScope=runtime -DoutputDirectory=$(abspath $(@D))
	touch $@

$(INTEROP)/grpc_java/GrpcClient.class: tests/interop/grpc_java/GrpcClient.java $(INTEROP)/grpc_java/complete
	! command -v javac >/dev/null || javac -nowarn -cp "$(@D)/*" -d $(@D) $<

$(INTEROP)/spring/SpringLoad.class: tests/interop/spring/SpringLoad.java tests/interop/java/Lines.java $(INTEROP)/spring/complete
	! command -v javac >/dev/null || javac -nowarn -cp "$(@D)/*" -d $(@D) $(filter %.java,$^)

$(INTEROP)/java-%/RemotingLoad.class: tests/interop/java/RemotingLoad.java tests/interop/java/Lines.java $(INTEROP)/java-%/complete
	! command -v javac >/dev/null || javac -nowarn -cp "$(@D)/*" -d $(@D) $(filter %.java,$^)

$(INTEROP)/remoting_go: $(wildcard tests/interop/remoting_go/*)
	mkdir -p $(INTEROP)/go-remoting && cp $^ $(INTEROP)/go-remoting
	cd $(INTEROP)/go-remoting && go mod tidy -e 2>/dev/null && go build -o ../remoting_go .

# How long unmodified clients stand still while a leader fails: 40 minutes for the whole table, on a
# machine with nothing else to do. FAIL_OVER="--faults kill --clients go --repetitions 1" is a part.
FAIL_OVER ?=

fail-over: remoting-clients deploy-tools
	$(BIN)/python -m tests.fail_over $(FAIL_OVER)

# Writes the table of what each command of mqadmin does; make interop compares it.
mqadmin: setup $(JAVA_CLIENTS:%=$(INTEROP)/java-%/complete)
	DLEDGER_WRITE_PAGES=1 $(PYTEST) tests/interop/test_mqadmin.py

# The gRPC protocol compiled from its interface file, and its types; a test compares what is stored.
proto: setup
	$(BIN)/python -m grpc_tools.protoc -I . --descriptor_set_out=dledger/proxy/messaging.desc --pyi_out=. dledger/proxy/messaging.proto

# Services while a leader is in trouble: a part of them; `matrix-all` takes every service, every trouble.
matrix: setup
	$(PYTEST) -rP -m "not hunt" tests/matrix

matrix-all: setup
	$(PYTEST) -rP tests/matrix

# The site of the documentation, in $(SITE): it loads nothing from elsewhere, so it can be opened as
# files. What builds it reads the product's sources and does not need the product installed.
DOCS := $(VENV)/docs
SITE := build/docs

$(DOCS)/.ready: pyproject.toml constraints.txt
	test -x $(DOCS)/bin/python || $(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -m pip install --quiet --disable-pip-version-check --upgrade -c constraints.txt "pip>=25.1"
	$(DOCS)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --group docs
	touch $@

docs: $(DOCS)/.ready
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/python -m mkdocs build --strict --site-dir $(SITE)
	@echo "Open $(SITE)/index.html, or serve it: python3 -m http.server --directory $(SITE)"

# What users get, used as they would: the wheel in empty environments, the files of settings, and
# every command and piece of code of the documentation as it stands there.
shipped: setup
	$(PYTEST) -m "not hunt" tests/shipped --durations=10 -n 6 --dist loadgroup

bench-spark: setup
	$(BIN)/dledger history bench --ops $(BENCH_OPS)

# The lab is a folder of its own: no test and no check depends on it.
LAB := $(VENV)/lab

notebook: setup
	$(BIN)/python -m dledger.spark_jobs.notebooks.build
	test -d $(LAB) || $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --target $(LAB) "jupyterlab==4.6.6"
	PYTHONPATH=$(LAB) JUPYTER_PATH=$(LAB)/share/jupyter $(BIN)/python -m jupyterlab $(if $(filter 0,$(shell id -u)),--allow-root) --app-dir=$(LAB)/share/jupyter/lab spark_jobs/notebooks/check_a_history.ipynb

demo: setup
	$(BIN)/dledger demo

chaos: setup
	$(BIN)/dledger chaos run --workload mixed --faults all --time 60 --interval 4 --seed $(CHAOS_SEED)

# What strangers can do, on real brokers with default settings under a light load: three minutes.
attacks: setup
	$(PYTEST) -n 2 --dist loadscope tests/integration/test_attacks_*.py tests/unit/dledger/backup

# What finds more the longer it runs, within HUNT_MINUTES: by hand, on a machine with nothing else
# to do. The summary names what ran and what did not.
hunt: setup chromium java
	@$(STAGES) --minutes $(HUNT_MINUTES) soak determinism hunt-tests chaos-all mutants peer-fuzz small-histories clean-histories leader-kills matrix-all interop-all spark-all chaos-mutants

# The tests that draw seeds, plans and histories draw five times as many.
hunt-tests: setup
	DLEDGER_TEST_EXTENT=5 $(PYTEST) -m "hunt and not planted" $(COMPUTE) tests/integration tests/shipped

soak: setup
	$(BIN)/dledger sim soak --minutes $(HUNT_SHARE) --jobs 2 --at-least 0.5

determinism: setup
	$(BIN)/dledger sim determinism --seeds $$((4 * $(HUNT_SHARE))) --duration 300

mutants: setup
	$(BIN)/python -m tests.mutants hunt --fast --jobs 2

# Hostile frames at the peer port, over all states of a member.
peer-fuzz: setup
	DLEDGER_PEER_FUZZ_FRAMES=$$((100000 * $(HUNT_SHARE))) $(PYTEST) tests/property/test_peer_port_fuzz.py

# Clean histories: no checker raises an alarm.
clean-histories: setup
	DLEDGER_CLEAN_HISTORIES=$$((3000 * $(HUNT_SHARE))) $(PYTEST) -n auto tests/property/test_checker_mutations.py -k clean_histories

# Small histories of a queue: the checker agrees with exhaustive search on each.
small-histories: setup
	DLEDGER_SMALL_HISTORIES=$$((300000 * $(HUNT_SHARE))) $(PYTEST) -n auto tests/property/test_small_histories.py

chaos-all: setup
	$(BIN)/dledger chaos run --workload mixed --faults all --time $$((60 * $(HUNT_SHARE))) --seed $(CHAOS_SEED)

# Of the twelve it searches: real time is luck, and on a busy machine two plans miss some.
chaos-mutants: setup
	$(PYTEST) -m planted tests/integration
	$(BIN)/python -m tests.mutants brokers --runs 2 --at-least 8

leader-kills: setup
	$(BIN)/dledger chaos run --plan docs/operate/chaos/plans/leader-kills.json

bench: setup
	$(BIN)/dledger bench produce --size 256 --inflight 64 --batch 1 --duration 10

# NATS, RocketMQ and this project in turn: 25 minutes on a machine with nothing else to do. Needs Go
# and Java with Maven. A short run, which leaves the page alone: PEERS="--rounds 1 --seconds 1".
PEERS ?= --docs

bench-peers: setup
	$(BIN)/python -m tools.bench $(PEERS)

coverage: setup
	$(BIN)/python -m coverage run -m pytest -q
	$(BIN)/python -m coverage combine -q
	$(BIN)/python -m coverage report

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache
