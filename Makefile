# `make demo` and `make test` do all the set-up themselves, in .venv. PYTHON=python3.12 make test takes another Python.
PYTHON ?= python3

.PHONY: demo test test-all lint

demo: .venv/app
	OMP_NUM_THREADS=1 .venv/bin/python -W ignore::FutureWarning -m torch.distributed.launch --nproc_per_node=2 train_multi_gpu.py --device cpu
	@echo; echo "Predicting images that the model was not trained on:"
	@.venv/bin/python predict.py $$(tr -d '\r' < $$(ls -td runs/*/split.csv | head -n 1) \
		| awk -F, '/,val$$/ && ++n % 60 == 1 { print $$1 }')
	@echo; echo "Next:"
	@echo "  .venv/bin/tensorboard --logdir runs                                   watch what happened"
	@echo "  .venv/bin/python train_single_gpu.py --data-path flowers              3,670 flower photos (download of 229 MB)"
	@echo "  .venv/bin/python train_single_gpu.py --data-path YOUR_PHOTOS          your own: a folder per class"

test: .venv/dev
	.venv/bin/python -m pytest -n 2 --dist loadfile -m "not slow"

test-all: .venv/dev
	.venv/bin/python -m pytest -n 2 --dist loadfile

lint: .venv/dev
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .

.venv/bin/python:
	$(PYTHON) -m venv .venv

.venv/app: requirements.txt | .venv/bin/python
	.venv/bin/python -m pip install --quiet -r requirements.txt
	@touch $@

.venv/dev: requirements-dev.txt .venv/app
	.venv/bin/python -m pip install --quiet -r requirements-dev.txt
	@touch $@
