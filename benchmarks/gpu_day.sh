#!/usr/bin/env bash
# Everything worth measuring on a GPU that is available for a few minutes, most valuable first.
#
#     benchmarks/gpu_day.sh OUT [PART ...]          OUT: a folder for the results; parts: see below
#     REHEARSE=1 benchmarks/gpu_day.sh OUT [PART ...]   the same on two logical CPU devices, as small as possible
#
# Each part is a process of its own with its own limit. A part that fails or is stopped does not end the others, and
# what it has written stays. After LIMIT seconds (default: 540) no part begins. OUT/summary.txt has one line for each
# part; OUT/gpu_day.tar.gz has every file, and is written after each part.
#
# It needs the packages of pyproject.toml, and execnb and IPython for the lessons. PYTHON names the interpreter.
set -uo pipefail
cd "$(dirname "$0")/.."
out=$(mkdir -p "${1:?usage: benchmarks/gpu_day.sh OUT [PART ...]}" && cd "$1" && pwd); shift
chosen=" $* " python=${PYTHON:-python3} limit=${LIMIT:-540}
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 TF_CPP_MIN_LOG_LEVEL=2 MPLBACKEND=Agg
xtts_nb() { "$python" -c 'from xtts_nb.app.cli import main; main()' "$@"; }
export -f xtts_nb; export python

released='--layers 30 --width 1024 --heads 16 --batch-size 8' scale=full few='--rounds 3 --budget 1'
if [ -n "${REHEARSE:-}" ]; then
    export XTTS_NB_CPU_CARDS=2 CUDA_VISIBLE_DEVICES=-1
    released='--layers 1 --width 64 --heads 2 --batch-size 2' scale=tiny few='--rounds 2 --budget 0.1'
fi

part() {   # NAME SECONDS COMMAND: the command is one string, for bash
    local name=$1 seconds=$2 command=$3 begun=$SECONDS code
    [[ $chosen == '  ' || $chosen == *" $name "* ]] || return 0
    if [ "$begun" -ge "$limit" ]; then echo "$name: skipped, $limit s are over" | tee -a "$out/summary.txt"; return; fi
    touch "$out/.begun"
    timeout -k 5 "$seconds" bash -c "$command" >"$out/$name.txt" 2>&1
    code=$?
    find benchmarks -maxdepth 1 -name '*.json' -newer "$out/.begun" -exec mv -t "$out" {} +   # its records
    echo "$name: exit code $code, $((SECONDS - begun)) s" | tee -a "$out/summary.txt"
    tar -C "$out" --exclude gpu_day.tar.gz -czf "$out/gpu_day.tar.gz" .
}

lesson() { part "$1" 90 "$python benchmarks/lesson.py nbs/$1.ipynb $out --scale $scale"; }
one_step() { part "step_$1" 80 "$3 $python benchmarks/one_step.py $released $2"; }   # NAME OPTIONS ENVIRONMENT

controls=$("$python" -c 'from benchmarks.diagnosis.programs.cases import cases
print(*(c.name for c in cases("development") if c.healthy))')

part devices 30 "$python -c 'import tensorflow as tf; print(tf.config.list_physical_devices())'; nvidia-smi || true"
lesson 30_trainer_xla
part busy 90 "$python benchmarks/busy.py $released --seconds 4 $few --record"
lesson 10_data_tf_native
lesson 50_monitoring
one_step released '--codes 220' ''
lesson 60_speech
lesson 40_dual_gpu
lesson 20_model
lesson 00_config
one_step odd '--codes 219' ''
one_step rows '--codes 220 --batch-size 32' ''
one_step command_buffers '--codes 220' 'XLA_FLAGS=--xla_gpu_command_buffer_scheduling_mode=CONCURRENT'
one_step cublaslt '--codes 220' 'XLA_FLAGS=--xla_gpu_enable_cublaslt=true'
part step 90 "xtts_nb bench train $released $few --record"
part speech 90 "xtts_nb bench say $few --record"
part split 90 "xtts_nb bench dual $few --record"
part controls 90 "xtts_nb bench diagnose --repeat 0 $controls"
cat "$out/summary.txt"
