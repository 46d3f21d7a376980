# make demo | test | build | develop | lib | clean.   VENV=.venv  PYTHON=python3.11  OUT=demo  PYTEST_ARGS=..
VENV ?= .venv
PYTHON ?= $(shell for p in python3.11 python3; do $$p -c '' 2>/dev/null && echo $$p && break; done)
PYTHON := $(or $(PYTHON),python3)
OUT ?= demo
DEMO_ARGS ?= --rate 0.4 --refine-seconds 30 # slowly enough for two cores; a faster machine needs neither

venv := $(abspath $(VENV))
python := $(venv)/bin/python
stamps := $(venv)/stamps
sources := CMakeLists.txt package.xml setup.py $(wildcard cmake/* action/* msg/* srv/* scripts/* config/* launch/* rviz/* foxglove/*) \
  $(shell find spirula_gpu spirula_ros -name '*.py' -o -name '*.h' -o -name '*.cpp' -o -name '*.cu*')
export PIP_DISABLE_PIP_VERSION_CHECK = 1

.PHONY: demo test build develop lib clean
.DELETE_ON_ERROR:

# A recording of a synthetic room, played through real ROS 2 topics into the node.
demo: build
	rm -rf $(OUT)/room $(OUT)/room.truth.npz
	$(venv)/bin/spirula bag synthetic $(OUT)/room
	$(venv)/bin/spirula replay $(OUT)/room --via-ros --holdout 8 $(DEMO_ARGS) --out $(OUT)
	@echo "pictures: $(abspath $(OUT))/compare.png, $(abspath $(OUT))/renders/    report: $(abspath $(OUT))/report.json"

# Tests of the installed package. PYTEST_ARGS="-k gate -x" narrows them.
test: build $(stamps)/test
	SPIRULA_REQUIRE_LAUNCH=1 $(venv)/bin/pytest $(PYTEST_ARGS)

build: $(stamps)/installed

# For developers: installed, but every file a link into the checkout.
develop: build lib
	$(python) tools/develop.py

# For developers: the native library alone, into spirula_gpu/lib of the checkout.
lib:
	PATH="$$PATH:$(venv)/bin" && cmake -S . -B build/lib -DSPIRULA_MESSAGES=OFF $(CMAKE_ARGS) > build/lib.log 2>&1 || { cat build/lib.log; exit 1; } \
	  && cmake --build build/lib --parallel && mkdir -p spirula_gpu/lib && install build/lib/libspirula_*.so spirula_gpu/lib/

clean:
	rm -rf build install log demo spirula_gpu/lib *.egg-info $(stamps)/installed

$(python):
	tools/system_packages.sh $(PYTHON)
	$(PYTHON) -m venv $(venv)

$(stamps)/requirements: requirements-dev.txt | $(python)
	$(python) -m pip install -q -r requirements-dev.txt
	@mkdir -p $(stamps) && touch $@

$(stamps)/installed: $(sources) $(stamps)/requirements
	$(python) -m pip install -q --no-build-isolation --no-deps .
	@touch $@

# launch, launch_testing, ros2cli and tf2_msgs where no ROS installation provides them: for tests alone.
$(stamps)/test: tools/test_ros.py $(stamps)/requirements
	$(python) tools/test_ros.py
	@touch $@
