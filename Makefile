PYTHON ?= python3
BIN := .venv/bin
WORKERS ?= 3
LONG ?= long
CORE := .venv/.core
STAMP := .venv/.installed
QUICK := $(addprefix tests/test_,engine.py ledger.py config.py registry.py split.py codec.py seams.py latency.py)

.PHONY: demo test test-long quick lint bench docs clean

$(CORE): pyproject.toml constraints.txt
	@echo "1. installing splitcast and the few packages it needs into .venv (torch is the large one)"
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt --editable .
	@touch $(CORE)

$(STAMP): $(CORE)
	@echo "installing all extras and the tools of developers into .venv"
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $(STAMP)

demo: $(CORE)  ## compare the paper's scheme with its baselines on embedded data, then point at the figure
	@rm -rf demo
	@echo "2. training six schemes on the embedded part of MNIST, 60 rounds each, on the same batches"
	$(BIN)/splitcast compare sfl-ga sfl psl sfl-gb sfl-tc sfl-replay --sfl-replay.samples 500 --sfl-replay.steps 10 \
		--rounds 60 --batch 16 --eval-every 3 --out demo
	@echo "3. making a page of it"
	$(BIN)/splitcast report demo
	@echo "the picture: demo/comparison.png; the page: file://$(CURDIR)/demo/report.html"

# one thread each, because the models are tiny and threads only get in each other's way; more workers than cores, since
# those who wait for FLARE leave theirs; bytecode is kept whatever the environment says: hundreds of processes start
TESTS := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest

test: $(STAMP)  ## the tests but those marked `long`
	$(TESTS) -n $(WORKERS) --dist loadfile --no-loadscope-reorder

test-long: $(STAMP)  ## rare events, and more cases of what `make test` proves with few
	$(TESTS) -m '$(LONG)' -n $(WORKERS) --dist loadfile --no-loadscope-reorder

quick: $(STAMP)  ## what a developer runs all the time: under a minute
	$(TESTS) $(QUICK)

lint: $(STAMP)  ## style, types, layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(STAMP)  ## every benchmark
	for what in engine allocate gb codecs ccc flare; do $(BIN)/splitcast bench $$what; done

docs: $(STAMP)  ## the documentation as a site of plain files: site/index.html
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

clean:
	rm -rf .venv build dist demo site
