# `make` without a target lists the targets.
.PHONY: help one_step parity_experts_8_ranks check test test_all compat size lock docs sim proto corpus resume kills bits parity quorum recovery goodput drill long e2e gpu starts soak

help:
	@echo "make check   style, format, types           make test    first tier of the tests"
	@echo "make test_all  both tiers (35 minutes)          make long    the tests that both leave out for time; updates docs/long_output.txt"
	@echo "make compat  tests that need no torch, with every Python on this machine   make size    lines per package"
	@echo "make one_step  traces the calls of one training step, with and without replica groups; updates docs/one_step.md"
	@echo "make lock    update requirements*.lock       make docs    update docs/config.md"
	@echo "make resume  compares a killed and resumed run with an uninterrupted one, bit for bit   make proto   update ft/rpc/generated"
	@echo "make corpus  prepare_data beside encode_batch, killed at random, and a store of 400 million documents (two hours; extras hf, zstd)"
	@echo "make kills   kills a group during the last all-reduce, 200 times; checks that survivors agree (3 minutes)"
	@echo "make bits    checks that kills do not change a bit of the weights; updates docs/bits.md (15 minutes)"
	@echo "make drill   injects every kind of fault, three seeds, compares each run with a fault-free twin (an hour)"
	@echo "make e2e     injects every kind of fault in every layout of the groups (an hour)"
	@echo "make quorum  cost of the lighthouse (20 minutes; PEER=PYTHON: compared with torchft's)"
	@echo "make recovery  recovery times after kills, stops and repeated kills (an hour; PEER=PYTHON: compared with torchft)"
	@echo "make goodput  tokens/s while processes are killed, compared with restarts (two hours; PEER=PYTHON: and torchft); updates docs/goodput.md"
	@echo "make gpu PART=1|2|3  measurements on a GPU, ten minutes each; a repeated call continues; writes docs/gpu.md (PYTHON=..., PEER=..., GPU='flags')"
	@echo "make starts  starts a program with loader workers and a live gRPC channel, fifty times (10 minutes)"
	@echo "make soak    10,000 membership changes; checks for leaks; updates docs/soak.md (40 minutes; a repeated call continues)"
	@echo "make sim     simulates 10,000 runs of the protocol"
	@echo "make parity  compares every layout with one process; updates docs/parity*.md (hours on two cores; CONFIG=my.toml: that model, without updating)"

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

corpus:
	@for what in open speed kills; do .venv/bin/python bench/corpus.py $$what || exit 1; done

resume:
	@.venv/bin/python bench/resume.py

kills:
	@.venv/bin/python bench/last_bucket.py

bits:
	@.venv/bin/python bench/bits.py --write docs/bits.md

# a mixture of $(1) blocks, $(2) of them dense, with a shared expert, both balances, and as many heads as eight ranks divide
EXPERTS = --model.n_layers=$(1) --model.dense_layers=$(2) --model.dim=64 --model.n_heads=8 --model.n_kv_heads=4 --model.head_dim=16 --model.hidden_dim=128 \
	--model.expert_hidden_dim=32 --model.shared_hidden_dim=16 --model.balance_loss=0.01 --model.router_init_std=0.5 \
	--model.router_score=sigmoid --training.seq_len=32
EIGHT = .venv/bin/python bench/parity.py configs/moe.toml --ranks 8 --write docs/parity_experts_8_ranks.md
parity:
	@.venv/bin/python bench/parity.py $(CONFIG) --ranks 1,2,4 $(if $(CONFIG),,--write docs/parity.md)
	@.venv/bin/python bench/parity.py $(CONFIG) --ranks 8 $(if $(CONFIG),,--write docs/parity_8_ranks.md)
	@[ -n "$(CONFIG)" ] || .venv/bin/python bench/parity.py configs/moe.toml --ranks 1,2,4 --write docs/parity_experts.md -- $(call EXPERTS,8,2)
	@[ -n "$(CONFIG)" ] || $(MAKE) parity_experts_8_ranks

parity_experts_8_ranks:
	@$(EIGHT) --section "Data, context and expert parallelism" --only '^(?!pp)(?!.*tp)' -- $(call EXPERTS,4,1)
	@$(EIGHT) --section "With tensor parallelism" --only '^(?!pp).*tp' -- $(call EXPERTS,4,1)
	@$(EIGHT) --section "With pipelines" --only '^pp(?!.*tp)' -- $(call EXPERTS,8,2)
	@$(EIGHT) --section "Pipelines and tensor parallelism" --only '^pp(?!.*ddp).*tp' -- $(call EXPERTS,8,2)
	@$(EIGHT) --section "Pipelines, replicas and tensor parallelism" --only '^pp.*ddp.*tp' -- $(call EXPERTS,8,2)

sim:
	@.venv/bin/python -m tests.simulator --seeds 10000

quorum:
	@.venv/bin/python bench/quorum.py $(if $(PEER),--peer $(PEER))
	@.venv/bin/python bench/quorum.py --heartbeats
	@.venv/bin/python bench/quorum.py --idle
	@.venv/bin/python bench/quorum.py --churn

recovery:
	@for what in kill stop storm lighthouse staggered killstorm; do .venv/bin/python bench/recovery.py $$what $(if $(PEER),--peer $(PEER)) || exit 1; done

drill:
	@for seed in 1 2 3; do .venv/bin/python bench/drill.py bench/drill.toml --groups 4 --minutes 3 --seed $$seed || exit 1; done

long:
	@bash -o pipefail -c '{ date -u +%F; ./scripts/run_tests.sh --long; } | sed /^rootdir/d | tee docs/long_output.txt'

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

soak: # with a private /dev/shm if permitted, as its files are counted
	@if [ "$$(id -u)" = 0 ] && unshare --mount true 2>/dev/null; \
	  then exec unshare --mount sh -c 'mount -t tmpfs tmpfs /dev/shm && exec .venv/bin/python bench/soak.py --write docs/soak.md'; \
	  else exec .venv/bin/python bench/soak.py --write docs/soak.md; fi
