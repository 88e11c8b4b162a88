# Each target is one script; `make` alone lists them.
.PHONY: help one_step check test test_all compat size lock docs sim proto resume kills bits parity quorum recovery goodput drill e2e gpu starts soak

help:
	@echo "make check   style, format, types           make test    tests, the first tier"
	@echo "make test_all  all tests (35 minutes)"
	@echo "make compat  every Python found here        make size    lines per package"
	@echo "make one_step  calls of one training step, with replica groups and without; renews docs/one_step.md"
	@echo "make lock    renew requirements*.lock        make docs    renew docs/config.md"
	@echo "make resume  killed and resumed, bit for bit  make proto   renew ft/rpc/generated"
	@echo "make kills   200 deaths while the last sums are on their way: one history (10 minutes)"
	@echo "make bits    groups that are killed do not change a bit of the weights; renews docs/bits.md (15 minutes)"
	@echo "make drill   every fault there is, three seeds, each beside its twin (an hour)"
	@echo "make e2e     every fault on every layout of the groups (an hour)"
	@echo "make quorum  what the lighthouse costs (20 minutes; PEER=PYTHON: beside torchft's)"
	@echo "make recovery  what kills, stops and storms cost a job of groups (an hour; PEER=PYTHON: beside torchft)"
	@echo "make goodput  tokens a second while processes die, beside restarts (two hours; PEER=PYTHON: and torchft); renews docs/goodput.md"
	@echo "make gpu PART=1|2|3  what only a GPU can say, ten minutes each; goes on where it was; writes docs/gpu.md (PYTHON=python3)"
	@echo "make starts  fifty starts with loader workers beside a live channel (10 minutes)"
	@echo "make soak    10,000 membership changes, and what they leave behind; renews docs/soak.md (hours; goes on where it was)"
	@echo "make sim     10,000 runs of the protocol"
	@echo "make parity  every layout against one process; renews docs/parity*.md (an hour on two cores)"

check:
	@./scripts/run_checks.sh

test:
	@./scripts/run_tests.sh

test_all:
	@./scripts/run_tests.sh --all

compat:
	@./scripts/run_compat.sh

size:
	@python3 tools/size.py

one_step:
	@.venv/bin/python tools/one_step.py --write docs/one_step.md
	@.venv/bin/python tools/one_step.py --groups 1

lock:
	@./scripts/lock.sh

docs:
	@.venv/bin/python tools/config_docs.py

proto:
	@./scripts/make_proto.sh

resume:
	@.venv/bin/python bench/resume.py

kills:
	@.venv/bin/python bench/last_bucket.py

bits:
	@.venv/bin/python bench/bits.py --write docs/bits.md

parity:
	@.venv/bin/python bench/parity.py --ranks 1,2,4 --write docs/parity.md
	@.venv/bin/python bench/parity.py --ranks 8 --write docs/parity_8_ranks.md

sim:
	@.venv/bin/python -m tests.simulator --seeds 10000

quorum:
	@.venv/bin/python bench/quorum.py $(if $(PEER),--peer $(PEER))
	@.venv/bin/python bench/quorum.py --heartbeats
	@.venv/bin/python bench/quorum.py --idle
	@.venv/bin/python bench/quorum.py --churn

recovery:
	@for what in kill stop storm lighthouse staggered killstorm; do .venv/bin/python bench/recovery.py $$what $(if $(PEER),--peer $(PEER)); done

drill:
	@for seed in 1 2 3; do .venv/bin/python bench/drill.py bench/drill.toml --groups 4 --minutes 3 --seed $$seed || exit 1; done

e2e:
	@PHAROS_E2E=all ./scripts/run_tests.sh tests/e2e

goodput:
	@.venv/bin/python bench/goodput.py --no-kills --write docs/goodput.md
	@.venv/bin/python bench/goodput.py $(if $(PEER),--peer $(PEER)) --write docs/goodput.md
	@.venv/bin/python bench/goodput.py $(if $(PEER),--peer $(PEER)) --mb 4 --minutes 4 --startup-s 30 --write docs/goodput.md

gpu:
	@$(or $(PYTHON),.venv/bin/python) bench/gpu.py --part $(or $(PART),1) --write docs/gpu.md $(if $(PEER),--peer-python $(PEER)) $(GPU)

starts:
	@.venv/bin/python bench/starts.py

soak: # in a /dev/shm of its own where it may have one, for what lies in the machine's is counted
	@if [ "$$(id -u)" = 0 ] && unshare --mount true 2>/dev/null; \
	  then exec unshare --mount sh -c 'mount -t tmpfs tmpfs /dev/shm && exec .venv/bin/python bench/soak.py --write docs/soak.md'; \
	  else exec .venv/bin/python bench/soak.py --write docs/soak.md; fi
